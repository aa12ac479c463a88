"""Process groups of a layout, from megatron-core, and the table that shows them."""

from __future__ import annotations

import math

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megatron_ext.config.schema import ParallelOptions
from megatron_ext.errors import ConfigError


def build_mesh(
    parallel: ParallelOptions, *, seed: int = 1234, timeout_seconds: float = 1800.0
) -> ProcessGroupCollection:
    """Create the process groups of a layout over all ranks of the started world, seed generators.

    Order of ranks, fastest first: tensor, context, expert, data, pipeline. Modules take the
    groups as arguments; megatron-core's own globals are set too, for what it asks them.

    Args:
        parallel: sizes; data parallelism is what is left.
        seed: of the generators that differ between tensor parallel ranks (dropout).
        timeout_seconds: of a collective before its rank is given up; whole minutes, rounded up.

    Raises:
        ConfigError: the sizes do not divide the number of ranks.
    """
    groups = build_groups(parallel, timeout_seconds=timeout_seconds)
    model_parallel_cuda_manual_seed(seed)
    return groups


def build_groups(
    parallel: ParallelOptions, *, timeout_seconds: float = 1800.0
) -> ProcessGroupCollection:
    """The groups alone, without the generators that differ between tensor parallel ranks."""
    world_size = dist.get_world_size()
    problems = misfits(parallel, world_size)
    if problems:
        raise ConfigError(problems)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=(
            parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None
        ),
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
        distributed_timeout_minutes=max(1, -int(-timeout_seconds // 60)),
        create_gloo_process_groups=False,
    )
    return ProcessGroupCollection.use_mpu_process_groups()


def misfits(parallel: ParallelOptions, world_size: int) -> list[str]:
    """One line for each way in which the sizes do not fit the number of ranks; empty if they do."""
    lines = []
    dense = parallel.tensor * parallel.context * parallel.pipeline
    expert = parallel.expert * parallel.expert_tensor * parallel.pipeline
    if world_size % dense:
        lines.append(
            f"parallel: tensor {parallel.tensor} x context {parallel.context} x pipeline "
            f"{parallel.pipeline} = {dense} ranks do not divide the {world_size} started; "
            f"start {_nearest(world_size, dense)} ranks or choose smaller sizes"
        )
    if world_size % expert:
        lines.append(
            f"parallel: expert {parallel.expert} x expert_tensor {parallel.expert_tensor} x "
            f"pipeline {parallel.pipeline} = {expert} ranks do not divide the {world_size} "
            f"started; start {_nearest(world_size, expert)} ranks or choose smaller sizes"
        )
    return lines


def _nearest(world_size: int, factor: int) -> int:
    return max(1, round(world_size / factor)) * factor


def fewest_ranks(parallel: ParallelOptions) -> int:
    """The smallest number of ranks that the sizes fit; every other one is a multiple of it."""
    dense, expert = parallel.tensor * parallel.context, parallel.expert * parallel.expert_tensor
    return math.lcm(dense, expert) * parallel.pipeline


def describe(parallel: ParallelOptions, world_size: int) -> str:
    """The layout as a table of text: one row a kind of parallelism, with its size and the ranks
    of rank 0's group. Needs no process group, so that a plan can print it too."""
    data = world_size // (parallel.tensor * parallel.context * parallel.pipeline)
    expert_data = world_size // (parallel.expert * parallel.expert_tensor * parallel.pipeline)
    rows = [
        ("tensor", parallel.tensor, 1),
        ("context", parallel.context, parallel.tensor),
        ("data", data, parallel.tensor * parallel.context),
        ("pipeline", parallel.pipeline, world_size // parallel.pipeline),
    ]
    if parallel.expert * parallel.expert_tensor > 1:
        rows += [
            ("expert tensor", parallel.expert_tensor, 1),
            ("expert", parallel.expert, parallel.expert_tensor),
            ("expert data", expert_data, parallel.expert * parallel.expert_tensor),
        ]
    lines = [f"{'parallelism':<14}{'size':>6}  {'group of rank 0'}"]
    lines += [f"{name:<14}{size:>6}  {_ranks(size, stride)}" for name, size, stride in rows]
    return "\n".join(lines)


def _ranks(size: int, stride: int) -> str:
    ranks = [str(index * stride) for index in range(size)]
    if size > 8:
        ranks = [*ranks[:3], "...", ranks[-1]]
    return " ".join(ranks)
