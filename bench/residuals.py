"""Kinds of residuals, same tokens and seed: python bench/residuals.py [--json FILE] [key=value ...]

Trains one model after the other in one process, and prints the loss by step, the held-out loss, the
gradient norm of every layer, and for kinds with a softmax over depth its weights. Takes the same
overrides as pretrain.py. A second seed (`--seeds`) shows what is chance.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from common import Row, show

from megatron_ext.config.compose import compose
from megatron_ext.parallel import runtime

# What only some kinds have is left out of gradient norms, which are to be compared.
OWN = ("query", "key_weight", "scale")


def main() -> None:
    """Train every kind with every seed, print three tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the numbers there")
    parser.add_argument("--kinds", default="standard,block,full,shared")
    parser.add_argument("--seeds", default="1234")
    options, overrides = parser.parse_known_args()
    runtime.quiet()
    found: dict[str, dict[str, Any]] = {}
    for seed in options.seeds.split(","):
        for kind in options.kinds.split(","):
            words = [*overrides, f"residual={kind}", f"run.seed={seed}"]
            found[f"{kind} {seed}"] = train(words)
            if options.json:  # after each, since a run takes minutes
                options.json.write_text(json.dumps(found) + "\n")
    tables(found)


def train(words: list[str]) -> dict[str, Any]:
    """One run: `loss` by step, `held_out`, `gradient` norms [step][layer], `depth`, `seconds`."""
    from megatron_ext.checkpoint.state import unwrap
    from megatron_ext.observe.depth_health import depth_record
    from megatron_ext.train.depth_health import DepthWatch
    from megatron_ext.train.evaluate import held_out_loss
    from megatron_ext.train.state import build_state
    from megatron_ext.train.step import train_step

    config = compose(["run.dir=bench-residuals-unused", *words])
    state = build_state(config, runtime.start(config.run))
    gradients: list[list[float]] = []

    def keep(loss: float, grad_norm: float) -> bool:
        squares = torch.zeros(config.model.num_layers, dtype=torch.float64)
        for name, parameter in unwrap(state.chunks[0]).named_parameters():
            fields = name.split(".")
            if fields[:2] == ["decoder", "layers"] and fields[-1] not in OWN:
                squares[int(fields[2])] += parameter.main_grad.double().square().sum().cpu()
        gradients.append(squares.sqrt().tolist())
        return True

    watch = DepthWatch(state)
    losses, seconds, depth = [], [], None
    for step in range(config.train.steps):
        last = step == config.train.steps - 1
        if last:
            watch.begin()
        values = train_step(state, keep)
        losses.append(values["loss"])
        seconds.append(values["step_seconds"])
        if last and (mixes := watch.end()):
            depth = depth_record(mixes)
    held_out = held_out_loss(state)["eval/loss"]
    runtime.stop()
    print(f"{' '.join(words)}: held-out loss {held_out:.4f}", flush=True)
    return {
        "words": words,
        "loss": losses,
        "held_out": held_out,
        "gradient": gradients,
        "depth": depth,
        "step_seconds": statistics.median(seconds),
    }


def tables(found: dict[str, dict[str, Any]]) -> None:
    """Losses, gradient norms and weights of the last mix, one column a run."""
    steps = len(next(iter(found.values()))["loss"])
    parts = [range(steps * part // 8, steps * (part + 1) // 8) for part in range(8)]
    rows: list[Row] = [
        {
            "steps": f"{part.start + 1}-{part.stop}",
            **{run: f"{mean(record['loss'], part):.4f}" for run, record in found.items()},
        }
        for part in parts
        if len(part)
    ]
    rows.append({"steps": "held out"} | {r: f"{v['held_out']:.4f}" for r, v in found.items()})
    rows.append({"steps": "s a step"} | {r: f"{v['step_seconds']:.2f}" for r, v in found.items()})
    show("mean training loss, nats", rows)
    layers = range(len(next(iter(found.values()))["gradient"][0]))
    for title, part in (("first", parts[0]), ("last", parts[-1])):
        rows = [
            {
                "layer": layer,
                **{
                    run: f"{mean([g[layer] for g in record['gradient']], part):.4f}"
                    for run, record in found.items()
                },
            }
            for layer in layers
        ]
        show(f"mean gradient norm of a layer, {title} eighth of the steps", rows)
    for run, record in found.items():
        if record["depth"]:
            print(f"\n{run}: weights of the last mix {record['depth']['weights'][-1]}")
            print(f"{run}: entropy of every mix {record['depth']['entropy']}")


def mean(values: list[float], part: range) -> float:
    """Over some steps."""
    return statistics.fmean(values[step] for step in part)


if __name__ == "__main__":
    main()
