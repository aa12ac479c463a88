"""Tensors of a device in main memory, for the writer to be forked with, while training waits.

torch page-locks memory for `tensor.to("cpu", non_blocking=True)`, as megatron-core calls it, by the
tensor, rounded up to a power of two, on one thread, and so slowly that the first save of a run
waits for little else. Here tensors lie behind each other in memory that can be got ready while
training goes on and that the next save copies into again. It is shared with forked processes: a
fork copies what is page-locked and private, page for page.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 64  # of every tensor: what processors load at once
PART_BYTES = 1 << 30  # that a thread makes pages of at a time
MOST_THREADS = 16  # while training waits
FEW_THREADS = 4  # while it goes on, on the same processors

# (path, name, (objects, tensors)), the last two as (item, data): megatron-core's.
Bucket = tuple[str, str, tuple[list[tuple[Any, Any]], list[tuple[Any, Tensor]]]]


class Staging:
    """Main memory that saves copy the tensors of a device into, kept from save to save.

    Args:
        locked: whether it is page-locked, which a GPU needs to copy at full speed.
    """

    def __init__(self, *, locked: bool | None = None) -> None:
        self._locked = torch.cuda.is_available() if locked is None else locked
        self._regions: list[Tensor] = []
        self._coming: Future[Tensor] | None = None

    def reserve(self, size: int) -> None:
        """Begin to get so many bytes ready, in the background; the next copies wait for them.

        Does nothing where there is memory already. Where there is not enough of it nothing is
        kept, and the next copies ask again, for what they need.
        """
        if size and not self._regions and self._coming is None:
            with_one = ThreadPoolExecutor(1)
            self._coming = with_one.submit(
                self._region, size, threads=FEW_THREADS, device=self._device()
            )
            with_one.shutdown(wait=False)

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
                region = self._regions[number].numpy()
                copy = torch.frombuffer(
                    region, dtype=tensor.dtype, count=tensor.numel(), offset=offset
                )
            copies.append(copy.view(tensor.shape))
            copies[-1].copy_(tensor.detach(), non_blocking=self._locked)
        return copies

    def _places(self, sizes: Sequence[int]) -> list[tuple[int, int]]:
        """(number of the region, offset) for so many bytes each; gets one more if need be."""
        coming, self._coming = self._coming, None
        if coming is not None:
            with contextlib.suppress(OSError, RuntimeError):  # asked for again below
                self._regions.append(coming.result())
        places, number, end = [], 0, 0
        for size in map(_aligned, sizes):
            while number < len(self._regions) and end + size > self._regions[number].nbytes:
                number, end = number + 1, 0
            places.append((number, end))
            end += size
        if number == len(self._regions) and end:
            region = self._region(end, threads=MOST_THREADS, device=self._device())
            self._regions.append(region)
        return places

    def _device(self) -> int | None:
        return torch.cuda.current_device() if self._locked else None

    def _region(self, size: int, *, threads: int, device: int | None) -> Tensor:
        """So many bytes of new memory, page-locked for a GPU if there is one."""
        region = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
        if device is not None:
            address, cudart = region.data_ptr(), torch.cuda.cudart()

            def make_pages(begin: int) -> None:
                ctypes.memset(address + begin, 0, min(PART_BYTES, size - begin))

            # Registering would make them too, one after another, which takes most of the time.
            with ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), threads)) as helpers:
                list(helpers.map(make_pages, range(0, size, PART_BYTES)))
            # A thread begins on the first GPU, whichever is the rank's, and would start CUDA there.
            with torch.cuda.device(device):
                torch.cuda.check_error(int(cudart.cudaHostRegister(address, size, 0)))
            weakref.finalize(region, cudart.cudaHostUnregister, address).atexit = False
        return region


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
