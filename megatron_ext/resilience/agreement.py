"""One small reduction with which all ranks come to the same decision."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


def agree(numbers: Sequence[int], *, device: torch.device) -> list[int]:
    """The largest of every number over all ranks. Collective.

    A rank that has died makes it fail (gloo) or wait until the launcher ends this one (NCCL):
    either way nothing that needs an agreement, such as a save, begins without every rank.

    Args:
        numbers: as many on every rank, each within int64.
        device: of the ranks' backend.
    """
    tensor = torch.tensor(list(numbers), dtype=torch.int64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return [int(value) for value in tensor.tolist()]
