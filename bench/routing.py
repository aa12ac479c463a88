"""Routing after its matrix product: python bench/routing.py [--json FILE] [--quick]

From logits of K3's 896 experts to maps and weights and back, the statistics of the balancer, and
the update of its bias once a step, at 8,192 and 65,536 tokens: our kernels beside plain torch in
one process. The logits have the spread of a new router's; the bias is one that levels them. Maps
that differ are counted, given the same scores, and so are integers of the statistics.

`GPU ms` sums kernels; `ms` has waits for the host too; `extra GiB` is the peak of a forward pass
with statistics and a backward pass. Without a GPU, and with --quick, all is small and in torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from common import Row, default_device, extra_gib, finish, free_memory, measured, start
from torch import Tensor

from megatron_ext.config.schema import (
    BalanceOptions,
    BinPlacement,
    KernelBackend,
    KernelOptions,
)
from megatron_ext.layers.balance import Selection, TokenGroup, build_balancer
from megatron_ext.layers.balance.base import Balancer
from megatron_ext.ops.quantile import select_top_k
from megatron_ext.ops.router import Routing, route_tokens

EXPERTS, TOP_K = 896, 16
PLACEMENTS = {BinPlacement.centred: 128, BinPlacement.uniform: 1000}
SUMMED = ("routing, forward", "statistics", "update")
UPDATES = 3  # until the bias stands still


@dataclass
class Case:
    """Routing of some tokens by one backend.

    Attributes:
        logits: [T, E], a leaf.
        balancer: rule `quantile`, its bias levelled.
    """

    logits: Tensor
    balancer: Balancer
    backend: KernelBackend

    def route(self) -> Routing:
        """Forward."""
        return route_tokens(
            self.logits,
            self.balancer.bias,
            top_k=TOP_K,
            scaling=1.0,
            kernels=KernelOptions(backend=self.backend),
        )

    def observe(self, routing: Routing) -> None:
        """The statistics."""
        selection = Selection(routing.map, routing.cutoff)
        self.balancer.observe(routing.scores.detach(), selection, valid=None, tokens=TokenGroup())

    def whole(self, upstream: Tensor) -> None:
        """Forward, statistics and backward."""
        routing = self.route()
        self.observe(routing)
        torch.autograd.grad(routing.weights, self.logits, upstream)


def build(
    tokens: int, *, placement: BinPlacement, backend: KernelBackend, device: torch.device
) -> Case:
    """A case with a bias that has been updated."""
    generator = torch.Generator(device=device).manual_seed(0)
    logits = torch.randn(tokens, EXPERTS, generator=generator, device=device)
    logits += 0.5 * torch.randn(EXPERTS, generator=generator, device=device)
    options = BalanceOptions(bins=PLACEMENTS[placement], placement=placement)
    balancer = build_balancer(options, num_experts=EXPERTS, top_k=TOP_K, device=device)
    balancer.kernels = KernelOptions(backend=backend)
    case = Case(logits.requires_grad_(), balancer, backend)
    for _ in range(UPDATES):
        case.observe(case.route())
        balancer.update(0)
    return case


def rows_of(case: Case, *, device: torch.device) -> list[Row]:
    """Parts of a step, and their sum."""
    routing = case.route()
    upstream = torch.randn_like(routing.weights)

    def evaluate() -> None:
        with torch.no_grad():
            case.route()

    parts: dict[str, Callable[[], object]] = {
        "routing without gradients": evaluate,
        "routing, forward": case.route,
        "routing, backward": lambda: torch.autograd.grad(
            routing.weights, case.logits, upstream, retain_graph=True
        ),
        "statistics": lambda: case.observe(routing),
        "update": lambda: case.balancer.update(0),
    }
    rows = [measured(name, part, device=device) for name, part in parts.items()]
    added = {
        key: sum(row[key] for row in rows if row["part"] in SUMMED)
        for key in rows[0]
        if key != "part"
    }
    free_memory()
    extra = extra_gib(lambda: case.whole(upstream), device=device)
    return [*rows, {"part": "forward + statistics + update", **added, "extra GiB": extra}]


def differences(case: Case, other: Case) -> list[str]:
    """What is not the same in our case and in torch's, for the scores of ours."""
    other.balancer.load_state_dict(case.balancer.state_dict())
    ours = case.route()
    map, cutoff = select_top_k(ours.scores + case.balancer.bias, TOP_K)
    found = {
        "maps": int((map != ours.map).sum()),
        "cut-offs": int((cutoff != ours.cutoff).sum()),
    }
    for one in (case, other):
        one.balancer.discard()
        one.observe(ours)
    pairs = zip(case.balancer.statistics(), other.balancer.statistics(), strict=True)
    found["statistics"] = sum(int((a != b).sum()) for a, b in pairs)
    for one in (case, other):
        one.balancer.discard()
    return [f"{name}: {number} differ" for name, number in found.items() if number]


def main() -> None:
    """Measures and prints, the tables last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the numbers there")
    parser.add_argument("--quick", action="store_true", help="few tokens")
    options = parser.parse_args()
    device = default_device()
    start()
    large = device.type == "cuda" and not options.quick
    backends = [KernelBackend.dense]
    if device.type == "cuda":
        backends.append(KernelBackend.triton)
    tables: dict[str, list[Row]] = {}
    failures: list[str] = []
    for tokens in (8192, 65536) if large else (128,):
        for placement, bins in PLACEMENTS.items():
            cases = []
            rows: list[Row] = []
            for backend in backends:
                case = build(tokens, placement=placement, backend=backend, device=device)
                rows += [{"backend": backend.name, **row} for row in rows_of(case, device=device)]
                cases.append(case)
            title = f"{tokens} tokens x {EXPERTS}, top {TOP_K}, {bins} {placement.name} bins"
            tables[title] = rows
            failures += [f"{title}: {wrong}" for wrong in differences(cases[-1], cases[0])]
            del cases, case
            free_memory()
    finish(tables, failures=failures, json_file=options.json)


if __name__ == "__main__":
    main()
