"""Grouped matrix product in one kernel: torch's grouped_mm, on GPUs in bfloat16."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ALIGNMENT = 8  # bfloat16 elements in the 16 bytes to which rows must be aligned


def grouped_mm() -> Callable[..., Tensor] | None:
    """torch's public grouped_mm, else the private name that it had before; None: neither."""
    found: Callable[..., Tensor] | None = getattr(F, "grouped_mm", None)
    return found or getattr(torch, "_grouped_mm", None)


def misfit(device: torch.device, dtype: torch.dtype, widths: Iterable[int]) -> str | None:
    """Why the kernel cannot take such tensors; None if it can."""
    if grouped_mm() is None:
        return "this torch has no grouped_mm"
    if device.type not in ("cuda", "meta"):
        return f"it needs a CUDA device, the tensors are on {device.type}"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return "it needs a GPU of compute capability 8.0 or above"
    if dtype is not torch.bfloat16:
        return f"it takes bfloat16 only, not {dtype}"
    if any(width % ALIGNMENT for width in widths):
        return f"widths must be multiples of {ALIGNMENT}"
    return None


def fused_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x [M, K], weight [E, N, K], ends int32 [E] (row at which each group ends) to [M, N]."""
    product = grouped_mm()
    if product is None:
        raise RuntimeError("fused_linear: this torch has no grouped_mm")
    out: Tensor = _DenseGradient.apply(  # type: ignore[no-untyped-call]  # torch's own lacks types
        product(x, weight.transpose(-2, -1), offs=ends)
    )
    return out


class _DenseGradient(torch.autograd.Function):
    """Changes nothing; grouped_mm's backward refuses the expanded gradient of, say, a sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].contiguous()
