"""The sum as the formula reads. What tests compare with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def scaled_sum_reference(x: Tensor, scale: Tensor, others: Sequence[Tensor]) -> Tensor:
    """x + sum_j scale_j others_j. See `dense.scaled_sum`."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    total = x.to(dtype)
    for factor, other in zip(scale.to(dtype), others, strict=True):
        total = total + factor * other.to(dtype)
    return total.to(x.dtype)
