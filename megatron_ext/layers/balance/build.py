"""From `balance.rule` to the module."""

from __future__ import annotations

import torch

from megatron_ext.config.schema import BalanceOptions, BalanceRule
from megatron_ext.layers.balance.base import Balancer
from megatron_ext.layers.balance.classic import AuxiliaryLossRule, SignRule
from megatron_ext.layers.balance.microbatch import MicrobatchMeanRule, ThresholdRule
from megatron_ext.layers.balance.quantile import ExactQuantileRule, QuantileRule
from megatron_ext.layers.balance.reject import RejectRule

RULES: dict[BalanceRule, type[Balancer]] = {
    BalanceRule.quantile: QuantileRule,
    BalanceRule.quantile_exact: ExactQuantileRule,
    BalanceRule.microbatch_mean: MicrobatchMeanRule,
    BalanceRule.sign: SignRule,
    BalanceRule.aux_loss: AuxiliaryLossRule,
    BalanceRule.threshold: ThresholdRule,
    BalanceRule.reject: RejectRule,
    BalanceRule.none: Balancer,
}


def build_balancer(
    options: BalanceOptions,
    *,
    num_experts: int,
    top_k: int,
    device: torch.device | int | str | None = None,
) -> Balancer:
    """The balancer of one layer.

    Args:
        options: group `balance`.
        num_experts: E.
        top_k: k, at most E.
        device: of the state; None: the current CUDA device.
    """
    rule = RULES[options.rule]
    return rule(options, num_experts=num_experts, top_k=top_k, device=device)
