"""SiTU-GLU with its own backward: it keeps only the two inputs, in their own dtype.

Autograd would keep six float32 tensors of the hidden width; the two inputs in bfloat16 are a sixth
of that, and the backward recomputes three cheap functions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class SituGlu(torch.autograd.Function):
    """phi(g) * psi(u), with phi(g) = b tanh(g/b) sigmoid(g) and psi(u) = c tanh(u/c)."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.bounds = (beta, linear_beta)
        dtype = torch.promote_types(gate.dtype, torch.float32)
        g, u = gate.to(dtype), up.to(dtype)
        out = torch.tanh(g / beta).mul_(torch.sigmoid(g))
        out.mul_(torch.tanh(u / linear_beta)).mul_(beta * linear_beta)
        return out.to(gate.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        beta, linear_beta = ctx.bounds
        dtype = torch.promote_types(gate.dtype, torch.float32)
        grad = grads[0].to(dtype)
        sigma = torch.sigmoid(gate.to(dtype))
        tanh_g = torch.tanh(gate.to(dtype) / beta)
        tanh_u = torch.tanh(up.to(dtype) / linear_beta)
        # phi' = sigmoid * (sech^2(g/b) + b tanh(g/b) (1 - sigmoid)), psi' = sech^2(u/c)
        slope = (1 - tanh_g.square()).add_(beta * tanh_g * (1 - sigma)).mul_(sigma)
        d_gate = (grad * tanh_u).mul_(slope).mul_(linear_beta)
        d_up = (grad * tanh_g).mul_(sigma).mul_(1 - tanh_u.square()).mul_(beta)
        return d_gate.to(gate.dtype), d_up.to(up.dtype), None, None
