"""Who computes which queries: the rank that holds them, or in head-tail order, all ranks as much.

Under a causal mask late queries meet more keys than early ones. In head-tail order the row is cut
into two halves a rank; of 2 R halves rank r computes the r-th from the head and the r-th from the
tail, whose keys together are the same number for every r. Only queries and what comes back move:
everything else stays where it is.

Shapes: b batch, E tokens of a rank that attend, X those it computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Queries:
    """Consecutive queries of one document.

    Attributes:
        place: first of them in the row.
        count: how many; may be 0.
        before: tokens of their document before them.
    """

    place: int
    count: int
    before: int


class HeadTail:
    """The exchange of one row's queries between the ranks of a group.

    Args:
        firsts: of every rank, how many of its first tokens attend, and how many tokens of their
            document lie on earlier ranks.
        length: tokens of a rank.
        group: ranks in the order of the row.
    """

    def __init__(
        self, firsts: Sequence[tuple[int, int]], *, length: int, group: dist.ProcessGroup
    ) -> None:
        self.group = group
        ranks, me = group.size(), group.rank()
        cut = length // 2
        halves = []
        for rank, (count, before) in enumerate(firsts):
            head = min(count, cut)
            halves.append(Queries(rank * length, head, before))
            halves.append(Queries(rank * length + cut, count - head, before + cut))
        owner = [min(half, 2 * ranks - 1 - half) for half in range(2 * ranks)]
        computed = [half for half in range(2 * ranks) if owner[half] == me]
        own = [2 * me, 2 * me + 1]
        # By the rank that they go to; where both go to the same, in their order.
        self._sent = sorted(range(2), key=lambda half: owner[own[half]])
        self._home = [halves[half].count for half in own]
        self._there = [
            sum(halves[half].count for half in own if owner[half] == rank) for rank in range(ranks)
        ]
        self._here = [
            sum(halves[half].count for half in computed if half // 2 == rank)
            for rank in range(ranks)
        ]
        self.computed = [halves[half] for half in computed]

    def to_owners(self, x: Tensor) -> Tensor:
        """[b, E, ...] of the queries held here to [b, X, ...] of those computed. Collective."""
        halves = torch.split(x, self._home, 1)
        sent = torch.cat([halves[half] for half in self._sent], 1)
        return self._exchange(sent, self._there, self._here)

    def to_home(self, x: Tensor) -> Tensor:
        """The inverse of ``to_owners``."""
        received = self._exchange(x, self._here, self._there)
        halves = torch.split(received, [self._home[half] for half in self._sent], 1)
        return torch.cat([halves[self._sent.index(half)] for half in range(2)], 1)

    def _exchange(self, x: Tensor, there: list[int], here: list[int]) -> Tensor:
        rows = x.transpose(0, 1).contiguous()
        received = rows.new_empty(sum(here), *rows.shape[1:])
        dist.all_to_all_single(received, rows, here, there, group=self.group)
        return received.transpose(0, 1)
