"""The output gate as its formula reads."""

from __future__ import annotations

import torch
from torch import Tensor


def head_gate_reference(o: Tensor, gate: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """See `ops.gating.head_gate`."""
    wide = torch.promote_types(o.dtype, torch.float32)
    y = o.transpose(0, 1).to(wide)
    if weight is not None:
        y = y / (y.square().mean(-1, keepdim=True) + eps).sqrt() * weight.to(wide)
    return (y.flatten(-2) * torch.sigmoid(gate.to(wide))).to(o.dtype)
