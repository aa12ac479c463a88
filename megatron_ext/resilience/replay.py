"""Which rank computes something else than its like from the same weights and data.

A device that is wrong without an error trains everybody's model, since gradients are summed. Data
parallel ranks have the same weights; given the same micro-batch they must find the same numbers, to
the last bit where operators are deterministic.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
PARTS = ("weights", "loss", "gradients")


@dataclass(frozen=True)
class Replayed:
    """What one rank found.

    Attributes:
        host: its name.
        place: its rank in every group but that of data parallelism; ranks of one place are alike.
        sums: checksums of its weights, loss and gradients.
    """

    rank: int
    host: str
    place: tuple[int, ...]
    sums: tuple[int, ...]


def checksum(tensors: Iterable[Tensor]) -> Tensor:
    """The sum of all elements taken as integers, modulo 2**64: one flipped bit changes it, the
    order of elements does not. A scalar on the tensors' device, without waiting for it."""
    parts = [
        tensor.detach().contiguous().view(_INTEGERS[tensor.element_size()]).sum(dtype=torch.int64)
        for tensor in tensors
        if tensor.numel()
    ]
    return torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.int64)


def disagreement(found: Sequence[Replayed]) -> str:
    """Who differs from most of its like, and in what; empty when all agree.

    Of two ranks both are named: nobody can tell which one is right.
    """
    alike = defaultdict(list)
    for row in found:
        alike[row.place].append(row)
    lines = []
    for rows in alike.values():
        # Wrong weights explain a wrong loss, and that wrong gradients: the first part tells.
        for part, name in enumerate(PARTS):
            counts = Counter(row.sums[part] for row in rows)
            if len(counts) == 1:
                continue
            (value, most), *others = counts.most_common()
            if most > others[0][1]:
                odd = [row for row in rows if row.sums[part] != value]
                what = f"{_names(odd)} found other {name} than {most} ranks of the same place"
            else:
                what = f"{_names(rows)} found different {name}; which is right is not known"
            lines.append(what)
            break
    return "; ".join(lines)


def _names(rows: Sequence[Replayed]) -> str:
    shown = ", ".join(f"rank {row.rank} on {row.host}" for row in rows[:8])
    return shown + (f" and {len(rows) - 8} more" if len(rows) > 8 else "")
