"""Micro-batches cut from the token stream. Shapes: b micro-batch, s sequence length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_ext.config.schema import Packing
from megatron_ext.data.packing import Row, pack
from megatron_ext.data.stream import Pieces, TokenStream
from megatron_ext.errors import ConfigError


@dataclass(frozen=True)
class MicroBatch:
    """What one forward pass of one data rank reads, or one context rank's part of it.

    tokens, labels: int64 [b, s]; a label is the token after its input in the stream.
    loss_mask: float32 [b, s], 1 where the label counts. With isolated documents it is 0 at a
    document's last token, whose label belongs to the next document.
    source: int16 [b, s], index of the source of the *label*.
    cu_seqlens: int32 [n + 1] or None; with isolated documents the bounds of documents, cut at
    sequence starts too, in the micro-batch flattened sequence by sequence (0 first, b * s last).
    The same on all context ranks.
    position: int32 [b, s], how many tokens a token can look back on: since the start of its
    document here if documents are isolated, else of its sequence.
    padding: bool [b, s] or None; True where there is no token, but a length that did not divide.
    """

    tokens: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    loss_mask: npt.NDArray[np.float32]
    source: npt.NDArray[np.int16]
    cu_seqlens: npt.NDArray[np.int32] | None
    position: npt.NDArray[np.int32]
    padding: npt.NDArray[np.bool_] | None = None


def padded_length(length: int, *, ranks: int, multiple: int = 1) -> int:
    """The length of a row that so many ranks share, each a multiple of `multiple` tokens."""
    return -(-length // (ranks * multiple)) * ranks * multiple


def part_of_rank(batch: MicroBatch, *, rank: int, ranks: int, multiple: int = 1) -> MicroBatch:
    """The consecutive part of every sequence that one context rank holds.

    With isolated documents the sequences follow each other in one row, and that row is shared out;
    without, every sequence is. Rows that do not divide are padded at their end; the padding is a
    document of its own, comes after every token, and counts nowhere.

    Args:
        batch: of the whole data rank; what it calls padding stays padding.
        rank, ranks: which part of how many.
        multiple: a part's length must divide by it (tensor parallel ranks that share it).
    """
    if ranks == multiple == 1:
        return batch
    rows = -1 if batch.cu_seqlens is None else 1
    length = batch.tokens.size if rows == 1 else batch.tokens.shape[1]
    total = padded_length(length, ranks=ranks, multiple=multiple)
    own = slice(rank * (total // ranks), (rank + 1) * (total // ranks))

    def part(array: npt.NDArray[Any], fill: int = 0) -> npt.NDArray[Any]:
        array = array.reshape(rows, length)
        return np.pad(array, ((0, 0), (0, total - length)), constant_values=fill)[:, own]

    cu_seqlens, padding = batch.cu_seqlens, batch.padding
    if total > length and cu_seqlens is not None:
        cu_seqlens = np.append(cu_seqlens, total).astype(np.int32)
    if total > length or padding is not None:
        padding = np.zeros(batch.tokens.shape, np.bool_) if padding is None else padding
        padding = part(padding, True)
    return MicroBatch(
        tokens=part(batch.tokens),
        labels=part(batch.labels),
        loss_mask=part(batch.loss_mask),
        source=part(batch.source),
        cu_seqlens=cu_seqlens,
        position=part(batch.position),
        padding=padding,
    )


def micro_batches(
    stream: TokenStream,
    *,
    start: int,
    batch_tokens: int,
    sequence_length: int,
    micro_batch_size: int,
    data_rank: int,
    data_size: int,
    packing: Packing = Packing.concat,
    segment: int = 0,
) -> Iterator[MicroBatch]:
    """The micro-batches of one data rank for the global batch at ``start`` consumed tokens.

    Sequence i of the batch reads inputs ``[start + i * s, start + (i + 1) * s)``, or row i of what
    ``packing`` makes of the documents of the whole batch. Micro-batch m of data rank r takes the b
    sequences from ``(m * data_size + r) * b`` on, so the union over ranks and micro-batches is the
    same for every layout, and the next batch starts at ``start + batch_tokens`` whatever its
    sequence length.

    Args:
        packing: how documents are laid out.
        segment: of ``packing.pack``.

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
    pieces, rows = None, []
    if packing is not Packing.concat:
        pieces = stream.pieces(start, batch_tokens)
        rows = pack(
            pieces.length, sequence_length=sequence_length, packing=packing, segment=segment
        )
    for number in range(batch_tokens // once):
        first = (number * data_size + data_rank) * micro_batch_size
        if pieces is not None:
            own = rows[first : first + micro_batch_size]
            yield _lay_out(stream, pieces, own, sequence_length=sequence_length)
            continue
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
        position=_positions(shape, cu_seqlens),
    )


def _positions(
    shape: tuple[int, int], cu_seqlens: npt.NDArray[np.int32] | None
) -> npt.NDArray[np.int32]:
    """Tokens since the last bound, or since the start of the sequence. int32 [b, s]."""
    sequences, length = shape
    if cu_seqlens is None:
        return np.tile(np.arange(length, dtype=np.int32), (sequences, 1))
    place = np.arange(sequences * length, dtype=np.int32)
    return (place - np.repeat(cu_seqlens[:-1], np.diff(cu_seqlens))).reshape(shape)


def _lay_out(
    stream: TokenStream, pieces: Pieces, rows: Sequence[Row], *, sequence_length: int
) -> MicroBatch:
    """Packed sequences. The label of a segment's last token is the next one of its document; where
    the document ends, the next one of the sequence if the model sees across, else none."""
    shape = (len(rows), sequence_length)
    tokens, labels = np.empty(shape, np.int64), np.zeros(shape, np.int64)
    mask, source = np.ones(shape, np.float32), np.empty(shape, np.int16)
    bounds = []
    for number, row in enumerate(rows):
        place = 0
        for item in row:
            piece, own = item.piece, slice(place, place + item.length)
            begin = int(pieces.begin[piece]) + item.offset
            end = begin + item.length
            ends = end == int(pieces.whole[piece])
            index = int(pieces.source[piece])
            read = stream.read_piece(
                index, int(pieces.row[piece]), begin=begin, end=end if ends else end + 1
            )
            tokens[number, own] = read[: item.length]
            labels[number, place : place + read.size - 1] = read[1:]
            source[number, own] = index
            if ends:
                mask[number, own.stop - 1] = 0
            bounds.append(number * sequence_length + place)
            place = own.stop
    if not stream.isolate_documents:
        # A document that ends inside a sequence is followed by another one.
        open_ends = mask[:, :-1] == 0
        labels[:, :-1][open_ends] = tokens[:, 1:][open_ends]
        source[:, :-1][open_ends] = source[:, 1:][open_ends]
        mask[:, :-1] = 1
    cu_seqlens = None
    if stream.isolate_documents:
        cu_seqlens = np.array([*bounds, tokens.size], np.int32)
    return MicroBatch(
        tokens=tokens,
        labels=labels,
        loss_mask=mask,
        source=source,
        cu_seqlens=cu_seqlens,
        position=_positions(shape, cu_seqlens),
    )
