"""Balancing rules: state, invariance under splits, and that they level the load."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_ext.config.schema import BalanceOptions, BalanceRule
from megatron_ext.layers.balance import Balancer, TokenGroup, build_balancer
from megatron_ext.layers.balance.build import RULES
from megatron_ext.ops.quantile import LayerLoad

ALONE = TokenGroup()


def balancer(rule: BalanceRule, *, experts: int = 16, top_k: int = 4) -> Balancer:
    options = BalanceOptions(rule=rule)
    return build_balancer(options, num_experts=experts, top_k=top_k, device="cpu")


def step(rule: Balancer, batches: list[Tensor]) -> LayerLoad:
    for scores in batches:
        selection = rule.select(scores, valid=None, tokens=ALONE)
        rule.observe(scores, selection, valid=None, tokens=ALONE)
    return rule.update(layer=0)


@pytest.mark.parametrize("rule", list(RULES))
def test_half_precision_leaves_the_state_alone(rule: BalanceRule) -> None:
    module = balancer(rule)
    step(module, [torch.rand(64, 16)])
    before = {name: value.clone() for name, value in module.state_dict().items()}
    torch.nn.Sequential(module).to(torch.bfloat16).half().float()
    for name, value in module.state_dict().items():
        assert value.dtype is before[name].dtype
        assert torch.equal(value, before[name]), name
