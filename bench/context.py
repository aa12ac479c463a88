"""Training steps by length: python bench/context.py [--lengths N ...] [--json FILE] [key=value ...]

`mini` in bfloat16 with full recomputation, 65,536 tokens a step or one sequence, whichever is more,
in one micro-batch, at 8K, 64K, 256K and 1M tokens a sequence: tokens/s, model TFLOP/s by the hybrid
count, peak memory, and what linear attention takes of the GPU's time. A length that does not fit
says so. Before that both kinds of attention alone, 8 heads, forward and backward, at the same
lengths, with the memory that they take beside their inputs and gradients.
Of 1M tokens one step is taken, its first, under the profiler: full attention alone takes minutes.

Other words are overrides as for pretrain.py. Also under torchrun, with as many ranks as
`parallel.context=N` and others ask for; there every length must fit. Without a GPU: `nano`, short.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from common import (
    Row,
    both_ways,
    extra_gib,
    finish,
    free_memory,
    gpu_kernels,
    kda_milliseconds,
    milliseconds,
)
from kda import call, inputs
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_ext.config.compose import compose
from megatron_ext.config.schema import Gate, KdaBackend
from megatron_ext.layers.core_attention import SdpaAttention
from megatron_ext.model.count import flops_per_token
from megatron_ext.parallel import runtime
from megatron_ext.parallel.mesh import build_mesh
from megatron_ext.train.state import build_state
from megatron_ext.train.step import train_step
from megatron_ext.train.throughput import peak_memory_gib

GPU_LENGTHS, CPU_LENGTHS = (8192, 65536, 262144, 1048576), (64, 256)
HEADS = 8  # as many as fit one GPU at a million tokens
ONCE = 1 << 20  # from this length on one step has to do


def words(length: int, *, large: bool) -> list[str]:
    """Overrides for one length."""
    tokens = max(length, 65536 if large else 256)
    return [
        f"model={'mini' if large else 'nano'}",
        "data=sample",
        "run.dir=bench-context-unused",
        f"run.precision={'bf16' if large else 'fp32'}",
        "train.recompute=full",
        "optim.schedule=constant",
        "optim.lr=1e-4",
        f"data.sequence_length={length}",
        f"train.batch_tokens={tokens}",
        f"train.micro_batch_size={tokens // length}",
    ]


def step_row(
    overrides: list[str], place: runtime.Runtime, groups: ProcessGroupCollection, *, steps: int
) -> Row:
    """One length, by a model of its own."""
    config = compose(overrides, world_size=place.world_size)
    length, tokens = config.data.sequence_length, config.train.batch_tokens
    state = build_state(config, place, mesh=groups)
    on_gpu, once = place.device.type == "cuda", length >= ONCE
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    taken: list[dict[str, float]] = []
    found = gpu_kernels(lambda: taken.append(train_step(state))) if on_gpu and once else None
    first = taken[0] if taken else train_step(state)
    again = [] if once else [train_step(state) for _ in range(steps)]
    step = statistics.median(values["step_seconds"] for values in again or [first])
    flops = flops_per_token(config.model, vocab_size=state.vocab_size, sequence_length=length)
    row: Row = {
        "tokens a sequence": length,
        "tokens a step": tokens,
        "first step s": first["step_seconds"],
        "step s": step,
        "tokens/s": tokens / step,
        "TFLOP/s a rank": tokens * flops / step / place.world_size / 1e12,
        "peak GiB": peak_memory_gib(place.device),
        "loss": [first, *again][-1]["loss"],
    }
    if on_gpu:
        found = found or gpu_kernels(lambda: train_step(state))
        own = kda_milliseconds(found)
        row |= {
            "GPU busy": f"{100 * found.milliseconds / 1e3 / step:.0f} %",
            "kernels": found.launches,
            "KDA share": f"{100 * own / found.milliseconds:.1f} %",
            "KDA us a token": 1e3 * own * place.world_size / tokens,
        }
    return row


def steps_table(chosen: dict[int, list[str]], place: runtime.Runtime, *, steps: int) -> list[Row]:
    """Every length in turn, in one process."""
    first = next(iter(chosen.values()))
    groups = build_mesh(compose(first, world_size=place.world_size).parallel)
    rows: list[Row] = []
    for length, given in chosen.items():
        try:
            rows.append(step_row(given, place, groups, steps=steps))
        except torch.cuda.OutOfMemoryError as error:
            if place.world_size > 1:
                raise  # the others wait for this rank
            rows.append({"tokens a sequence": length, "remark": str(error).split(".")[0]})
        free_memory()
        if place.rank == 0:
            print(rows[-1], flush=True)
    return rows


def operator_table(kind: str, lengths: tuple[int, ...], *, device: torch.device) -> list[Row]:
    """One kind of attention alone: time a token of linear attention must not depend on the length,
    nor memory a token of either."""
    both_kinds = {"linear": linear_attention, "full": full_attention}
    rows: list[Row] = []
    for length in lengths:
        try:
            both = both_kinds[kind](length, device)
            took = milliseconds(both, device=device, repeats=3, warm_up=1)
            rows.append(
                {
                    "tokens": length,
                    "fwd+bwd ms": took,
                    "us a token": 1e3 * took / length,
                    "extra GiB": extra_gib(both, device=device),
                }
            )
        except torch.cuda.OutOfMemoryError as error:
            rows.append({"tokens": length, "remark": str(error).split(".")[0]})
        free_memory()
        print(rows[-1], flush=True)
    return rows


def linear_attention(length: int, device: torch.device) -> Callable[[], object]:
    """Forward and backward of one sequence."""
    on_gpu = device.type == "cuda"
    heads, width, dtype = (HEADS, 128, torch.bfloat16) if on_gpu else (2, 32, torch.float32)
    tensors = inputs(heads, length, width, device=device, dtype=dtype)
    return both_ways(partial(call, tensors, gate=Gate.bounded, backend=KdaBackend.auto), tensors)


def full_attention(length: int, device: torch.device) -> Callable[[], object]:
    """The same, over heads of the widths of K3."""
    on_gpu = device.type == "cuda"
    heads, dtype = (HEADS, torch.bfloat16) if on_gpu else (2, torch.float32)
    core = SdpaAttention(
        TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1),
        num_heads=heads,
        k_channels=192,
        v_channels=128,
        softmax_scale=192**-0.5,
    )
    tensors = [
        torch.randn(1, length, heads, width, device=device, dtype=dtype, requires_grad=True)
        for width in (192, 192, 128)
    ]
    return both_ways(partial(core, *tensors), tensors)


def main() -> None:
    """Measures and prints, the tables last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the numbers there")
    parser.add_argument("--lengths", help="tokens a sequence, as 8192,65536")
    parser.add_argument("--steps", type=int, default=2, help="timed steps a length")
    parser.add_argument("--only", choices=("steps", "operator"), help="one of the tables")
    options, overrides = parser.parse_known_args()
    runtime.quiet()
    large = torch.cuda.is_available()
    lengths = GPU_LENGTHS if large else CPU_LENGTHS
    if options.lengths:
        lengths = tuple(int(length) for length in options.lengths.split(","))
    chosen = {length: [*words(length, large=large), *overrides] for length in lengths}
    place = runtime.start(compose(chosen[lengths[0]]).run)
    tables: dict[str, list[Row]] = {}
    if options.only != "steps" and place.world_size == 1:
        for kind in ("linear", "full"):
            title = f"{kind} attention alone, {HEADS if large else 2} heads, forward and backward"
            tables[title] = operator_table(kind, lengths, device=place.device)
    if options.only != "operator":
        title = f"steps of {'mini' if large else 'nano'}, {' '.join(overrides) or 'defaults'}"
        tables[title] = steps_table(chosen, place, steps=options.steps)
    runtime.stop()
    if place.rank == 0:
        finish(tables, json_file=options.json)


if __name__ == "__main__":
    main()
