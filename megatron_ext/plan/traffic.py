"""Bytes that one rank sends in a training step, by kind of parallelism and collective."""

from __future__ import annotations

from collections import Counter

from megatron_ext.config.layout import sequence_parallel
from megatron_ext.config.schema import RunConfig
from megatron_ext.plan.hops import sent_by
from megatron_ext.plan.memory import GRADIENT, data_ranks, micro_batches
from megatron_ext.plan.rehearsal import Stage
from megatron_ext.plan.tracker import Work


def step_traffic(
    config: RunConfig, stage: Stage, *, number: int, world_size: int
) -> Counter[tuple[str, str]]:
    """Bytes over the link of a rank of pipeline stage `number`, by (parallelism, collective).

    A collective over n ranks counts as in a ring: (n - 1) / n of the whole tensor for all-gather,
    reduce-scatter and all-to-all, twice that for all-reduce.
    """
    parallel, count = config.parallel, micro_batches(config, world_size)
    work = sum((x.work_forward + x.work_backward for x in stage.chunks), Work())
    sent = work.times(count).sent
    if parallel.pipeline > 1:
        sent["pipeline", "send"] += sum(sent_by(config, stage=number, micro_batches=count))
    kinds = zip(("data", "expert data"), (stage.dense, stage.experts), strict=True)
    for (kind, sizes), ranks in zip(kinds, data_ranks(parallel, world_size), strict=True):
        gradients = sum(n for n, _ in sizes) * GRADIENT
        weights = sum(n * size for n, size in sizes)
        if parallel.distributed_optimizer:
            sent[kind, "reduce_scatter"] += ring(gradients, ranks)
            sent[kind, "allgather"] += ring(weights, ranks)
        else:
            sent[kind, "allreduce"] += 2 * ring(gradients, ranks)
    ranks = world_size // parallel.pipeline
    if not sequence_parallel(parallel):
        ranks //= parallel.tensor
    sent["balance", "allreduce"] += 2 * ring(stage.statistics, ranks)
    return +sent  # without zeros


def ring(size: int, ranks: int) -> int:
    """Bytes over each link when a tensor of `size` bytes goes around once."""
    return size * (ranks - 1) // ranks
