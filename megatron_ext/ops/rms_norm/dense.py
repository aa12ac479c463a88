"""The RMS norm by torch, which promotes 16-bit inputs to float32 inside."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def rms_norm_dense(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `ops.rms_norm.rms_norm`."""
    return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)
