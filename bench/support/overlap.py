"""Communication in a profile: how long it took by kind, and how much nothing else hid.

Times are seconds; an interval is (begin, end).
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

Interval = tuple[float, float]

# "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
NCCL = re.compile(r"nccl\w*?Kernel_([A-Za-z]+)")
# "gloo:all_reduce", and the waits of those that send to one rank
GLOO = re.compile(r"gloo:(\w+)")
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")


class Communication(NamedTuple):
    """Of one rank in one step.

    Attributes:
        total: seconds by kind.
        exposed: seconds by kind in which the device computed nothing; two kinds at once count in
            both.
        all_exposed: seconds in which any of them ran and nothing was computed.
        kernels: kernels and copies of the GPU; 0 without one.
    """

    total: dict[str, float]
    exposed: dict[str, float]
    all_exposed: float
    kernels: int


def read_trace(file: Path) -> Communication:
    """From a Chrome trace of torch's profiler, of a GPU if it has kernels, else of a CPU.

    On a GPU everything but NCCL's kernels counts as computing, copies included; NCCL's kernels run
    from when this rank is ready, so they hold the wait for others. On a CPU torch's operators do.
    """
    events = json.loads(file.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
    timed = [event for event in events if event.get("ph") == "X" and "dur" in event]
    on_gpu = [event for event in timed if event.get("cat") in ON_GPU]
    messages: dict[str, list[Interval]] = defaultdict(list)
    work: list[Interval] = []
    for event in on_gpu or timed:
        kind = _kind(event, on_gpu=bool(on_gpu))
        begin = float(event["ts"]) / 1e6
        interval = (begin, begin + float(event["dur"]) / 1e6)
        if kind:
            messages[kind].append(interval)
        elif on_gpu or str(event["name"]).startswith("aten::"):
            work.append(interval)
    return Communication(
        total={kind: length(union(intervals)) for kind, intervals in messages.items()},
        exposed={kind: outside(intervals, work) for kind, intervals in messages.items()},
        all_exposed=outside((x for intervals in messages.values() for x in intervals), work),
        kernels=len(on_gpu),
    )


def _kind(event: dict[str, Any], *, on_gpu: bool) -> str:
    """What a message is, with the group of ranks where the profiler knows it; else empty."""
    name = str(event["name"])
    found = (NCCL if on_gpu else GLOO).search(name)
    if not found:
        return ""
    arguments = event.get("args", {})
    what = str(arguments.get("Collective name") or found[1])
    group = str(arguments.get("Process Group Description") or "").lower()
    # NCCL names groups as megatron-core does: EXPERT_MODEL_PARALLEL_GROUP
    group = group.replace("_group", "").replace("_", " ").replace(" parallel", "")
    return f"{what} ({group})" if group not in ("", "undefined") else what


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points as intervals in order that do not meet."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def length(intervals: Iterable[Interval]) -> float:
    """Sum of the lengths."""
    return sum(end - begin for begin, end in intervals)


def outside(intervals: Iterable[Interval], others: Iterable[Interval]) -> float:
    """How much of the union of `intervals` no other covers."""
    mine, covered = union(intervals), union(others)
    return length(mine) - length(_both(mine, covered))


def _both(first: list[Interval], second: list[Interval]) -> Iterator[Interval]:
    i = j = 0
    while i < len(first) and j < len(second):
        begin, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if begin < end:
            yield begin, end
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
