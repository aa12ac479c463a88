"""Tensors of a device in main memory, for the writer to be forked with, while training waits.

torch page-locks memory for `tensor.to("cpu", non_blocking=True)`, as megatron-core calls it, by the
tensor, rounded up to a power of two, on one thread, and so slowly that the first save of a run
waits for little else. Here tensors lie behind each other in pieces that threads get ready at a
time and that the next save copies into again. The memory is shared with forked processes: a fork
copies what is page-locked and private, page for page.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

PIECE_BYTES = 1 << 30
ALIGNMENT = 64  # of every tensor: what processors load at once
MOST_THREADS = 16  # that get pieces ready

# (path, name, (objects, tensors)), the last two as (item, data): megatron-core's.
Bucket = tuple[str, str, tuple[list[tuple[Any, Any]], list[tuple[Any, Tensor]]]]


class Staging:
    """Main memory that saves copy the tensors of a device into, kept from save to save.

    Args:
        locked: whether it is page-locked, which a GPU needs to copy at full speed.
        piece_bytes: at most, of a piece of memory, which holds as many tensors as fit and has their
            size; one that holds a larger tensor is as large as that.
    """

    def __init__(self, *, locked: bool | None = None, piece_bytes: int = PIECE_BYTES) -> None:
        self._locked = torch.cuda.is_available() if locked is None else locked
        self._piece_bytes = piece_bytes
        self._pieces: list[Tensor] = []

    def to_host(self, buckets: Sequence[Bucket]) -> list[Bucket]:
        """The same buckets, with tensors of a device replaced by copies in main memory.

        Tensors that are in main memory stay as they are: the writer has them as they were when it
        was forked. Waits until everything is copied. The next call overwrites the copies, in the
        writer too: call it when that has ended.
        """
        given = [tensor for _, _, (_, tensors) in buckets for _, tensor in tensors]
        away = [tensor for tensor in given if tensor.device.type != "cpu"]
        copies = iter(self.copies(away))
        if away:
            torch.cuda.synchronize()
        return [
            (
                path,
                name,
                (
                    objects,
                    [(item, x if x.device.type == "cpu" else next(copies)) for item, x in tensors],
                ),
            )
            for path, name, (objects, tensors) in buckets
        ]

    def copies(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copies of tensors of any shapes and dtypes, under way where memory is page-locked:
        synchronise before use, and while this object lives.

        Each has a storage of its own size, as all of a storage is written with a tensor.
        """
        places = self._places([tensor.nbytes for tensor in tensors])
        copies: list[Tensor] = []
        for tensor, (number, offset) in zip(tensors, places, strict=True):
            # By way of a buffer: a view would share the storage of all.
            copy = torch.empty(0, dtype=tensor.dtype)
            if tensor.numel():
                piece = self._pieces[number].numpy()
                copy = torch.frombuffer(
                    piece, dtype=tensor.dtype, count=tensor.numel(), offset=offset
                )
            copies.append(copy.view(tensor.shape))
            copies[-1].copy_(tensor.detach(), non_blocking=self._locked)
        return copies

    def _places(self, sizes: Sequence[int]) -> list[tuple[int, int]]:
        """(number of the piece, offset) for so many bytes each; gets pieces that are missing."""
        held, there = [piece.nbytes for piece in self._pieces], len(self._pieces)
        places, number, end = [], 0, 0
        for size in map(_aligned, sizes):
            while number < len(held) and end + size > (
                held[number] if number < there else self._piece_bytes
            ):
                number, end = number + 1, 0
            if size and number == len(held):
                held.append(0)
            places.append((number, end))
            end += size
            if size and number >= there:
                held[number] = end
        if missing := held[there:]:
            # A thread begins on the first GPU, whichever is this rank's.
            device = torch.cuda.current_device() if self._locked else None
            with ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), MOST_THREADS)) as threads:
                self._pieces += threads.map(partial(_piece, device=device), missing)
        return places


def _piece(size: int, *, device: int | None) -> Tensor:
    """Memory of so many bytes, page-locked for a GPU if there is one."""
    piece = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
    if device is not None:
        with torch.cuda.device(device):
            address, cudart = piece.data_ptr(), torch.cuda.cudart()
            ctypes.memset(address, 0, size)  # each thread has its pages made, which is most of it
            torch.cuda.check_error(int(cudart.cudaHostRegister(address, size, 0)))
            weakref.finalize(piece, cudart.cudaHostUnregister, address).atexit = False
    return piece


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
