"""What the benchmarks share: time, GPU kernels and memory of a call, errors, tables."""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from megatron_ext.config.schema import Precision, RunOptions
from megatron_ext.parallel import runtime

GIB = 2.0**30
# What an H200 sustains: a large bfloat16 product, FLOP/s, and a large copy, bytes/s.
H200_FLOPS, H200_BANDWIDTH = 790e12, 4.3e12

# Parts of the names of kernels: linear attention with its norm, gate and convolution; cuDNN's last.
KDA_KERNELS = (
    "kda",
    "gla",
    "delta",
    "l2norm",
    "local_cumsum",
    "recompute_w_u",
    "conv1d",
    "solve",
    "qkv_conv",
    "k_prep",
    "k_scan",
    "k_bwd",
)

Row = dict[str, Any]


def default_device() -> torch.device:
    """The GPU, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def start() -> torch.device:
    """Start the process as a bf16 run does, with the kernel variants chosen for this GPU before;
    for benchmarks of operators that need no configuration."""
    runtime.start(RunOptions(precision=Precision.bf16))
    return default_device()


def machine() -> str:
    """One line on where the numbers come from."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return f"{name}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def milliseconds(
    function: Callable[[], object], *, device: torch.device, repeats: int = 10, warm_up: int = 3
) -> float:
    """Median of a call, by events on a GPU."""
    for _ in range(warm_up):
        function()
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            function()
            stop.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(stop))
        else:
            begin = time.perf_counter()
            function()
            times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


def both_ways(function: Callable[[], Tensor], leaves: Sequence[Tensor]) -> Callable[[], object]:
    """Forward and backward of a function, to the gradients of `leaves`."""
    with torch.no_grad():
        upstream = torch.randn_like(function())
    return lambda: torch.autograd.grad(function(), leaves, upstream)


class Kernels(NamedTuple):
    """GPU work of a call.

    Attributes:
        milliseconds: sum over kernels and copies: what it costs when the GPU is the limit, however
            long the host takes to launch them.
        launches: their number.
        events: by name, the longest first; of torch's profiler.
    """

    milliseconds: float
    launches: int
    events: list[Any]


def gpu_kernels(function: Callable[[], object]) -> Kernels:
    """Profile one call on a GPU."""
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as record:
        function()
        torch.cuda.synchronize()
    on_gpu = torch.autograd.DeviceType.CUDA
    events = [
        event
        for event in record.key_averages()
        if event.self_device_time_total > 0 and event.device_type == on_gpu
    ]
    events.sort(key=lambda event: -event.self_device_time_total)
    return Kernels(
        sum(event.self_device_time_total for event in events) / 1e3,
        sum(event.count for event in events),
        events,
    )


def kda_milliseconds(kernels: Kernels) -> float:
    """What linear attention has of it."""
    return sum(
        event.self_device_time_total / 1e3
        for event in kernels.events
        if any(part in event.key.lower() for part in KDA_KERNELS)
    )


def measured(name: str, function: Callable[[], object], *, device: torch.device) -> Row:
    """A row of name and time, and on a GPU what its kernels need."""
    row: Row = {"part": name, "ms": milliseconds(function, device=device)}
    if device.type == "cuda":
        found = gpu_kernels(function)
        row |= {"GPU ms": found.milliseconds, "kernels": found.launches}
    return row


def extra_gib(function: Callable[[], object], *, device: torch.device) -> float | None:
    """Peak memory of a call beside what was there before; None on a CPU."""
    if device.type != "cuda":
        return None
    free_memory()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / GIB


def free_memory() -> None:
    """Let go of what nothing holds any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def saved_bytes(function: Callable[[], object], *, known: Sequence[Tensor]) -> int:
    """Bytes that a call keeps for its backward pass beside the `known` tensors."""
    seen = {x.untyped_storage().data_ptr() for x in known}
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in seen:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        made = function()  # alive until here: no address is used twice
    del made
    return sum(kept.values())


def relative_error(found: Tensor, exact: Tensor) -> float:
    """Relative L2 distance; NaN is infinite."""
    exact = exact.detach().double()
    distance = (found.detach().double() - exact).norm() / exact.norm().clamp(min=1e-30)
    return float(distance) if distance == distance else float("inf")


def show(title: str, rows: Sequence[Row]) -> None:
    """Print rows as a table; a cell that a row lacks, or None, is a dash."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    print(f"\n{title}\n| " + " | ".join(columns) + " |\n|" + " --- |" * len(columns))
    for row in rows:
        print("| " + " | ".join(_cell(row.get(column)) for column in columns) + " |")


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


def finish(
    tables: Mapping[str, Sequence[Row]],
    *,
    failures: Sequence[str] = (),
    json_file: Path | None = None,
) -> None:
    """Print all tables, and write them down; with failures exit with code 1 and say which."""
    print(f"\n{machine()}")
    for title, rows in tables.items():
        show(title, rows)
    if json_file:
        content = {"machine": machine(), "tables": tables, "failures": list(failures)}
        json_file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if failures:
        sys.exit("\nWRONG: " + "\nWRONG: ".join(failures))
