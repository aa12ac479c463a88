"""Rules between options of balancing. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_ext.config.problem import Problem
from megatron_ext.config.schema import BalanceRule, BinPlacement, RunConfig

LARGEST_COUNT = 2**31 - 1


def balance_problems(config: RunConfig) -> Iterator[Problem]:
    """What is wrong in group `balance`, given single values in their ranges."""
    balance = config.balance
    if balance.placement is BinPlacement.centred and balance.bins % 2:
        yield Problem(
            f"balance.bins={balance.bins}: must be even for balance.placement=centred, which has "
            f"as many bins on either side (nearest {balance.bins + 1})",
            ("balance.bins", "balance.placement"),
        )
    counting = (BalanceRule.quantile, BalanceRule.reject)
    if balance.rule in counting and config.train.batch_tokens > LARGEST_COUNT:
        yield Problem(
            f"train.batch_tokens={config.train.batch_tokens}: must be at most {LARGEST_COUNT} for "
            f"balance.rule={balance.rule.name}, whose histograms count in 32 bits",
            ("train.batch_tokens", "balance.rule"),
        )
