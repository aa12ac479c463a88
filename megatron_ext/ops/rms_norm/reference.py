"""The RMS norm as its formula reads (Zhang and Sennrich 2019)."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `ops.rms_norm.rms_norm`."""
    wide = torch.promote_types(x.dtype, torch.float32)
    y = x.to(wide)
    return (y / (y.square().mean(-1, keepdim=True) + eps).sqrt() * weight.to(wide)).to(x.dtype)
