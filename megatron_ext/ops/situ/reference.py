"""SiTU-GLU as its formula reads (Kimi K3): what the fast form is compared with."""

from __future__ import annotations

import torch
from torch import Tensor


def situ_glu_reference(
    gate: Tensor, up: Tensor, *, beta: float | None, linear_beta: float | None
) -> Tensor:
    """``beta * tanh(gate / beta) * sigmoid(gate) * linear_beta * tanh(up / linear_beta)``.

    Args:
        gate: [..., D], any floating dtype.
        up: [..., D].
        beta: bound of the gate branch; None: x instead of ``beta * tanh(x / beta)``.
        linear_beta: bound of the linear branch; None: likewise.

    Returns:
        [..., D] in the dtype of ``gate``; computed in float32, or float64 for float64 input.
    """
    dtype = torch.promote_types(gate.dtype, torch.float32)
    g, u = gate.to(dtype), up.to(dtype)
    bounded = g if beta is None else beta * torch.tanh(g / beta)
    linear = u if linear_beta is None else linear_beta * torch.tanh(u / linear_beta)
    return (bounded * torch.sigmoid(g) * linear).to(gate.dtype)
