"""Speed of whole training steps: python bench/step.py [--json FILE] [--steps N] [key=value ...]

Takes the same overrides as pretrain.py and the same code path (data, schedule, optimizer); prints
the median step, tokens/s, model TFLOP/s, memory, the share of the KDA operators, and what the GPU
was busy with. Works on one rank and under torchrun; the table of rank 0 comes last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from common import gpu_kernels, kda_milliseconds

from megatron_ext.config.compose import compose
from megatron_ext.model.count import flops_per_token
from megatron_ext.parallel import runtime


def main() -> None:
    """Warm up, time, profile one step, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the numbers there")
    parser.add_argument("--steps", type=int, default=10, help="timed steps")
    options, overrides = parser.parse_known_args()
    runtime.quiet()
    from megatron_ext.train.state import build_state
    from megatron_ext.train.step import train_step
    from megatron_ext.train.throughput import peak_memory_gib

    config = compose(["run.dir=bench-step-unused", *overrides])
    place = runtime.start(config.run)
    state = build_state(config, place)
    begin = time.perf_counter()
    losses = [train_step(state)["loss"]]
    first = time.perf_counter() - begin
    losses += [train_step(state)["loss"] for _ in range(2)]
    seconds = []
    for _ in range(options.steps):
        values = train_step(state)
        losses.append(values["loss"])
        seconds.append(values["step_seconds"])
    memory = peak_memory_gib(place.device)
    step = statistics.median(seconds)
    flops = flops_per_token(
        config.model, vocab_size=state.vocab_size, sequence_length=config.data.sequence_length
    )
    result: dict[str, object] = {
        "device": torch.cuda.get_device_name() if place.device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "ranks": place.world_size,
        "overrides": overrides,
        "first_step_seconds": first,
        "step_seconds": step,
        "step_seconds_spread": [min(seconds), max(seconds)],
        "tokens_per_second": config.train.batch_tokens / step,
        "tflops_per_rank": config.train.batch_tokens * flops / step / place.world_size / 1e12,
        "memory_gib": memory,
        "losses": losses,
    }
    if place.device.type == "cuda":
        # With a CUDA graph a micro-batch's memory is reserved, and not allocated while it runs.
        result["reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
        result |= kernels(lambda: train_step(state), step)
    if place.rank == 0:
        print("\n" + "\n".join(f"{key:<20} {value}" for key, value in result.items()))
        if options.json:
            options.json.write_text(json.dumps(result, indent=2) + "\n")
    runtime.stop()


def kernels(run: Callable[[], object], step: float) -> dict[str, object]:
    """GPU time of one profiled step: all, KDA with norm, gate and convolution, the longest."""
    found = gpu_kernels(run)
    busy, kda = found.milliseconds / 1e3, kda_milliseconds(found) / 1e3
    return {
        "gpu_busy_seconds": busy,
        "gpu_busy_share": busy / step,
        "kernel_launches": found.launches,
        "kda_seconds": kda,
        "kda_share_of_gpu": kda / busy,
        "most": [
            (event.key[:60], event.count, round(event.self_device_time_total / 1e3, 2))
            for event in found.events[:12]
        ],
    }


if __name__ == "__main__":
    main()
