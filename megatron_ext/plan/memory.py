"""Memory of one rank: what lies there all the time, and the fullest moment of the schedule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace

from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table

from megatron_ext.config.schema import Device, ParallelOptions, RunConfig
from megatron_ext.plan.rehearsal import Stage

GRADIENT = 4  # bytes: gradients are summed in float32, see `mcore_config.ddp_config`
MASTER = 4  # bytes of a float32 weight beside each 16-bit one
MOMENTS = 8  # bytes: Adam's two, in float32
CUBLAS = 32 << 20  # bytes of workspace that torch takes for cuBLAS on Hopper
STEADY = 4  # times the stages: by then a schedule repeats itself


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank, as torch's allocator counts them.

    Attributes:
        parameters: weights and other state of the modules, replicated over data parallel ranks.
        gradients: megatron-core's float32 buffers.
        optimizer: this rank's share of main weights and moments.
        activations: most that forward and backward passes hold, workspaces and messages included.
        in_flight: micro-batches, through one chunk each, that are kept at that moment.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    in_flight: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.gradients + self.optimizer + self.activations


def data_ranks(parallel: ParallelOptions, world_size: int) -> tuple[int, int]:
    """Ranks with the same dense weights, and with the same experts: over them gradients are summed
    and the optimizer's state is shared out."""
    dense = world_size // (parallel.tensor * parallel.pipeline)
    expert = world_size // (parallel.expert * parallel.expert_tensor * parallel.pipeline)
    return dense, expert


def micro_batches(config: RunConfig, world_size: int) -> int:
    """Micro-batches of a rank in a step; at least 1."""
    parallel = config.parallel
    copies = world_size // (parallel.tensor * parallel.context * parallel.pipeline)
    once = config.data.sequence_length * config.train.micro_batch_size * copies
    return max(1, config.train.batch_tokens // once)


def memory_of(config: RunConfig, stage: Stage, *, number: int, world_size: int) -> Memory:
    """What a rank of pipeline stage `number` needs.

    Args:
        stage: as rehearsed.
        world_size: ranks of the job.
    """
    parallel = config.parallel
    weights = optimizer = 0
    for sizes, ranks in zip(
        (stage.dense, stage.experts), data_ranks(parallel, world_size), strict=True
    ):
        share = ranks if parallel.distributed_optimizer else 1
        for count, size in sizes:
            weights += count * size
            optimizer += -(-count // share) * (MOMENTS + (MASTER if size < MASTER else 0))
    activations, in_flight = fullest_moment(
        stage, parallel, number=number, micro_batches=micro_batches(config, world_size)
    )
    workspace = 0 if config.run.device is Device.cpu else CUBLAS
    return Memory(
        parameters=weights + stage.frozen + stage.buffers,
        gradients=stage.parameters * GRADIENT,
        optimizer=optimizer,
        activations=activations + workspace,
        in_flight=in_flight,
    )


def fullest_moment(
    stage: Stage, parallel: ParallelOptions, *, number: int, micro_batches: int
) -> tuple[int, int]:
    """Bytes at the fullest moment of the schedule, and passes in flight then."""
    fullest, kept, in_flight = (0, 0), 0, 0
    for forward, chunk in passes(parallel, number=number, micro_batches=micro_batches):
        one = stage.chunks[chunk]
        if forward:
            fullest = max(fullest, (kept + one.forward, in_flight + 1))
            kept, in_flight = kept + one.kept, in_flight + 1
        else:
            fullest = max(fullest, (kept - one.kept + one.backward, in_flight))
            kept, in_flight = kept - one.kept, in_flight - 1
    return fullest


def passes(
    parallel: ParallelOptions, *, number: int, micro_batches: int
) -> Iterator[tuple[bool, int]]:
    """(is it forward, virtual stage) of every pass of a rank, in megatron-core's order."""
    stages, chunks = parallel.pipeline, parallel.virtual_pipeline
    count = min(micro_batches, STEADY * stages)
    group = SimpleNamespace(size=lambda: stages, rank=lambda: number)
    total, _, warm_up, _ = get_pp_rank_microbatches(
        count,
        chunks,
        stages,
        p2p_communicator=SimpleNamespace(
            pp_group=group,
            virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        ),
    )
    order = [chunk for _, chunk in get_schedule_table(count, chunks, stages)]
    for index in range(total + warm_up):
        if index < total:
            yield True, order[index]
        if index >= warm_up:
            yield False, chunks - 1 - order[index - warm_up]
