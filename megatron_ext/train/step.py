"""One optimizer step, and the forward pass that evaluation shares with it.

Shapes: b sequences of a micro-batch, s tokens a sequence, n data sources.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

from megatron_ext.config.layout import row_length, sequence_parallel
from megatron_ext.data.statistics import bucket_starts
from megatron_ext.errors import TrainingHalted
from megatron_ext.optim.build import set_learning_rate
from megatron_ext.optim.schedule import learning_rate
from megatron_ext.optim.update import apply_update, gradient_norm
from megatron_ext.parallel.pipeline import schedule_arguments
from megatron_ext.train import balance
from megatron_ext.train.feed import (
    Waited,
    micro_batch_count,
    next_feeds,
    next_statistics,
    read_ahead,
)
from megatron_ext.train.losses import Losses
from megatron_ext.train.micro_batch import TrainInputs, forward, train_inputs
from megatron_ext.train.share import Share
from megatron_ext.train.state import TrainState

# The name under which `tc.timers` is asked around the sum of the losses.
LOSSES = "losses-all-reduce"


# From the loss and the gradient norm of a step: whether to apply its update. May raise.
Judge = Callable[[float, float], bool]


def must_be_finite(loss: float, grad_norm: float) -> bool:
    """The judge of a bare step.

    Raises:
        TrainingHalted: one of them is not finite.
    """
    for what, value in (("loss", loss), ("gradient norm", grad_norm)):
        if not math.isfinite(value):
            raise TrainingHalted(f"the {what} is {value}")
    return True


def train_step(state: TrainState, judge: Judge = must_be_finite) -> dict[str, float]:
    """Forward, backward and update for the next global batch. Advances `state`.

    The update is queued and not waited for: on a GPU its time is in the `step_seconds` of the next
    step, or in what comes between, as a save.

    Args:
        judge: asked on every rank between gradient norm and update. When it says no, the batch
            counts as consumed and the weights stay as they are; when it raises, nothing changes.

    Returns:
        The numbers of the step by metric name; the same on every rank.
    """
    config, start = state.config, time.perf_counter()
    lr = learning_rate(
        config.optim,
        state.tokens + config.train.batch_tokens - state.stage.first_tokens,
        total_tokens=state.schedule_tokens,
    )
    state.pass_windows()
    for chunk in state.chunks:
        chunk.zero_grad_buffer()
    state.optimizer.zero_grad()
    feeds = next_feeds(state)
    # The device is waited for when all of its work up to the weights' update is queued. It computes
    # that while the host reads what the balancers did, and begins the next step. What else the host
    # has to do it does while the device has the passes to compute.
    sums = summed_passes(state, feeds, micro_batch_count(state), forward_only=False)
    made_of = next_statistics(state)
    reading = read_ahead(state)
    set_learning_rate(state.optimizer, lr)
    balanced = balance.Update(state.chunks, state.mesh)
    try:
        grad_norm = gradient_norm(state.optimizer)
        losses = read_losses(state, sums)
        loss = losses.mean
        accepted = judge(loss, grad_norm)
    except BaseException:
        balanced.undo()
        raise
    if accepted:
        apply_update(state.optimizer, grad_norm=grad_norm)
        state.loads = balanced.loads()
    else:
        balanced.undo()
        state.loads = []
    state.step += 1
    state.tokens += config.train.batch_tokens
    seconds = time.perf_counter() - start
    return {
        "tokens": float(state.tokens),
        "loss": loss,
        "grad_norm": grad_norm,
        "lr": lr,
        "step_seconds": seconds,
        "tokens_per_second": config.train.batch_tokens / seconds,
        "data/wait_seconds": reading + sum(feed.seconds for feed in feeds),
        **losses.by_source(state.sources),
        **losses.by_position(),
        **made_of,
    }


def run_schedule(
    state: TrainState,
    feeds: list[Waited],
    count: int,
    *,
    forward_only: bool,
) -> Losses:
    """Run megatron-core's schedule over `count` micro-batches and sum the losses over all ranks.

    Args:
        feeds, count, forward_only: as for `run_passes`.
    """
    return read_losses(state, summed_passes(state, feeds, count, forward_only=forward_only))


def summed_passes(
    state: TrainState,
    feeds: list[Waited],
    count: int,
    *,
    forward_only: bool,
) -> torch.Tensor:
    """`run_passes` with its sums over all ranks, which are not waited for."""
    sums = run_passes(state, feeds, count, forward_only=forward_only)
    timers = state.tc.timers
    if timers is not None:
        timers(LOSSES).start()
    # Only the last stage has losses, so the sum over stages hands them to all.
    dist.all_reduce(sums, group=state.mesh.dp_cp)
    dist.all_reduce(sums, group=state.mesh.pp)
    if timers is not None:
        timers(LOSSES).stop()
    return sums


def read_losses(state: TrainState, sums: torch.Tensor) -> Losses:
    """The sums of `summed_passes` on the host."""
    buckets = position_buckets(state)
    (total, position_total), (tokens, position_tokens) = (
        row.split([len(state.sources), len(buckets)]) for row in sums.cpu()
    )
    return Losses(total, tokens, position_total, position_tokens, buckets)


def position_buckets(state: TrainState) -> list[int]:
    """Where the buckets of `loss/position/...` begin."""
    config = state.config
    return bucket_starts(config.data.sequence_length, first=config.evaluate.position_bucket)


def run_passes(
    state: TrainState, feeds: list[Waited], count: int, *, forward_only: bool
) -> torch.Tensor:
    """Run megatron-core's schedule over `count` micro-batches.

    Args:
        feeds: one iterator over the same micro-batches for each model chunk.
        count: micro-batches; the same on every rank.
        forward_only: no gradients (evaluation).

    Returns:
        This rank's sums of losses and of tokens by source and by position, float64 [2, n]; zeros
        but on the last stage.
    """
    inputs = [
        device_feed(state, feed, chunk) for feed, chunk in zip(feeds, state.chunks, strict=True)
    ]
    if state.graph is None or forward_only:
        return _schedule(state, inputs, count, forward_only=forward_only)
    total = _no_sums(state)
    for batch in islice(inputs[0], count):
        with unreduced(state):
            total += state.graph(partial(_one_pass, state), batch)
    finalize = state.tc.finalize_model_grads_func
    if finalize is not None:
        finalize(state.chunks, total[1, : len(state.sources)].sum().int())
    return total


def _one_pass(state: TrainState, batch: TrainInputs) -> torch.Tensor:
    return _schedule(state, [iter([batch])], 1, forward_only=False)


def _schedule(
    state: TrainState, inputs: list[Iterator[TrainInputs]], count: int, *, forward_only: bool
) -> torch.Tensor:
    config = state.config
    many = len(state.chunks) > 1
    stored = get_forward_backward_func()(
        forward_step_func=partial(forward, loss_chunk_tokens=config.train.loss_chunk_tokens),
        data_iterator=inputs if many else inputs[0],
        model=state.chunks if many else state.chunks[0],
        num_microbatches=count,
        micro_batch_size=1 if config.data.isolate_documents else config.train.micro_batch_size,
        forward_only=forward_only,
        **schedule_arguments(
            config,
            stage=int(state.mesh.pp.rank()),
            sequence_length=sharing(state).padded(row_length(config)),
        ),
    )
    sums = _no_sums(state)
    for part in stored:
        sums += part["sums"]
    return sums


def _no_sums(state: TrainState) -> torch.Tensor:
    groups = len(state.sources) + len(position_buckets(state))
    return torch.zeros(2, groups, dtype=torch.float64, device=state.runtime.device)


@contextmanager
def unreduced(state: TrainState) -> Iterator[None]:
    """No reduction of gradients over ranks at the end of the passes inside."""
    finalize, state.tc.finalize_model_grads_func = state.tc.finalize_model_grads_func, None
    try:
        yield
    finally:
        state.tc.finalize_model_grads_func = finalize


def device_feed(state: TrainState, feed: Waited, chunk: Any) -> Iterator[TrainInputs]:
    """The micro-batches of a feed as a model chunk of this rank reads them."""
    share, buckets = sharing(state), position_buckets(state)
    for batch in feed:
        yield train_inputs(
            share.part(batch),
            chunk,
            device=state.runtime.device,
            sources=len(state.sources),
            buckets=buckets,
            share=share,
        )


@contextmanager
def evaluating(chunks: list[DistributedDataParallel]) -> Iterator[None]:
    """Chunks in evaluation mode without gradients; back in training mode afterwards."""
    for chunk in chunks:
        chunk.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for chunk in chunks:
            chunk.train()


def sharing(state: TrainState) -> Share:
    """How the ranks of the layout share rows of tokens out."""
    sequence = sequence_parallel(state.config.parallel)
    return Share(context=state.mesh.cp, tensor=state.mesh.tp if sequence else None)
