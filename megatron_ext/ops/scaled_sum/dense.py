"""The sum in plain torch, storing for the backward pass what is added and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def scaled_sum(x: Tensor, scale: Tensor, others: Sequence[Tensor]) -> Tensor:
    """x + sum_j scale_j others_j, added up in float32, or float64 for float64 tensors.

    Args:
        x: [...].
        scale: [J], any floating type.
        others: J tensors of x's shape and dtype.

    Returns:
        [...] in x's dtype. First derivatives only.

    Raises:
        ValueError: numbers, shapes or dtypes differ.
    """
    wrong = [
        f"tensor {place}: given {tuple(other.shape)} {other.dtype}, allowed {tuple(x.shape)} "
        f"{x.dtype}"
        for place, other in enumerate(others)
        if other.shape != x.shape or other.dtype != x.dtype
    ]
    if scale.shape != (len(others),):
        wrong.append(f"scale: given {tuple(scale.shape)}, allowed ({len(others)},)")
    if wrong:
        raise ValueError("; ".join(wrong))
    out: Tensor = _ScaledSum.apply(scale, x, *others)  # type: ignore[no-untyped-call]  # torch's
    return out


class _ScaledSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scale: Tensor, x: Tensor, *others: Tensor) -> Tensor:
        ctx.save_for_backward(scale, *others)
        total = x.to(torch.promote_types(x.dtype, torch.float32), copy=True)
        for factor, other in zip(scale.to(total.dtype), others, strict=True):
            total.addcmul_(other.to(total.dtype), factor)  # times a scalar it would stay 16-bit
        return total.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scale, *others = ctx.saved_tensors
        wide = grads[0].to(torch.promote_types(grads[0].dtype, torch.float32))
        factors = scale.to(wide.dtype)
        grad_scale = torch.stack([(wide * other).sum() for other in others]).to(scale.dtype)
        grad_others = [
            (factor * wide).to(other.dtype) for factor, other in zip(factors, others, strict=True)
        ]
        return (grad_scale, grads[0], *grad_others)
