"""The layouts of a cluster that promise the shortest step.

All combinations of a few sizes are checked by the rules of the configuration, and by their weights,
gradients and optimizer state alone; of those that are left the most promising are rehearsed, by one
pipeline stage each (the second, which keeps the most micro-batches of a stage without embedding).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_ext.config.ranges import divisors
from megatron_ext.config.schema import ParallelOptions, Recompute, RunConfig
from megatron_ext.config.validate import find_problems
from megatron_ext.model.count import Counts, count_parameters
from megatron_ext.parallel.mcore_config import parameter_dtype
from megatron_ext.plan.calibration import Calibration
from megatron_ext.plan.cluster import Cluster
from megatron_ext.plan.memory import GRADIENT, MASTER, MOMENTS, data_ranks, memory_of, micro_batches
from megatron_ext.plan.rehearsal import rehearse
from megatron_ext.plan.timing import step_time

GIB = 1 << 30
REHEARSED = 4  # layouts of each kind of recomputation, since only a rehearsal tells what fits
LONG = 65536  # tokens of a sequence from which on context parallelism is tried
WORK = {Recompute.none: 1.0, Recompute.selective: 1.15, Recompute.full: 1.33}  # of a step


@dataclass(frozen=True)
class Found:
    """A layout that was rehearsed.

    Attributes:
        memory_gib: of the rehearsed stage.
        seconds: of a step.
    """

    config: RunConfig
    memory_gib: float
    seconds: float

    @property
    def words(self) -> str:
        """What to put on the command line."""
        parallel, default = self.config.parallel, ParallelOptions()
        sizes = [
            f"parallel.{name}={getattr(parallel, name)}"
            for name in ("tensor", "pipeline", "context", "expert")
            if getattr(parallel, name) != getattr(default, name)
        ]
        return " ".join([*sizes, f"train.recompute={self.config.train.recompute.name}"])


def search(
    config: RunConfig, vocab_size: int, cluster: Cluster, calibration: Calibration
) -> tuple[list[Found], int, int]:
    """The rehearsed layouts that fit, quickest first; how many are allowed; how many might fit.

    Args:
        config: everything but the sizes of `parallel` and `train.recompute`.
        vocab_size: padded size.
        cluster: the machines.
        calibration: speeds of the device; links and nodes are the cluster's.
    """
    speeds = replace(
        calibration,
        gpus_per_node=cluster.gpus_per_node,
        in_node_gbs=cluster.in_node_gbs,
        between_nodes_gbs=cluster.between_nodes_gbs,
    )
    counts = count_parameters(config, vocab_size)
    allowed = list(candidates(config, cluster))
    light = [one for one in allowed if least_gib(one, counts, cluster.gpus) <= cluster.usable_gib]
    light.sort(key=lambda one: promise(one, cluster))
    found = []
    for one in most_promising(light):
        number = min(1, one.parallel.pipeline - 1)
        stage = rehearse(one, vocab_size, stage=number, imbalance=config.plan.imbalance)
        memory = memory_of(one, stage, number=number, world_size=cluster.gpus).total / GIB
        took = step_time(one, [stage], speeds, world_size=cluster.gpus, first=number)
        if memory <= cluster.usable_gib:
            found.append(Found(one, memory, took.total))
    return sorted(found, key=lambda one: one.seconds), len(allowed), len(light)


def most_promising(light: list[RunConfig]) -> list[RunConfig]:
    """The first ones of each kind of recomputation."""
    kinds = [[one for one in light if one.train.recompute is kind] for kind in Recompute]
    return [one for kind in kinds for one in kind[:REHEARSED]]


def candidates(config: RunConfig, cluster: Cluster) -> Iterator[RunConfig]:
    """Every combination that the rules of the configuration allow on the cluster."""
    powers = [2**i for i in range(7)]
    tensors = [size for size in powers if size <= cluster.gpus_per_node]
    contexts = powers[:4] if config.data.sequence_length >= LONG else [1]
    experts = [1]
    if config.model.first_dense_layers is not None:
        experts = [size for size in divisors(config.model.experts.num_experts) if size <= 64]
    plan = replace(config.plan, world_size=cluster.gpus)
    for tensor, pipeline, context, expert, recompute in itertools.product(
        tensors, powers[:5], contexts, experts, Recompute
    ):
        parallel = replace(
            config.parallel, tensor=tensor, pipeline=pipeline, context=context, expert=expert
        )
        train = replace(config.train, recompute=recompute)
        one = replace(config, parallel=parallel, train=train, plan=plan)
        if pipeline <= config.model.num_layers and not find_problems(one, cluster.gpus):
            yield one


def least_gib(config: RunConfig, counts: Counts, world_size: int) -> float:
    """Weights, gradients and optimizer state of a rank if all stages were equal, in GiB."""
    parallel, weight = config.parallel, parameter_dtype(config).itemsize
    experts = counts.by_part.get("experts", 0)
    local = (
        (counts.total - experts) / (parallel.tensor * parallel.pipeline),
        experts / (parallel.expert * parallel.expert_tensor * parallel.pipeline),
    )
    state = MOMENTS + (MASTER if weight < MASTER else 0)
    total = 0.0
    for size, ranks in zip(local, data_ranks(parallel, world_size), strict=True):
        share = ranks if parallel.distributed_optimizer else 1
        total += size * (weight + GRADIENT + state / share)
    return total / GIB


def promise(config: RunConfig, cluster: Cluster) -> float:
    """A rough relative time, to choose what is rehearsed: recomputation, the idle share of the
    pipeline, and messages, which cost ten times as much between nodes."""
    parallel = config.parallel
    idle = (parallel.pipeline - 1) / micro_batches(config, cluster.gpus)
    tensor = 0.3 * (1 - 1 / parallel.tensor)
    far = parallel.expert * parallel.expert_tensor > cluster.gpus_per_node
    expert = (0.5 if far else 0.05) * (1 - 1 / parallel.expert)
    return WORK[config.train.recompute] * (1 + idle) + tensor + expert


def found_table(found: list[Found], allowed: int, light: int, *, cluster: Cluster) -> str:
    """The layouts, quickest first, as text."""
    lines = [
        f"{allowed:,} layouts of {cluster.gpus:,} GPUs are allowed, the state of {light:,} fits "
        f"{cluster.usable_gib:g} GiB, the most promising were rehearsed, {len(found)} of them fit"
    ]
    if not found:
        return "\n".join([*lines, "  try more GPUs, or smaller micro-batches"])
    lines.append(f"  {'step s':>8}{'tokens/s':>12}{'GiB':>8}  layout")
    for one in found:
        speed = one.config.train.batch_tokens / one.seconds
        lines.append(f"  {one.seconds:>8.3g}{speed:>12,.0f}{one.memory_gib:>8.1f}  {one.words}")
    lines.append("  judged by one pipeline stage each: plan the chosen one as a whole")
    return "\n".join(lines)
