"""The router's matrix product as its formula reads."""

from __future__ import annotations

import torch
from torch import Tensor


def router_logits_reference(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, h], weight [E, h] to [T, E], in float32 or wider."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return x.to(dtype) @ weight.to(dtype).T
