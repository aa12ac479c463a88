"""SiTU-GLU as its formula reads (Kimi K3): what the fast form is compared with."""

from __future__ import annotations

import torch
from torch import Tensor


def situ_glu_reference(
    gate: Tensor,
    up: Tensor | None = None,
    *,
    beta: float | None,
    linear_beta: float | None,
    scale: Tensor | None = None,
) -> Tensor:
    """``beta * tanh(gate / beta) * sigmoid(gate) * linear_beta * tanh(up / linear_beta)``.

    Args:
        gate: [..., F], any floating dtype; without ``up``, both [..., 2F].
        up: [..., F].
        beta: bound of the gate branch; None: x instead of ``beta * tanh(x / beta)``.
        linear_beta: bound of the linear branch; None: likewise.
        scale: [...], a factor a row.

    Returns:
        [..., F] in the dtype of ``gate``; computed in float32, or float64 for float64 input.
    """
    if up is None:
        gate, up = gate.chunk(2, dim=-1)
    dtype = torch.promote_types(gate.dtype, torch.float32)
    g, u = gate.to(dtype), up.to(dtype)
    bounded = g if beta is None else beta * torch.tanh(g / beta)
    linear = u if linear_beta is None else linear_beta * torch.tanh(u / linear_beta)
    out = bounded * torch.sigmoid(g) * linear
    if scale is not None:
        out = out * scale.to(dtype).unsqueeze(-1)
    return out.to(gate.dtype)
