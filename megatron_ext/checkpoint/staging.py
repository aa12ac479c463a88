"""Tensors of a device in main memory, for the writer to be forked with, while training waits.

torch page-locks memory for `tensor.to("cpu", non_blocking=True)`, as megatron-core calls it, by the
tensor, rounded up to a power of two, and so slowly that the first save of a run waits for little
else: 24 s for the 24 GB of `mini` on an H200, where copying takes 0.4. Here tensors lie behind each
other in pieces of one size, which torch keeps when they are given back, and hands out again at the
next save.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

SEGMENT_BYTES = 1 << 30  # a power of two: else torch takes the next one
ALIGNMENT = 64  # of every tensor: what processors load at once

# (path, name, (objects, tensors)), the last two as (item, data): megatron-core's.
Bucket = tuple[str, str, tuple[list[tuple[Any, Any]], list[tuple[Any, Tensor]]]]


def to_host(buckets: Sequence[Bucket]) -> list[Bucket]:
    """The same buckets, with tensors of a device replaced by copies in main memory.

    Tensors that are in main memory stay as they are: the writer has them as they were when it was
    forked. Waits until everything is copied.
    """
    given = [tensor for _, _, (_, tensors) in buckets for _, tensor in tensors]
    away = [tensor for tensor in given if tensor.device.type != "cpu"]
    copies = iter(host_copies(away, pinned=True))
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


def host_copies(
    tensors: Sequence[Tensor], *, pinned: bool, segment_bytes: int = SEGMENT_BYTES
) -> list[Tensor]:
    """Copies of tensors in main memory, under way where it is `pinned`: synchronise before use.

    Each has a storage of its own size, as all of a storage is written with a tensor. Memory is
    given back when the last of them is gone.

    Args:
        tensors: any shapes and dtypes.
        pinned: into page-locked memory.
        segment_bytes: of a piece of memory; the last one is no larger than what is left, one that
            holds a larger tensor is as large as that. torch page-locks the next power of two.
    """
    copies: list[Tensor] = []
    segment, end = torch.empty(0, dtype=torch.uint8), 0
    left = sum(_aligned(tensor.nbytes) for tensor in tensors)
    for tensor in tensors:
        if end + tensor.nbytes > len(segment) and tensor.numel():
            size = max(min(segment_bytes, left), tensor.nbytes)
            segment, end = torch.empty(size, dtype=torch.uint8, pin_memory=pinned), 0
        # By way of numpy: a view would share the storage of all.
        copy = torch.empty(0, dtype=tensor.dtype)
        if tensor.numel():
            copy = torch.frombuffer(
                segment.numpy(), dtype=tensor.dtype, count=tensor.numel(), offset=end
            )
        copies.append(copy.view(tensor.shape))
        copies[-1].copy_(tensor.detach(), non_blocking=pinned)
        end += _aligned(tensor.nbytes)
        left -= _aligned(tensor.nbytes)
    return copies


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
