"""Micro-batches cut from the token stream. Shapes: b micro-batch, s sequence length."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_ext.data.stream import TokenStream
from megatron_ext.errors import ConfigError


@dataclass(frozen=True)
class MicroBatch:
    """What one forward pass of one data rank reads.

    tokens, labels: int64 [b, s]; a label is the token after its input in the stream.
    loss_mask: float32 [b, s], 1 where the label counts. With isolated documents it is 0 at a
    document's last token, whose label belongs to the next document.
    source: int16 [b, s], index of the source of the *label*.
    cu_seqlens: int32 [n + 1] or None; with isolated documents the bounds of documents, cut at
    sequence starts too, in the micro-batch flattened sequence by sequence (0 first, b * s last).
    """

    tokens: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    loss_mask: npt.NDArray[np.float32]
    source: npt.NDArray[np.int16]
    cu_seqlens: npt.NDArray[np.int32] | None


def micro_batches(
    stream: TokenStream,
    *,
    start: int,
    batch_tokens: int,
    sequence_length: int,
    micro_batch_size: int,
    data_rank: int,
    data_size: int,
) -> Iterator[MicroBatch]:
    """The micro-batches of one data rank for the global batch at ``start`` consumed tokens.

    Sequence i of the batch reads inputs ``[start + i * s, start + (i + 1) * s)``. Micro-batch m of
    data rank r takes the b sequences from ``(m * data_size + r) * b`` on, so the union over ranks
    and micro-batches is the same for every layout, and the next batch starts at
    ``start + batch_tokens`` whatever its sequence length.

    Raises:
        ConfigError: ``batch_tokens`` is no multiple of what one pass of all data ranks reads.
    """
    once = sequence_length * micro_batch_size * data_size
    if batch_tokens <= 0 or batch_tokens % once:
        nearest = max(once, round(batch_tokens / once) * once)
        raise ConfigError(
            f"train.batch_tokens: {batch_tokens}, allowed: multiples of {once} "
            f"(data.sequence_length {sequence_length} x train.micro_batch_size "
            f"{micro_batch_size} x {data_size} data ranks). Nearest: {nearest}"
        )
    for number in range(batch_tokens // once):
        first = (number * data_size + data_rank) * micro_batch_size
        yield _cut(
            stream,
            start=start + first * sequence_length,
            sequence_length=sequence_length,
            sequences=micro_batch_size,
        )


def evaluation_batches(
    stream: TokenStream,
    *,
    tokens: int,
    sequence_length: int,
    micro_batch_size: int,
    data_rank: int,
    data_size: int,
    rounds: int | None = None,
) -> Iterator[MicroBatch]:
    """The first ``tokens // sequence_length`` sequences (at least one) of a held-out stream.

    Always from position 0, so every evaluation of every layout reads the same tokens. Sequences
    that only fill up the last rounds of micro-batches have a loss mask of 0; ``rounds`` asks for
    more of them than the tokens need (a schedule may take whole multiples only).
    """
    wanted = max(1, tokens // sequence_length)
    needed = -(-wanted // (micro_batch_size * data_size))
    for number in range(needed if rounds is None else max(needed, rounds)):
        first = (number * data_size + data_rank) * micro_batch_size
        batch = _cut(
            stream,
            start=first * sequence_length,
            sequence_length=sequence_length,
            sequences=micro_batch_size,
        )
        batch.loss_mask[max(0, wanted - first) :] = 0
        yield batch


def _cut(stream: TokenStream, *, start: int, sequence_length: int, sequences: int) -> MicroBatch:
    """Sequences that follow each other, with one token more for the last label."""
    count = sequences * sequence_length
    part = stream.read(start, count + 1)
    shape = (sequences, sequence_length)
    mask = np.ones(shape, np.float32)
    cu_seqlens = None
    if stream.isolate_documents:
        ends = part.document[1:] != part.document[:-1]
        mask[ends.reshape(shape)] = 0
        starts = np.arange(count) % sequence_length == 0
        starts[1:] |= ends[:-1]
        cu_seqlens = np.append(np.flatnonzero(starts), count).astype(np.int32)
    return MicroBatch(
        tokens=part.tokens[:-1].reshape(shape),
        labels=part.tokens[1:].reshape(shape),
        loss_mask=mask,
        source=part.source[1:].reshape(shape),
        cu_seqlens=cu_seqlens,
    )
