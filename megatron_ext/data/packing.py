"""How the documents of a global batch are laid out in its sequences.

A batch is the stretch [start, start + batch_tokens) of the token stream, whatever the packing: the
packers only rearrange that stretch. So every token stands in exactly one sequence, no sequence has
padding, and nothing has to be remembered between batches: the layout is a function of the position
in the stream, like the stream itself.

- ``best_fit``: a document is cut only where it must be. Those as long as a sequence or longer fill
  whole ones; the rest go, longest first, into the fullest sequence that still has room; what fits
  nowhere as a whole fills the gaps.
- ``spiral``: documents are taken in turns from length classes (powers of two), so that every
  sequence holds long and short ones; then they are laid one after the other. With segments, those
  of a sequence are interleaved too, a segment of each in turn: for models that see across
  documents, whose short ones thereby reach over the whole sequence.

``concat``, the third way, is the stream itself, cut; see ``batches``.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_ext.config.schema import Packing


@dataclass(frozen=True, order=True)
class Segment:
    """Tokens [offset, offset + length) of one piece of the stretch."""

    piece: int
    offset: int
    length: int


Row = list[Segment]


def pack(
    lengths: npt.NDArray[np.int64],
    *,
    sequence_length: int,
    packing: Packing,
    segment: int = 0,
) -> list[Row]:
    """Lays pieces out in sequences.

    Args:
        lengths: tokens of each piece, all above 0, a multiple of ``sequence_length`` together.
        sequence_length: tokens of a sequence.
        packing: ``best_fit`` or ``spiral``.
        segment: tokens of an interleaved segment (``spiral``); 0: whole pieces.

    Returns:
        The segments of every sequence, in order; each sequence is full.
    """
    sizes = lengths.tolist()
    if packing is Packing.best_fit:
        return _best_fit(sizes, sequence_length)
    if packing is not Packing.spiral:
        raise ValueError(f"packing {packing.name}: given, allowed best_fit or spiral")
    rows = _cut(_round_robin(sizes), sizes, sequence_length)
    return [_interleave(row, segment) for row in rows] if segment else rows


def _best_fit(sizes: Sequence[int], capacity: int) -> list[Row]:
    count = sum(sizes) // capacity
    rows: list[Row] = []
    rest: list[Segment] = []
    for piece, size in enumerate(sizes):
        full = size // capacity
        rows += [[Segment(piece, i * capacity, capacity)] for i in range(full)]
        if size % capacity:
            rest.append(Segment(piece, full * capacity, size % capacity))
    free = [(capacity, row) for row in range(len(rows), count)]  # by room, then number
    rows += [[] for _ in free]
    homeless: list[Segment] = []
    for item in sorted(rest, key=lambda item: (-item.length, item.piece)):
        place = bisect_left(free, (item.length, -1))
        if place == len(free):
            homeless.append(item)
            continue
        room, row = free.pop(place)
        rows[row].append(item)
        if room > item.length:
            insort(free, (room - item.length, row))
    # What is left fills the gaps exactly: the longest piece the widest gap first, so few cuts.
    for item in homeless:
        done = 0
        while done < item.length:
            room, row = free.pop()
            size = min(room, item.length - done)
            rows[row].append(Segment(item.piece, item.offset + done, size))
            done += size
            if room > size:
                insort(free, (room - size, row))
    return [sorted(row) for row in rows]


def _round_robin(sizes: Sequence[int]) -> list[int]:
    """Pieces in turns from the classes of their lengths, longest class first."""
    classes: dict[int, list[int]] = {}
    for piece, size in enumerate(sizes):
        classes.setdefault(size.bit_length(), []).append(piece)
    queues = [iter(classes[key]) for key in sorted(classes, reverse=True)]
    order: list[int] = []
    while queues:
        left = []
        for queue in queues:
            for piece in queue:
                order.append(piece)
                left.append(queue)
                break
        queues = left
    return order


def _cut(order: Sequence[int], sizes: Sequence[int], capacity: int) -> list[Row]:
    """Pieces one after the other, cut where a sequence is full."""
    rows: list[Row] = [[]]
    room = capacity
    for piece in order:
        done = 0
        while done < sizes[piece]:
            if room == 0:
                rows.append([])
                room = capacity
            size = min(room, sizes[piece] - done)
            rows[-1].append(Segment(piece, done, size))
            done += size
            room -= size
    return rows


def _interleave(row: Row, segment: int) -> Row:
    """A segment of each piece in turn, until all have ended."""
    longest = max(item.length for item in row)
    return [
        Segment(item.piece, item.offset + start, min(segment, item.length - start))
        for start in range(0, longest, segment)
        for item in row
        if start < item.length
    ]
