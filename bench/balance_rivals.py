"""Balancing rules in training, same tokens and seed: python bench/balance_rivals.py [key=value ...]

Trains one model after the other in one process: the eight rules, `aux_loss` with three
coefficients, and the rules that look at one micro-batch with micro-batches of two sizes. Prints the
max violation and the loss by step, the spread of the gradient norm, and for `aux_loss` the angle
between its gradient and that of the text at the routers' weights. Takes the same overrides as
pretrain.py; `--csv FILE` keeps every step.
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
from pathlib import Path
from typing import Any

import torch
from common import Row, show
from torch import Tensor

from megatron_ext.config.compose import compose
from megatron_ext.layers.router import BalancedRouter
from megatron_ext.parallel import runtime

# 16 sequences a step: micro-batches of 2 and of all 16. Warm-up: a bias follows slow routers only.
SETTINGS = (
    "experiment=nano_sample",
    "run.dir=bench-rivals-unused",
    "train.steps=40",
    "train.batch_tokens=2048",
    "data.sequence_length=128",
    "optim.warmup_tokens=20480",
)
SMALL, LARGE = 2, 16
SPLIT_FREE = ("quantile", "quantile_exact", "sign", "reject", "none")
COEFFICIENTS = (0.001, 0.01, 0.1)
FIELDS = ("mode", "micro_batch_size", "step", "loss", "max_violation", "gradient_norm", "cosine")


def modes() -> list[tuple[str, int, list[str]]]:
    """Name, micro-batch size, and overrides of each run."""
    found = [(rule, SMALL, [f"balance={rule}"]) for rule in SPLIT_FREE]
    for size in (SMALL, LARGE):
        for rule in ("microbatch_mean", "threshold"):
            found.append((rule, size, [f"balance={rule}"]))
        for value in COEFFICIENTS:
            words = ["balance=aux_loss", f"balance.aux_coefficient={value}"]
            found.append((f"aux_loss {value:g}", size, words))
    return found


class RouterGradients:
    """Separates, at each router's weight, the gradient of its own auxiliary loss from the rest.

    The auxiliary losses of later layers reach the weight through the hidden states; that part
    stays with the rest.
    """

    def __init__(self, routers: list[BalancedRouter]) -> None:
        self._routers = routers
        self._sums = [torch.zeros_like(router.weight) for router in routers]
        for router, total in zip(routers, self._sums, strict=True):
            self._watch(router, total)

    def _watch(self, router: BalancedRouter, total: Tensor) -> None:
        original = router.balancer.auxiliary_loss

        def auxiliary_loss(*args: Any, **options: Any) -> Tensor | None:
            loss = original(*args, **options)
            if loss is not None:
                (gradient,) = torch.autograd.grad(loss, router.weight, retain_graph=True)
                total.add_(gradient)
            return loss

        router.balancer.auxiliary_loss = auxiliary_loss

    def cosine(self, tokens: int) -> float:
        """Between both, mean over layers, before the update; forgets the step. NaN: no loss.

        Args:
            tokens: of the global batch, by whose number both gradients are divided.
        """
        found = []
        for router, total in zip(self._routers, self._sums, strict=True):
            own = total / tokens
            rest = router.weight.main_grad - own
            found.append(float((own * rest).sum() / (own.norm() * rest.norm())))
            total.zero_()
        return statistics.fmean(found)


def train(words: list[str]) -> dict[str, Any]:
    """One run: lists by step named as in `FIELDS`, `held_out` loss and the sampling `floor`."""
    from megatron_ext.train.balance import routers
    from megatron_ext.train.evaluate import held_out_loss
    from megatron_ext.train.state import build_state
    from megatron_ext.train.step import train_step

    config = compose(words)
    state = build_state(config, runtime.start(config.run))
    watch = RouterGradients(list(routers(state.chunks)))
    norms: list[float] = []
    cosines: list[float] = []

    def keep(loss: float, grad_norm: float) -> bool:
        norms.append(grad_norm)
        cosines.append(watch.cosine(config.train.batch_tokens))
        return True

    losses, violations = [], []
    for _ in range(config.train.steps):
        losses.append(train_step(state, keep)["loss"])
        violations.append(
            max(float(load.counts.max() / load.counts.double().mean() - 1) for load in state.loads)
        )
    held_out = held_out_loss(state)["eval/loss"]
    runtime.stop()
    experts = config.model.experts
    mean = config.train.batch_tokens * experts.top_k / experts.num_experts
    return {
        "loss": losses,
        "max_violation": violations,
        "gradient_norm": norms,
        "cosine": cosines,
        "held_out": held_out,
        "floor": math.sqrt(2 * math.log(experts.num_experts) / mean),
    }


def row(name: str, size: int, found: dict[str, Any]) -> Row:
    """One line of the table: steps, medians of the second half, gradients."""
    violations, half = found["max_violation"], len(found["loss"]) // 2
    cells: Row = {"rule": name, "micro-batch": size}
    for step in (1, 2, 5, 10, 20, 30, 40):
        if step <= len(violations):
            cells[f"step {step}"] = f"{violations[step - 1]:.2f}"
    late = statistics.median(violations[half:])
    norms, cosines = found["gradient_norm"][half:], found["cosine"]
    cells |= {
        "median": f"{late:.2f}",
        "/ floor": f"{late / found['floor']:.1f}",
        "loss": f"{statistics.fmean(found['loss'][-5:]):.3f}",
        "held out": f"{found['held_out']:.4f}",
        "norm": f"{statistics.fmean(norms):.3f}",
        "variance of norm": f"{statistics.pvariance(norms):.4f}",
    }
    if math.isfinite(cosines[0]):
        cells["cosine, first 5"] = f"{statistics.fmean(cosines[:5]):.3f}"
        cells["cosine, second half"] = f"{statistics.fmean(cosines[half:]):.3f}"
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--csv", type=Path, help="also write every step there")
    parser.add_argument("--only", default="", help="modes whose name begins like this")
    options, overrides = parser.parse_known_args()
    runtime.quiet()
    rows: list[Row] = []
    lines: list[list[Any]] = []
    for name, size, words in modes():
        if not name.startswith(options.only):
            continue
        found = train([*SETTINGS, f"train.micro_batch_size={size}", *words, *overrides])
        rows.append(row(name, size, found))
        print(rows[-1], flush=True)
        columns = [found[field] for field in FIELDS[3:]]
        for step, values in enumerate(zip(*columns, strict=True), start=1):
            cells = ["" if math.isnan(value) else f"{value:.5g}" for value in values]
            lines.append([name, size, step, *cells])
        if options.csv:  # after each, since a run takes a minute
            with options.csv.open("w", newline="", encoding="utf-8") as file:
                csv.writer(file, lineterminator="\n").writerows([FIELDS, *lines])
    show("max violation (worst layer) by step; losses; gradients", rows)


if __name__ == "__main__":
    main()
