"""Balancing levels the load as far as sampling allows, also where micro-batches differ."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from torch import Tensor

from megatron_ext.config.schema import BalanceOptions, BalanceRule
from megatron_ext.layers.balance import TokenGroup, build_balancer

ALONE = TokenGroup()


class Stream:
    """Sigmoid scores: Gaussian logits, with an offset for each expert, and for each domain."""

    def __init__(self, *, experts: int, micro_batches: int, tokens: int, shift: float) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.shape = (tokens, experts)
        self.offsets = 0.5 * torch.randn(experts, generator=self.generator)
        domains = torch.randn(micro_batches, experts, generator=self.generator)
        self.domains = shift * domains

    def step(self) -> list[Tensor]:
        return [
            torch.sigmoid(torch.randn(self.shape, generator=self.generator) + self.offsets + domain)
            for domain in self.domains
        ]


def violations(rule: BalanceRule, stream: Stream, *, top_k: int, steps: int) -> list[float]:
    """Max violation of each step, as a multiple of what sampling leaves: sqrt(2 ln E / mean)."""
    experts = stream.shape[1]
    balancer = build_balancer(
        BalanceOptions(rule=rule), num_experts=experts, top_k=top_k, device="cpu"
    )
    series = []
    for _ in range(steps):
        for scores in stream.step():
            selection = balancer.select(scores, valid=None, tokens=ALONE)
            balancer.observe(scores, selection, valid=None, tokens=ALONE)
        load = balancer.update(layer=0)
        mean = float(load.tokens) * top_k / experts
        floor = math.sqrt(2 * math.log(experts) / mean)
        series.append((float(load.counts.max()) / mean - 1) / floor)
    return series


@pytest.mark.parametrize(
    ("experts", "top_k", "micro_batches", "tokens"), [(64, 4, 8, 512), (896, 16, 2, 1024)]
)
def test_an_iid_stream_is_level_to_the_sampling_floor(
    experts: int, top_k: int, micro_batches: int, tokens: int
) -> None:
    stream = Stream(experts=experts, micro_batches=micro_batches, tokens=tokens, shift=0.0)
    series = violations(BalanceRule.quantile, stream, top_k=top_k, steps=50)
    assert series[0] > 10
    assert statistics.median(series[5:]) <= 1.3
    assert max(series[5:]) <= 2.0


def test_only_pooled_quantiles_level_micro_batches_of_different_domains() -> None:
    """The mean of the domains' quantiles is not the quantile of all tokens, at any step."""
    series = {
        rule: violations(
            rule,
            Stream(experts=64, micro_batches=8, tokens=512, shift=0.7),
            top_k=4,
            steps=20,
        )[5:]
        for rule in (BalanceRule.quantile, BalanceRule.microbatch_mean, BalanceRule.none)
    }
    assert statistics.median(series[BalanceRule.quantile]) <= 1.3
    assert max(series[BalanceRule.quantile]) <= 2.0
    assert min(series[BalanceRule.microbatch_mean]) > 3.0
    assert min(series[BalanceRule.none]) > min(series[BalanceRule.microbatch_mean])


def test_the_rivals_do_what_they_promise() -> None:
    """Max violation over the floor at the end, on the same iid stream."""
    last = {}
    for rule in (BalanceRule.sign, BalanceRule.threshold, BalanceRule.reject):
        stream = Stream(experts=64, micro_batches=4, tokens=512, shift=0.0)
        last[rule] = violations(rule, stream, top_k=4, steps=30)
    assert max(last[BalanceRule.threshold]) == 0  # every expert takes its share of a micro-batch
    assert last[BalanceRule.reject][-1] < 0.2 * last[BalanceRule.reject][0]
    # A step of 1e-3 a step is slow against offsets of some tenths of a score.
    assert last[BalanceRule.sign][-1] > 0.5 * last[BalanceRule.sign][0]
