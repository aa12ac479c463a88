"""Balancing rules on synthetic streams: python bench/balance.py [--json FILE] [--quick].

Three tables: the max violation by step for every rule, where each micro-batch is of one domain; the
error and the size of histograms; and the time of routing, counting and the update, at the sizes of
Kimi K3 on a GPU, else at smaller ones.

The streams are Gaussian logits with an offset for each expert, and one for each expert and domain.
`aux_loss` is not among the rules: it acts on the weights of a router, and there is none.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from common import Row, default_device, milliseconds, show
from torch import Tensor

from megatron_ext.config.schema import BalanceOptions, BalanceRule, BinPlacement
from megatron_ext.layers.balance import Balancer, TokenGroup, build_balancer
from megatron_ext.ops.quantile import Bins, next_bias, quantile_exact, select_top_k

ALONE = TokenGroup()


@dataclass
class Stream:
    """Router scores of the micro-batches of one step.

    Attributes:
        experts: E.
        micro_batches: in a step.
        tokens: in a micro-batch.
        spread: standard deviation of a token's logits.
        offsets: that of an expert's mean logit.
        domains: number of domains, of which a micro-batch has one; each as often as the others.
        shift: standard deviation of what a domain adds to an expert's mean.
    """

    experts: int
    micro_batches: int
    tokens: int
    spread: float = 1.0
    offsets: float = 0.5
    domains: int = 8
    shift: float = 0.0
    seed: int = 0
    device: torch.device = torch.device("cpu")  # noqa: RUF009 (immutable)

    def __post_init__(self) -> None:
        self.generator = torch.Generator(self.device).manual_seed(self.seed)
        self.mean = self.offsets * self._normal(self.experts)
        self.domain = self.shift * self._normal(self.domains, self.experts)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, device=self.device)

    def step(self) -> list[Tensor]:
        """Scores [tokens, E] of each micro-batch."""
        return [
            torch.sigmoid(
                self.spread * self._normal(self.tokens, self.experts)
                + self.mean
                + self.domain[i % self.domains]
            )
            for i in range(self.micro_batches)
        ]

    def floor(self, top_k: int) -> float:
        """The violation of a perfectly level router, from sampling alone."""
        mean = self.micro_batches * self.tokens * top_k / self.experts
        return math.sqrt(2 * math.log(self.experts) / mean)


def violation(counts: Tensor) -> float:
    """Load of the most loaded expert over the mean, less one."""
    return float(counts.max() / counts.double().mean() - 1)


def run_step(balancer: Balancer, batches: list[Tensor]) -> float:
    """Route and count one step, update; the max violation in it."""
    for scores in batches:
        selection = balancer.select(scores, valid=None, tokens=ALONE)
        balancer.observe(scores, selection, valid=None, tokens=ALONE)
    return violation(balancer.update(0).counts)


def rules(stream: Callable[[], Stream], *, top_k: int, steps: int) -> list[Row]:
    """Max violation at each step, for every rule on the same stream."""
    rows: list[Row] = []
    for rule in BalanceRule:
        if rule is BalanceRule.aux_loss:
            continue
        source = stream()
        balancer = build_balancer(
            BalanceOptions(rule=rule), num_experts=source.experts, top_k=top_k, device=source.device
        )
        series = [run_step(balancer, source.step()) for _ in range(steps)]
        rows.append(
            {
                "rule": rule.name,
                "floor": source.floor(top_k),
                "series": series,
                "median_from_5": statistics.median(series[5:]),
                "worst_from_5": max(series[5:]),
            }
        )
    return rows


def histograms(stream: Callable[[], Stream], *, top_k: int, steps: int) -> list[Row]:
    """Error of histograms against sorting, over a run that each of them drives itself.

    `rank_error`: share of an expert's load that lies strictly between the two quantiles, root mean
    square over experts and steps from the third on; `first`: in the first step.
    """
    variants = [Bins(n, BinPlacement.uniform) for n in (128, 256, 1000)]
    variants += [Bins(n, BinPlacement.centred) for n in (32, 64, 128, 256)]
    rows: list[Row] = []
    for bins in variants:
        source = stream()
        bias = torch.zeros(source.experts, device=source.device)
        ranks, values = [], []
        for _ in range(steps):
            scores = torch.cat(source.step())
            cutoff = select_top_k(scores + bias, top_k).cutoff
            histogram = bins.zeros(source.experts, device=source.device)
            bins.add(histogram, scores, bias=bias, cutoff=cutoff)
            found = bins.quantile(histogram, bias=bias, top_k=top_k).value
            margins = cutoff.unsqueeze(1) - scores
            exact = quantile_exact(margins, top_k=top_k)
            low, high = torch.minimum(found, exact) + 1e-7, torch.maximum(found, exact) - 1e-7
            between = ((margins > low) & (margins < high)).sum(0)
            mean = len(scores) * top_k / source.experts
            ranks.append(float((between / mean).square().mean().sqrt()))
            values.append(float((found - exact).abs().max()))
            tokens = torch.tensor(len(scores), device=source.device)
            bias = next_bias(found, bias=bias, top_k=top_k, tokens=tokens)
        rows.append(
            {
                "placement": bins.placement.name,
                "bins": bins.number,
                "bytes": histogram.numel() * histogram.element_size(),
                "rank_error": statistics.fmean(ranks[2:]),
                "rank_error_first": ranks[0],
                "value_error": max(values[2:]),
            }
        )
    return rows


def timings(tokens: int, *, experts: int, top_k: int, device: torch.device) -> Row:
    """Milliseconds of one layer's parts."""
    scores = torch.sigmoid(torch.randn(tokens, experts, device=device))
    options = BalanceOptions(rule=BalanceRule.quantile)
    balancer = build_balancer(options, num_experts=experts, top_k=top_k, device=device)
    selection = balancer.select(scores, valid=None, tokens=ALONE)

    def measure(function: Callable[[], object]) -> float:
        return milliseconds(function, device=device)

    return {
        "tokens": tokens,
        "top_k_alone": measure(lambda: scores.topk(top_k, dim=1)),
        "select": measure(lambda: balancer.select(scores, valid=None, tokens=ALONE)),
        "observe": measure(lambda: balancer.observe(scores, selection, valid=None, tokens=ALONE)),
        "update": measure(lambda: balancer.update(0)),
        "sort_instead": measure(
            lambda: quantile_exact(selection.cutoff.unsqueeze(1) - scores, top_k=top_k)
        ),
    }


def shown(rows: list[Row]) -> list[Row]:
    """Rows for a table: of a series a few steps."""
    steps = (0, 1, 2, 4, 9, 19, 29, 49)
    flat = []
    for row in rows:
        series = row.get("series", [])
        cells = {key: value for key, value in row.items() if key != "series"}
        flat.append(cells | {f"step {i + 1}": series[i] for i in steps if i < len(series)})
    return flat


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write all numbers here")
    parser.add_argument("--quick", action="store_true", help="fewer steps, experts and tokens")
    arguments = parser.parse_args()
    device = default_device()
    large = device.type == "cuda"
    experts, top_k, tokens = (64, 4, 128) if arguments.quick else (256, 8, 512)
    if large:
        experts, top_k, tokens = 896, 16, 1024
    steps = 10 if arguments.quick else 50

    def stream(shift: float, spread: float = 1.0) -> Stream:
        return Stream(
            experts=experts,
            micro_batches=32 if large else 16,
            tokens=tokens,
            shift=shift,
            spread=spread,
            offsets=0.5 * spread,
            device=device,
        )

    report: dict[str, list[Row]] = {}
    for shift in (0.0, 0.5):
        name = f"max violation, {experts} experts, top {top_k}, domain shift {shift}"
        report[name] = rules(lambda shift=shift: stream(shift), top_k=top_k, steps=steps)
    for spread in (1.0, 0.05):
        name = f"histograms, {experts} experts, top {top_k}, spread of logits {spread}"
        report[name] = histograms(
            lambda spread=spread: stream(0.0, spread), top_k=top_k, steps=min(steps, 8)
        )
    sizes = (8192, 65536) if large else (1024,) if arguments.quick else (8192,)
    report[f"milliseconds, 896 experts, top 16, {device.type}"] = [
        timings(size, experts=896, top_k=16, device=device) for size in sizes
    ]
    for name, rows in report.items():
        show(name, shown(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
