"""Tensors of a device in main memory, for the writer to be forked with, while training waits.

`tensor.to("cpu")` fills new memory a page at a time with one thread, 1.2 GB/s; page-locked memory
of that size takes longer still to get (1.0 GB/s on an H200 machine, once, and up to twice the size
is then kept for good). Here pieces go through a small page-locked ring, and several threads copy
them on into new memory of large pages, which is given back when the writer has ended.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

SLOT_BYTES = 64 << 20
SLOTS = 4
THREADS = 8
ALIGNMENT = 64  # of every tensor: what processors load at once

# (path, name, (objects, tensors)), the last two as (item, data): megatron-core's.
Bucket = tuple[str, str, tuple[list[tuple[Any, Any]], list[tuple[Any, Tensor]]]]


class Piece(NamedTuple):
    """Bytes of a tensor that go into one slot.

    Attributes:
        source: uint8, on its device.
        at: where in the slot, in bytes.
    """

    source: Tensor
    at: int


def to_host(buckets: Sequence[Bucket]) -> list[Bucket]:
    """The same buckets, with tensors of a device replaced by copies in main memory.

    Tensors that are in main memory stay as they are: the writer has them as they were when it was
    forked. Waits until everything is copied.
    """
    given = [tensor for _, _, (_, tensors) in buckets for _, tensor in tensors]
    copies = iter(host_copies(given))
    return [
        (path, name, (objects, [(item, next(copies)) for item, _ in tensors]))
        for path, name, (objects, tensors) in buckets
    ]


def host_copies(tensors: Sequence[Tensor], *, slot_bytes: int = SLOT_BYTES) -> list[Tensor]:
    """Copies of tensors of a device in main memory, each with a storage of its own size.

    Args:
        tensors: any shapes and dtypes; those in main memory are handed back themselves.
        slot_bytes: of the ring's slots, a multiple of `ALIGNMENT`.
    """
    away = [tensor for tensor in tensors if tensor.device.type != "cpu" and tensor.numel()]
    if not away:
        return [tensor.cpu() for tensor in tensors]
    places, total = places_of(away)
    memory = mmap.mmap(-1, total, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    _fill(np.frombuffer(memory, np.uint8), away, places, slot_bytes)
    found = {
        id(tensor): torch.frombuffer(
            memory, dtype=tensor.dtype, count=tensor.numel(), offset=place
        ).view(tensor.shape)
        for tensor, place in zip(away, places, strict=True)
    }
    return [found[id(tensor)] if id(tensor) in found else tensor.cpu() for tensor in tensors]


def places_of(tensors: Sequence[Tensor]) -> tuple[list[int], int]:
    """Where tensors begin that lie behind each other, aligned, and how long all are, in bytes."""
    places, total = [], 0
    for tensor in tensors:
        places.append(total)
        total += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return places, total


def _fill(
    memory: np.ndarray[Any, Any], away: Sequence[Tensor], places: Sequence[int], slot_bytes: int
) -> None:
    device = away[0].device
    ring = [torch.empty(slot_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(SLOTS)]
    arrived = [torch.cuda.Event() for _ in range(SLOTS)]
    moved: list[list[Future[None]]] = [[] for _ in range(SLOTS)]
    share = -(-slot_bytes // THREADS)
    with ThreadPoolExecutor(THREADS) as pool, torch.cuda.device(device):

        def move_on(number: int) -> None:
            """Let the threads copy a slot that has arrived."""
            arrived[number % SLOTS].synchronize()
            slot, to = ring[number % SLOTS].numpy(), memory[number * slot_bytes :][:slot_bytes]
            moved[number % SLOTS] = [
                pool.submit(np.copyto, to[at : at + share], slot[: len(to)][at : at + share])
                for at in range(0, len(to), share)
            ]

        last = -1
        for number, pieces in enumerate(by_slot(away, places, slot_bytes)):
            slot = number % SLOTS
            for future in moved[slot]:
                future.result()
            for piece in pieces:
                target = ring[slot][piece.at : piece.at + len(piece.source)]
                target.copy_(piece.source, non_blocking=True)
            arrived[slot].record()
            if last >= 0:
                move_on(last)
            last = number
        move_on(last)
        for future in (future for slot in moved for future in slot):
            future.result()


def by_slot(
    tensors: Sequence[Tensor], places: Sequence[int], slot_bytes: int
) -> Iterator[list[Piece]]:
    """What each slot holds, in order, where slots lie behind each other in memory."""
    pieces: list[Piece] = []
    slot = 0
    for tensor, place in zip(tensors, places, strict=True):
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        done = 0
        while done < len(flat):
            at = place + done - slot * slot_bytes
            if at >= slot_bytes:
                yield pieces
                pieces, slot = [], slot + 1
                continue
            piece = flat[done : done + slot_bytes - at]
            pieces.append(Piece(piece, at))
            done += len(piece)
    yield pieces
