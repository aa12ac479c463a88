"""Lets all data parallel ranks compute the same micro-batch, and compares what they find."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.checkpoint.state import unwrap
from megatron_ext.config.operations import HealthAction
from megatron_ext.errors import TrainingHalted
from megatron_ext.resilience.replay import Replayed, checksum, disagreement
from megatron_ext.train import balance
from megatron_ext.train.feed import feeds_of, micro_batch_count, next_batches
from megatron_ext.train.state import TrainState, gather_parameters
from megatron_ext.train.step import run_passes, unreduced


def replay_due(state: TrainState) -> bool:
    """Whether the ranks are to be compared before the step that comes."""
    every = state.config.resilience.replay_interval
    return every > 0 and (state.step + 1) % every == 0


def check_replay(state: TrainState) -> str:
    """Forward and backward of the first data rank's first micro-batch, on every rank. Collective.

    Leaves weights, balancer, data position and random state as they were; gradients are overwritten
    by the step that follows.

    Returns:
        Who differs, in words, the same on every rank; empty when all agree.

    Raises:
        TrainingHalted: some do, and `resilience.corruption` is halt.
    """
    gather_parameters(state.chunks)
    weights = checksum(
        parameter for chunk in state.chunks for parameter in unwrap(chunk).parameters()
    )
    for chunk in state.chunks:
        chunk.zero_grad_buffer()
    state.optimizer.zero_grad()
    # The interleaved schedule wants as many as there are stages.
    count = min(micro_batch_count(state), int(state.mesh.pp.size()))
    with unreduced(state):
        feeds = feeds_of(state, next_batches(state, data_rank=0))
        sums = run_passes(state, feeds, count, forward_only=False)
    balance.discard(state.chunks)
    buffers = [buffer for chunk in state.chunks for buffer in chunk.buffers]
    gradients = checksum(buffer.grad_data for buffer in buffers)
    words = disagreement(_gather(state, torch.stack([weights, checksum([sums]), gradients])))
    if not words:
        return ""
    text = (
        f"replay before step {state.step + 1}: {words}. A device is at fault, or its memory: "
        "python -m launch.preflight on these hosts, and leave out what it names"
    )
    if state.config.resilience.corruption is HealthAction.halt:
        raise TrainingHalted(
            f"{text}. Nothing was saved since; checkpoints of the steps since the last replay that "
            "agreed may be spoilt"
        )
    return text


def _gather(state: TrainState, sums: Tensor) -> list[Replayed]:
    mesh = state.mesh
    place = tuple(int(group.rank()) for group in (mesh.pp, mesh.cp, mesh.tp))
    own = Replayed(
        state.runtime.rank, os.uname().nodename, place, tuple(int(value) for value in sums.tolist())
    )
    found: list[Any] = [None] * state.runtime.world_size
    dist.all_gather_object(found, own)
    return found
