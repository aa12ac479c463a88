"""Whole training steps beside a model of public parts: python bench/public_model.py [--cases ...]

`mini` with a plain residual and with `residual=block`, and `small` (316 M parameters, 8 layers of
width 1024, blocks of two, vocabulary 32768) at 1 and 4 sequences of 8192 tokens a micro-batch. Ours
is the code path of pretrain.py on one rank; the other is the same model from fla's kernels,
torch.compile, torch's grouped_mm and fused AdamW, with the same weights, tokens and optimizer, in
the same process. Its first loss and gradient norm must be ours, else the program ends with code 1.

Prints step time, tokens/s, what the GPU was busy, kernels a layer and micro-batch, peak memory and
the ratio. Other words are overrides of every case. Without a GPU or fla a small `nano`, with
formulas in place of fla's kernels: that shows that the program works, and nothing about speed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from common import GIB, Row, finish, free_memory, gpu_kernels
from megatron.core.process_groups_config import ProcessGroupCollection
from support.public_kernels import PublicKernels, from_fla, stand_ins
from support.public_training import PublicModel, PublicTrainer
from torch import Tensor

from megatron_ext.checkpoint.state import unwrap
from megatron_ext.config.compose import compose
from megatron_ext.config.schema import RunConfig
from megatron_ext.data.batches import MicroBatch, micro_batches
from megatron_ext.data.stream import TokenStream
from megatron_ext.model.count import flops_per_token
from megatron_ext.ops.kda import fla
from megatron_ext.parallel import runtime
from megatron_ext.parallel.mesh import build_mesh
from megatron_ext.train.state import TrainState, build_state
from megatron_ext.train.step import train_step

COMMON = [
    "data=sample",
    "run.dir=bench-public-model-unused",
    "optim.schedule=constant",
    "optim.lr=1e-4",
    "optim.warmup_tokens=0",
]
BF16 = ["run.precision=bf16"]
MINI = [*BF16, "model=mini", "train.batch_tokens=65536", "train.micro_batch_size=4"]
SMALL = [
    *BF16,
    "model.name=small",
    "model.num_layers=8",
    "model.first_dense_layers=1",
    "model.hidden_size=1024",
    "model.feed_forward_size=4096",
    "model.vocab_size=32768",
    "model.init_std=0.02",
    *(f"model.kda.{n}" for n in ("num_heads=8", "head_dim=128", "value_dim=128")),
    *(f"model.kda.{n}" for n in ("decay_rank=128", "output_gate_rank=128")),
    *(f"model.mla.{n}" for n in ("num_heads=8", "q_lora_rank=512", "kv_lora_rank=256")),
    *(f"model.mla.{n}" for n in ("qk_nope_head_dim=128", "qk_rope_head_dim=64", "v_head_dim=128")),
    *(f"model.experts.{n}" for n in ("num_experts=32", "top_k=4", "latent_size=512")),
    *(f"model.experts.{n}" for n in ("feed_forward_size=512", "shared_feed_forward_size=512")),
    "residual=block",
    "residual.block_size=2",
    "data.sequence_length=8192",
]
CASES = {
    "mini": MINI,
    "mini block": [*MINI, "residual=block"],
    "small x1": [*SMALL, "train.batch_tokens=16384", "train.micro_batch_size=1"],
    "small x4": [*SMALL, "train.batch_tokens=32768", "train.micro_batch_size=4"],
}
TOY = ["residual=block", "residual.block_size=2", "residual.query_std=0.03", "optim.eps=1e-5"]
TOY += ["data.sequence_length=64", "train.batch_tokens=256", "train.micro_batch_size=2"]
ON_CPU = {"toy": TOY}
# Of the first step, from equal weights. bf16: other roundings, and sums of experts in bf16.
ALLOWED = {"bf16": {"loss": 1e-3, "grad_norm": 5e-2}, "fp32": {"loss": 1e-5, "grad_norm": 1e-4}}


def timed(
    step: Callable[[], dict[str, float]],
    config: RunConfig,
    *,
    vocab_size: int,
    steps: int,
    device: torch.device,
) -> Row:
    """Warm up, time, profile one step."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    values = [step() for _ in range(3)]
    _synchronize(device)
    begin = time.perf_counter()
    values += [step() for _ in range(steps)]
    _synchronize(device)
    took = (time.perf_counter() - begin) / steps
    tokens, length = config.train.batch_tokens, config.data.sequence_length
    flops = flops_per_token(config.model, vocab_size=vocab_size, sequence_length=length)
    row: Row = {
        "step ms": 1e3 * took,
        "tokens/s": tokens / took,
        "TFLOP/s": tokens * flops / took / 1e12,
        "last loss": values[-1]["loss"],
        "losses": [value["loss"] for value in values],
        "norms": [value["grad_norm"] for value in values],
    }
    if on_gpu:
        row["peak GiB"] = torch.cuda.max_memory_allocated() / GIB
        found = gpu_kernels(step)
        passes = tokens // (length * config.train.micro_batch_size) * config.model.num_layers
        row |= {
            "GPU ms": found.milliseconds,
            "GPU busy": f"{found.milliseconds / 10 / took:.0f} %",
            "kernels": found.launches,
            "kernels a layer": found.launches / passes,
        }
    return row


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def weights_of(state: TrainState) -> dict[str, Tensor]:
    """Copies of our weights by name; what an optimizer asks of them stays."""
    found = {}
    for name, parameter in unwrap(state.chunks[0]).named_parameters():
        found[name] = parameter.detach().clone()
        found[name].no_weight_decay = getattr(parameter, "no_weight_decay", False)
    return found


def batches(config: RunConfig, data: TokenStream, *, step: int) -> Iterator[MicroBatch]:
    """The micro-batches that our step number `step`, from 0, reads."""
    return micro_batches(
        data,
        start=step * config.train.batch_tokens,
        batch_tokens=config.train.batch_tokens,
        sequence_length=config.data.sequence_length,
        micro_batch_size=config.train.micro_batch_size,
        data_rank=0,
        data_size=1,
    )


class PublicStep:
    """The rival's training step, over the same tokens as ours."""

    def __init__(
        self,
        weights: dict[str, Tensor],
        config: RunConfig,
        data: TokenStream,
        kernels: PublicKernels,
    ) -> None:
        self.trainer = PublicTrainer(PublicModel(weights, config, kernels), config.optim)
        self.config, self.data, self.done = config, data, 0

    def __call__(self) -> dict[str, float]:
        """The numbers of the next step."""
        feed = batches(self.config, self.data, step=self.done)
        self.done += 1
        return self.trainer.step(feed, tokens=self.config.train.batch_tokens)


def ours(
    config: RunConfig, place: runtime.Runtime, groups: ProcessGroupCollection, *, steps: int
) -> tuple[Row, dict[str, Tensor], TokenStream]:
    """Our row; the weights that it began with, and the tokens. Nothing else stays in memory."""
    state = build_state(config, place, mesh=groups)
    weights = weights_of(state)
    step = partial(train_step, state)
    row = timed(step, config, vocab_size=state.vocab_size, steps=steps, device=place.device)
    return {"version": "ours"} | row, weights, state.train_data


def both(
    config: RunConfig,
    place: runtime.Runtime,
    groups: ProcessGroupCollection,
    kernels: PublicKernels,
    *,
    steps: int,
) -> list[Row]:
    """Ours, then the rival from the same weights; one of them in memory at a time."""
    row, weights, data = ours(config, place, groups, steps=steps)
    free_memory()
    torch._dynamo.reset()  # each case has shapes of its own
    step = PublicStep(weights, config, data, kernels)
    vocab_size = len(weights["output_layer.weight"])
    other = timed(step, config, vocab_size=vocab_size, steps=steps, device=place.device)
    return [row, {"version": kernels.name} | other]


def differences(rows: list[Row], precision: str) -> list[str]:
    """What of the first step is not alike."""
    mine, theirs = rows
    lines = []
    for what, key in (("loss", "losses"), ("grad_norm", "norms")):
        off, allowed = abs(theirs[key][0] / mine[key][0] - 1), ALLOWED[precision][what]
        theirs[f"first {what} off"] = off
        if not off <= allowed:
            lines.append(f"first {what} off by {off:.1e}, allowed {allowed:.0e}")
    return lines


def shown(rows: list[Row]) -> list[Row]:
    """Without lists, and with the ratio."""
    table = [{key: row[key] for key in row if key not in ("losses", "norms")} for row in rows]
    mine, theirs = rows
    ratio: Row = {"version": "ours / public", "tokens/s": mine["tokens/s"] / theirs["tokens/s"]}
    if "GPU ms" in mine:
        ratio["GPU ms"] = mine["GPU ms"] / theirs["GPU ms"]
        ratio["kernels a layer"] = mine["kernels a layer"] / theirs["kernels a layer"]
    return [*table, ratio]


def main() -> None:
    """Measures and prints, the tables last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the numbers there")
    parser.add_argument("--cases", help=f"of {', '.join(CASES)}; separated by commas")
    parser.add_argument("--steps", type=int, default=5, help="timed steps")
    options, overrides = parser.parse_known_args()
    runtime.quiet()
    place = runtime.start(compose([*COMMON, *BF16]).run)
    on_gpu = fla.available(place.device)
    cases = CASES if on_gpu else ON_CPU
    names = options.cases.split(",") if options.cases else list(cases)
    configs = {name: compose([*COMMON, *cases[name], *overrides]) for name in names}
    groups = build_mesh(configs[names[0]].parallel)
    kernels = from_fla() if on_gpu else stand_ins()
    tables: dict[str, list[Row]] = {}
    failures = []
    for name, config in configs.items():
        precision = config.run.precision
        runtime.set_precision(precision)
        rows = both(config, place, groups, kernels, steps=options.steps)
        free_memory()
        failures += [f"{name}: {line}" for line in differences(rows, precision.value)]
        tables[f"{name}: {config.train.batch_tokens} tokens a step"] = shown(rows)
    runtime.stop()
    finish(tables, failures=failures, json_file=options.json)


if __name__ == "__main__":
    main()
