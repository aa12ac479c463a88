"""One optimizer step, and the forward pass that evaluation shares with it.

Shapes: b sequences of a micro-batch, s tokens a sequence, n data sources.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

from megatron_ext.config.layout import sequence_parallel
from megatron_ext.data.batches import MicroBatch, micro_batches
from megatron_ext.errors import TrainingHalted
from megatron_ext.layers.output_head import losses_of
from megatron_ext.optim.build import set_learning_rate
from megatron_ext.optim.schedule import learning_rate
from megatron_ext.parallel.pipeline import schedule_arguments
from megatron_ext.train import balance
from megatron_ext.train.share import Share, packed_documents
from megatron_ext.train.state import TrainState


@dataclass
class Losses:
    """Sums over the valid tokens of a global batch, the same on every rank.

    Attributes:
        total: cross-entropy by source, in nats, float64 [n].
        tokens: valid tokens by source, float64 [n] (exact integers).
    """

    total: torch.Tensor
    tokens: torch.Tensor

    @property
    def mean(self) -> float:
        """Mean cross-entropy of the valid tokens."""
        return float(self.total.sum() / self.tokens.sum())

    def by_source(self, names: list[str], *, prefix: str = "") -> dict[str, float]:
        """`loss/<source>` for each source that has tokens here."""
        return {
            f"{prefix}loss/{name}": float(self.total[i] / self.tokens[i])
            for i, name in enumerate(names)
            if self.tokens[i] > 0
        }


class Waited:
    """An iterator that measures how long the step waited for its data, in seconds."""

    def __init__(self, batches: Iterator[MicroBatch]) -> None:
        self._batches = batches
        self.seconds = 0.0

    def __iter__(self) -> Waited:
        return self

    def __next__(self) -> MicroBatch:
        start = time.perf_counter()
        batch = next(self._batches)
        self.seconds += time.perf_counter() - start
        return batch


def train_step(state: TrainState) -> dict[str, float]:
    """Forward, backward and update for the next global batch. Advances `state`.

    Returns:
        The numbers of the step by metric name; the same on every rank.

    Raises:
        TrainingHalted: the loss or the gradient is not finite; no checkpoint is written after it.
    """
    config, start = state.config, time.perf_counter()
    lr = learning_rate(
        config.optim,
        state.tokens + config.train.batch_tokens,
        total_tokens=state.total_tokens,
    )
    for chunk in state.chunks:
        chunk.zero_grad_buffer()
    state.optimizer.zero_grad()
    feeds = [Waited(next_batches(state)) for _ in state.chunks]
    losses = run_schedule(state, feeds, micro_batch_count(state), forward_only=False)
    loss = losses.mean
    _must_be_finite("loss", loss, state)
    set_learning_rate(state.optimizer, lr)
    _, grad_norm, _ = state.optimizer.step()
    grad_norm = float(grad_norm)
    _must_be_finite("gradient norm", grad_norm, state)
    state.loads = balance.update(state.chunks, state.mesh)
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
        "data/wait_seconds": sum(feed.seconds for feed in feeds),
        **losses.by_source(state.sources),
    }


def next_batches(state: TrainState) -> Iterator[MicroBatch]:
    """This data rank's micro-batches of the next global batch."""
    config = state.config
    return micro_batches(
        state.train_data,
        start=state.tokens,
        batch_tokens=config.train.batch_tokens,
        sequence_length=config.data.sequence_length,
        micro_batch_size=config.train.micro_batch_size,
        data_rank=state.mesh.dp.rank(),
        data_size=state.mesh.dp.size(),
    )


def micro_batch_count(state: TrainState) -> int:
    """Micro-batches of a data rank in a step."""
    train = state.config.train
    once = state.config.data.sequence_length * train.micro_batch_size * int(state.mesh.dp.size())
    return train.batch_tokens // once


def run_schedule(
    state: TrainState,
    feeds: list[Waited],
    count: int,
    *,
    forward_only: bool,
) -> Losses:
    """Run megatron-core's schedule over `count` micro-batches and sum the losses over all ranks.

    Args:
        feeds: one iterator over the same micro-batches for each model chunk.
        count: micro-batches; the same on every rank.
        forward_only: no gradients (evaluation).
    """
    config = state.config
    packed = config.data.isolate_documents
    sequences = config.train.micro_batch_size
    many = len(state.chunks) > 1
    share = Share(
        context=state.mesh.cp,
        tensor=state.mesh.tp if sequence_parallel(config.parallel) else None,
    )
    stored = get_forward_backward_func()(
        forward_step_func=partial(
            forward,
            device=state.runtime.device,
            sources=len(state.sources),
            share=share,
            loss_chunk_tokens=config.train.loss_chunk_tokens,
        ),
        data_iterator=feeds if many else feeds[0],
        model=state.chunks if many else state.chunks[0],
        num_microbatches=count,
        micro_batch_size=1 if packed else sequences,
        forward_only=forward_only,
        **schedule_arguments(
            config,
            stage=int(state.mesh.pp.rank()),
            sequence_length=share.padded(
                config.data.sequence_length * (sequences if packed else 1)
            ),
        ),
    )
    sums = torch.zeros(2, len(state.sources), dtype=torch.float64, device=state.runtime.device)
    for part in stored:
        sums += part["sums"]
    # Only the last stage has losses, so the sum over stages hands them to all.
    dist.all_reduce(sums, group=state.mesh.dp_cp)
    dist.all_reduce(sums, group=state.mesh.pp)
    total, tokens = sums.cpu()
    return Losses(total=total, tokens=tokens)


def forward(
    feed: Iterator[MicroBatch],
    model: Any,
    *,
    device: torch.device,
    sources: int,
    share: Share,
    loss_chunk_tokens: int | None = None,
) -> tuple[torch.Tensor, Any]:
    """One micro-batch through a model chunk, in the form that megatron-core's schedules call.

    Returns:
        The chunk's output (losses [b, s] in the last one) and the function that sums them.
    """
    batch = share.part(next(feed))
    tokens, labels, mask, source = (
        torch.from_numpy(array).to(device, non_blocking=True)
        for array in (batch.tokens, batch.labels, batch.loss_mask, batch.source)
    )
    packing = None
    if batch.cu_seqlens is not None:
        tokens, labels = tokens.reshape(1, -1), labels.reshape(1, -1)
        packing = packed_documents(torch.from_numpy(batch.cu_seqlens), share, device=device)
    output = model(
        input_ids=tokens,
        position_ids=None,
        attention_mask=None,
        labels=labels,
        packed_seq_params=packing,
        padding_mask=share.padding_mask(batch, model, device=device),
        output_processor=losses_of,
        output_processor_context=loss_chunk_tokens,
    )
    return output, partial(sum_losses, mask=mask, source=source, sources=sources)


def sum_losses(
    losses: torch.Tensor, *, mask: torch.Tensor, source: torch.Tensor, sources: int
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sums over the valid tokens of a micro-batch; megatron-core divides them by all tokens.

    Args:
        losses: float32 [b, s] (or [1, b * s] when packed).
        mask: float32 [b, s], 1 where a token counts.
        source: integer [b, s], the data source of each label.

    Returns:
        The loss to differentiate, the number of valid tokens (int32), and `sums` float64 [2, n]:
        losses and tokens by source.
    """
    valid = mask.flatten()
    weighted = losses.float().flatten() * valid
    members = source.flatten()[:, None] == torch.arange(sources, device=source.device)
    # A matrix product, since index_add is not deterministic on GPUs.
    sums = torch.stack((weighted.detach(), valid)).double() @ members.double()
    return weighted.sum(), valid.sum().int(), {"sums": sums}


def _must_be_finite(what: str, value: float, state: TrainState) -> None:
    if math.isfinite(value):
        return
    first, last = state.tokens, state.tokens + state.config.train.batch_tokens - 1
    raise TrainingHalted(
        f"step {state.step + 1}: the {what} is {value} (data tokens {first} to {last}). Nothing "
        f"was saved after it. Relaunch to go on from the last checkpoint, with a smaller optim.lr "
        f"or more optim.warmup_tokens if it comes back"
    )
