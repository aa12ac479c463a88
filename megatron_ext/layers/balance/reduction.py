"""Sums the statistics of all layers of a rank: one collective for each dtype."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.layers.balance.base import Balancer


class Reduction:
    """A sum under way. Statistics must not be touched before `finish`."""

    def __init__(self, balancers: Iterable[Balancer], group: ProcessGroup | None) -> None:
        self._balancers = list(balancers)
        self._group = group
        self._buckets: list[tuple[list[Tensor], Tensor, dist.Work]] = []
        if group is None:
            return
        parts: dict[torch.dtype, list[Tensor]] = {}
        for balancer in self._balancers:
            for tensor in balancer.statistics():
                parts.setdefault(tensor.dtype, []).append(tensor)
        for tensors in parts.values():
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
            work = dist.all_reduce(flat, group=group, async_op=True)
            self._buckets.append((tensors, flat, work))

    @torch.no_grad()
    def finish(self) -> None:
        """Wait, and put the sums where the parts were."""
        for tensors, flat, work in self._buckets:
            work.wait()
            pieces = flat.split([tensor.numel() for tensor in tensors])
            for tensor, piece in zip(tensors, pieces, strict=True):
                tensor.copy_(piece.reshape(tensor.shape))
        self._buckets = []
        if self._group is not None:
            for balancer in self._balancers:
                balancer.gather(self._group)


def start_reduce(balancers: Iterable[Balancer], group: ProcessGroup | None) -> Reduction:
    """Begin to sum; the caller does something else, such as reducing gradients, then `finish`es.

    Args:
        balancers: of all expert layers of this rank, in the same order on all ranks of `group`.
        group: every rank that holds other tokens of the step for these layers (data and context
            parallel ranks, and tensor parallel ones when they shard the sequence); None: none.
    """
    return Reduction(balancers, group)


def reduce(balancers: Iterable[Balancer], group: ProcessGroup | None) -> None:
    """`start_reduce` and `finish` at once."""
    start_reduce(balancers, group).finish()
