"""Memory and messages of a layout, as text."""

from __future__ import annotations

from collections import Counter

from megatron_ext.plan.memory import Memory
from megatron_ext.plan.numbers import human

GIB = 1 << 30
NAMES = {
    "allgather": "all-gather",
    "allreduce": "all-reduce",
    "alltoall": "all-to-all",
    "reduce_scatter": "reduce-scatter",
    "send": "send",
}


def memory_table(memories: list[Memory], *, imbalance: float) -> str:
    """One row a pipeline stage, in GiB."""
    heads = ("parameters", "gradients", "optimizer", "activations", "total", "in flight")
    lines = [
        "memory a rank in GiB, as torch allocates it",
        f"  {'stage':<6}" + "".join(f"{head:>13}" for head in heads),
    ]
    for stage, memory in enumerate(memories):
        parts = memory.parameters, memory.gradients, memory.optimizer, memory.activations
        cells = "".join(f"{part / GIB:>13.2f}" for part in (*parts, memory.total))
        lines.append(f"  {stage:<6}{cells}{memory.in_flight:>13}")
    lines += [
        f"  the busiest experts get {imbalance:g} times the mean of rows; not counted: memory that",
        "  torch holds unused, CUDA's context and NCCL's buffers, together a few GiB",
    ]
    return "\n".join(lines)


def traffic_table(sent: list[Counter[tuple[str, str]]]) -> str:
    """One row a kind of parallelism and collective; "" where a rank sends nothing."""
    keys = sorted({key for one in sent for key in one})
    if not keys:
        return ""
    lines = ["sent by a rank in a step, at the stage that sends most"]
    for kind, collective in keys:
        most = max(one[kind, collective] for one in sent)
        name = NAMES.get(collective, collective)
        lines.append(f"  {kind:<16}{name:<16}{human(most, unit='B'):>12}")
    return "\n".join(lines)
