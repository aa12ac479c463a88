"""SiTU-GLU as its formula reads (Kimi K3): what the fast form is compared with."""

from __future__ import annotations

import torch
from torch import Tensor


def situ_glu_reference(gate: Tensor, up: Tensor, *, beta: float, linear_beta: float) -> Tensor:
    """``beta * tanh(gate / beta) * sigmoid(gate) * linear_beta * tanh(up / linear_beta)``.

    Args:
        gate: [..., D], any floating dtype.
        up: [..., D].
        beta: bound of the gate branch.
        linear_beta: bound of the linear branch.

    Returns:
        [..., D] in the dtype of ``gate``; computed in float32, or float64 for float64 input.
    """
    dtype = torch.promote_types(gate.dtype, torch.float32)
    g, u = gate.to(dtype), up.to(dtype)
    bounded = beta * torch.tanh(g / beta) * torch.sigmoid(g)
    return (bounded * (linear_beta * torch.tanh(u / linear_beta))).to(gate.dtype)
