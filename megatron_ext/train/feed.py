"""The micro-batches of a step, and those of the next one begun ahead."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from itertools import chain

import torch

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
    """The same micro-batches for each model chunk of this rank.

    They are read once, and kept no longer than until every chunk has had them.
    """
    queues: list[deque[MicroBatch]] = [deque() for _ in state.chunks]

    def of(own: deque[MicroBatch]) -> Iterator[MicroBatch]:
        while True:
            if not own:
                batch = next(batches, None)
                if batch is None:
                    return
                for queue in queues:
                    queue.append(batch)
                del batch  # or this frame would keep it while it is computed
            yield own.popleft()

    return [Waited(of(queue)) for queue in queues]


def next_feeds(state: TrainState) -> list[Waited]:
    """The next global batch for each model chunk; what `read_ahead` began is used up."""
    ahead, state.ahead = state.ahead, None
    # After a rewind, or with a window to leave out, the next batch may begin elsewhere. Data and
    # configuration of a state do not change, so that the position is all that a batch depends on.
    if ahead is None or ahead.position != state.position:
        return feeds_of(state, next_batches(state))
    return feeds_of(state, ahead.batches)


def read_ahead(state: TrainState) -> float:
    """Read the first micro-batch of the batch after the next, and lay out all documents of that.

    To be called while a device has the passes of this batch to compute: before its first pass a
    step would wait for it, some 60 ms where 4 M tokens of documents are packed.

    Returns:
        How long that took the host, in seconds, if the device has nothing more to compute; else 0.
    """
    train, device = state.config.train, state.runtime.device
    if state.step + 1 >= train.steps:
        return 0.0
    begin = time.perf_counter()
    _begin_batch(state, start=state.position + train.batch_tokens)
    if device.type == "cuda" and not torch.cuda.current_stream(device).query():
        return 0.0
    return time.perf_counter() - begin


def _begin_batch(state: TrainState, *, start: int) -> None:
    batches = next_batches(state, start=start)
    try:
        first = next(batches)
    except Exception:
        return  # the step that needs this batch meets the error, and reports it
    state.ahead = ReadAhead(start, chain([first], batches))


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
