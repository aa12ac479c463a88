"""The micro-batches of a step, and those of the next one begun ahead."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import chain, tee

from megatron_ext.data.batches import MicroBatch, micro_batches
from megatron_ext.data.statistics import batch_statistics, bucket_starts
from megatron_ext.train.state import ReadAhead, TrainState


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


def feeds_of(state: TrainState, batches: Iterator[MicroBatch]) -> list[Waited]:
    """The same micro-batches for each model chunk of this rank. They are read once."""
    return [Waited(each) for each in tee(batches, len(state.chunks))]


def next_feeds(state: TrainState) -> list[Waited]:
    """The next global batch for each model chunk; what `read_ahead` began is used up."""
    ahead, state.ahead = state.ahead, None
    # After a rewind or a window that is left out the next batch begins elsewhere.
    if ahead is None or ahead.position != state.position:
        return feeds_of(state, next_batches(state))
    return feeds_of(state, ahead.batches)


def read_ahead(state: TrainState) -> float:
    """Read the first micro-batch of the batch after the next, and lay out all documents of that.

    To be called while a device has the passes of this batch to compute: before its first pass a
    step would wait for it, some 60 ms where 4 M tokens of documents are packed.

    Returns:
        How long that took the host, in seconds.
    """
    begin = time.perf_counter()
    position = state.position + state.config.train.batch_tokens
    batches = next_batches(state, start=position)
    try:
        first = next(batches)
    except Exception:
        return time.perf_counter() - begin
    state.ahead = ReadAhead(position, chain([first], batches))
    return time.perf_counter() - begin


def next_batches(
    state: TrainState, *, start: int | None = None, data_rank: int | None = None
) -> Iterator[MicroBatch]:
    """The micro-batches of a global batch.

    Args:
        start: where it begins in the data, in tokens; None: the next one.
        data_rank: whose; None: of this rank.
    """
    config = state.config
    return micro_batches(
        state.train_data,
        start=state.position if start is None else start,
        batch_tokens=config.train.batch_tokens,
        sequence_length=config.data.sequence_length,
        micro_batch_size=config.train.micro_batch_size,
        data_rank=state.mesh.dp.rank() if data_rank is None else data_rank,
        data_size=state.mesh.dp.size(),
        packing=config.data.packing,
        segment=config.data.spiral_segment,
    )


def next_statistics(state: TrainState) -> dict[str, float]:
    """What the next global batch is made of, as `data/...` metrics."""
    config = state.config
    length, first = config.data.sequence_length, config.evaluate.position_bucket
    return batch_statistics(
        state.train_data,
        start=state.position,
        batch_tokens=config.train.batch_tokens,
        sequence_length=length,
        packing=config.data.packing,
        buckets=bucket_starts(length, first=first),
    )


def micro_batch_count(state: TrainState) -> int:
    """Micro-batches of a data rank in a step."""
    train = state.config.train
    once = state.config.data.sequence_length * train.micro_batch_size * int(state.mesh.dp.size())
    return train.batch_tokens // once
