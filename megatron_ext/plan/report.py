"""Memory and messages of a layout, as text."""

from __future__ import annotations

from collections import Counter

from megatron_ext.config.schema import RunConfig
from megatron_ext.plan.calibration import Calibration
from megatron_ext.plan.memory import Memory
from megatron_ext.plan.numbers import human
from megatron_ext.plan.timing import StepTime

GIB = 1 << 30
NAMES = {
    "allgather": "all-gather",
    "allreduce": "all-reduce",
    "alltoall": "all-to-all",
    "reduce_scatter": "reduce-scatter",
    "send": "send",
}


def memory_table(memories: list[Memory], *, imbalance: float, limit_gib: float) -> str:
    """One row a pipeline stage, in GiB, and whether the fullest fits `limit_gib`."""
    heads = ("parameters", "gradients", "optimizer", "activations", "total", "in flight")
    lines = [
        "memory a rank in GiB, as torch allocates it",
        f"  {'stage':<6}" + "".join(f"{head:>13}" for head in heads),
    ]
    for stage, memory in enumerate(memories):
        parts = memory.parameters, memory.gradients, memory.optimizer, memory.activations
        cells = "".join(f"{part / GIB:>13.2f}" for part in (*parts, memory.total))
        lines.append(f"  {stage:<6}{cells}{memory.in_flight:>13}")
    most = max(memory.total for memory in memories) / GIB
    verdict = "fits" if most <= limit_gib else "DOES NOT FIT"
    lines += [
        f"  {verdict}: {most:.1f} of {limit_gib:g} GiB",
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


def time_table(
    config: RunConfig, took: StepTime, calibration: Calibration, *, world_size: int, flops: float
) -> str:
    """Seconds of a step by what they go to, the speed that follows, and the cost of the run.

    Args:
        flops: of a token, without recomputation.
    """
    lines = [f"time of a step on {calibration.device}, estimated: nothing overlaps"]
    for name, seconds in took.parts.items():
        label = "reduction of gradients" if name == "reduce" else name
        lines.append(f"  {label:<28}{seconds:>10.3g} s{seconds / took.total:>8.1%}")
    tokens, steps = config.train.batch_tokens, config.train.steps
    speed = tokens / took.total
    achieved = speed * flops / world_size / 1e12
    lines += [
        f"  {'step':<28}{took.total:>10.3g} s",
        f"  {'speed':<28}{human(speed)} tokens/s, {achieved:.0f} TFLOP/s a GPU, "
        f"{achieved / calibration.peak_tflops:.0%} of its peak",
    ]
    hours = took.total * steps / 3600 * world_size
    price = config.plan.gpu_hour_price
    cost = "" if price is None else f", {human(hours * price)} at {price:g} an hour"
    lines.append(f"  {f'{steps:,} steps':<28}{human(hours)} GPU hours{cost}")
    lines.append(f"  assumed, not measured: {', '.join(calibration.assumed())}")
    return "\n".join(lines)
