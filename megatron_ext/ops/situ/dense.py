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
    """phi(g) * psi(u), with phi(g) = b tanh(g/b) sigmoid(g) and psi(u) = c tanh(u/c).

    Without a bound x stands for b tanh(x/b).
    """

    @staticmethod
    def forward(
        ctx: Any, gate: Tensor, up: Tensor, beta: float | None, linear_beta: float | None
    ) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.bounds = (beta, linear_beta)
        dtype = torch.promote_types(gate.dtype, torch.float32)
        g, u = gate.to(dtype), up.to(dtype)
        out = torch.sigmoid(g).mul_(_bent(g, beta))
        out.mul_(_bent(u, linear_beta)).mul_((beta or 1.0) * (linear_beta or 1.0))
        return out.to(gate.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        beta, linear_beta = ctx.bounds
        dtype = torch.promote_types(gate.dtype, torch.float32)
        grad = grads[0].to(dtype)
        sigma = torch.sigmoid(gate.to(dtype))
        bent_g = _bent(gate.to(dtype), beta)
        bent_u = _bent(up.to(dtype), linear_beta)
        # phi' = sigmoid * (sech^2(g/b) + b tanh(g/b) (1 - sigmoid)), psi' = sech^2(u/c)
        slope = _slope(bent_g, beta).add_((beta or 1.0) * bent_g * (1 - sigma)).mul_(sigma)
        d_gate = (grad * bent_u).mul_(slope).mul_(linear_beta or 1.0)
        d_up = (grad * bent_g).mul_(sigma).mul_(_slope(bent_u, linear_beta)).mul_(beta or 1.0)
        return d_gate.to(gate.dtype), d_up.to(up.dtype), None, None


def _bent(x: Tensor, bound: float | None) -> Tensor:
    return x if bound is None else torch.tanh(x / bound)


def _slope(bent: Tensor, bound: float | None) -> Tensor:
    """Derivative of b tanh(x/b), from tanh(x/b); a new tensor."""
    return torch.ones_like(bent) if bound is None else 1 - bent.square()
