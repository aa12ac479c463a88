"""Several linear maps of one input, whose gradient is summed by the matrix products themselves.

    y_i = x W_i^T        dx = sum_i dy_i W_i        dW_i = dy_i^T x

By themselves each gives a gradient of x, and autograd adds them: one kernel and three passes over
memory for each but the first. A product adds to what is there while it writes, which costs one.

Shapes: x [..., in], W_i [out_i, in], y_i [..., out_i].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def project(x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """``F.linear(x, w)`` for each weight; first derivatives only.

    The gradient of x is added up from the last weight to the first, as autograd would: on a CPU
    with the same bits, elsewhere each sum is rounded once, with its product. All outputs'
    gradients are there before it begins. Kept for the backward pass are x and the weights. Under
    autocast, whose casts a backward pass would not see, each map is by itself.

    Args:
        x: [..., in], any floating dtype.
        weights: each [out_i, in], of the dtype of x.

    Returns:
        One [..., out_i] a weight.
    """
    device = x.device.type
    autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    if len(weights) < 2 or autocast:
        return tuple(F.linear(x, weight) for weight in weights)
    out: tuple[Tensor, ...] = _Projections.apply(x, *weights)  # type: ignore[no-untyped-call]  # torch's own lacks types
    return out


class _Projections(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.shape = x.shape
        of_x, *of_weights = ctx.needs_input_grad
        # Where all weights are frozen x is not needed, nor weights where x is data.
        kept = weights if of_x else (None for _ in weights)
        ctx.save_for_backward(x if any(of_weights) else None, *kept)
        return tuple(F.linear(x, weight) for weight in weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        of_x, *of_weights = ctx.needs_input_grad
        rows = None if x is None else x.reshape(-1, x.shape[-1])
        d_x: Tensor | None = None
        d_weights: list[Tensor | None] = [None] * len(weights)
        for i in reversed(range(len(grads))):
            grad = grads[i]
            if grad is None:
                continue
            grad = grad.reshape(-1, grad.shape[-1])
            if of_x:
                d_x = grad @ weights[i] if d_x is None else add_product(d_x, grad, weights[i])
            if of_weights[i] and rows is not None:
                d_weights[i] = grad.T @ rows
        return None if d_x is None else d_x.view(ctx.shape), *d_weights


def add_product(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """``total + a b`` in the place of `total`."""
    if total.is_cpu:
        return total.add_(a @ b)
    return torch.addmm(total, a, b, out=total)
