"""SiTU-GLU with its own backward: it keeps only the two inputs, in their own dtype.

Autograd would keep six float32 tensors of the hidden width; the two inputs in bfloat16 are a sixth
of that, and the backward recomputes three cheap functions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def situ_glu_dense(
    gate: Tensor,
    up: Tensor | None = None,
    *,
    beta: float | None,
    linear_beta: float | None,
    scale: Tensor | None = None,
) -> Tensor:
    """See `ops.situ.situ_glu`."""
    out: Tensor = _SituGlu.apply(  # type: ignore[no-untyped-call]
        gate, up, scale, beta, linear_beta
    )
    return out


def branches(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    """Both branches [..., F]: as given, or the halves of the one tensor."""
    if up is not None:
        return gate, up
    first, second = gate.chunk(2, dim=-1)
    return first, second


class _SituGlu(torch.autograd.Function):
    """scale phi(g) psi(u), with phi(g) = b tanh(g/b) sigmoid(g) and psi(u) = c tanh(u/c).

    Without a bound x stands for b tanh(x/b).
    """

    @staticmethod
    def forward(
        ctx: Any,
        gate: Tensor,
        up: Tensor | None,
        scale: Tensor | None,
        beta: float | None,
        linear_beta: float | None,
    ) -> Tensor:
        ctx.save_for_backward(gate, up, scale)
        ctx.bounds = (beta, linear_beta)
        dtype = torch.promote_types(gate.dtype, torch.float32)
        g, u = (x.to(dtype) for x in branches(gate, up))
        out = torch.sigmoid(g).mul_(_bent(g, beta))
        out.mul_(_bent(u, linear_beta)).mul_((beta or 1.0) * (linear_beta or 1.0))
        if scale is not None:
            out.mul_(scale.unsqueeze(-1))
        return out.to(gate.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, scale = ctx.saved_tensors
        beta, linear_beta = ctx.bounds
        dtype = torch.promote_types(gate.dtype, torch.float32)
        g, u = (x.to(dtype) for x in branches(gate, up))
        grad = grads[0].to(dtype)
        sigma, bent_g, bent_u = torch.sigmoid(g), _bent(g, beta), _bent(u, linear_beta)
        b, c = beta or 1.0, linear_beta or 1.0
        d_scale = None
        if scale is not None:
            d_scale = (grad * bent_g * sigma * bent_u).sum(-1).mul_(b * c)
            d_scale = d_scale.to(scale.dtype)
            grad = grad * scale.to(dtype).unsqueeze(-1)
        d_gate = torch.empty_like(gate)
        d_up = None if up is None else torch.empty_like(up)
        to_gate, to_up = branches(d_gate, d_up)
        # phi' = sigmoid * (sech^2(g/b) + b tanh(g/b) (1 - sigmoid)), psi' = sech^2(u/c)
        slope = _slope(bent_g, beta).add_(b * bent_g * (1 - sigma)).mul_(sigma)
        to_gate.copy_((grad * bent_u).mul_(slope).mul_(c))
        to_up.copy_((grad * bent_g).mul_(sigma).mul_(_slope(bent_u, linear_beta)).mul_(b))
        return d_gate, d_up, d_scale, None, None


def _bent(x: Tensor, bound: float | None) -> Tensor:
    return x if bound is None else torch.tanh(x / bound)


def _slope(bent: Tensor, bound: float | None) -> Tensor:
    """Derivative of b tanh(x/b), from tanh(x/b); a new tensor."""
    return torch.ones_like(bent) if bound is None else 1 - bent.square()
