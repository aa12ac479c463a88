"""The router's matrix product with its own backward.

It keeps the input in its own dtype (which the layer keeps anyway) instead of a float32 copy, and
sets the precision around its three products only: in a bf16 run float32 products may be cut to
TensorFloat-32, which moves scores enough to change experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_ext.config.schema import RouterMatmul


class RouterMatmulFunction(torch.autograd.Function):
    """x [T, h], weight [E, h] to x weight^T [T, E] in float32 (float64 for float64 input)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, precision: RouterMatmul) -> Tensor:
        if precision is RouterMatmul.auto:
            # Products of bfloat16 numbers are exact in float32: the same scores, 12 times sooner.
            both = x.dtype is weight.dtype is torch.bfloat16
            precision = RouterMatmul.bf16 if both else RouterMatmul.fp32
        ctx.save_for_backward(x, weight)
        ctx.precision = precision
        return _product(x, weight.T, precision)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grads[0]
        d_x = d_weight = None
        if ctx.needs_input_grad[0]:
            d_x = _product(grad, weight, ctx.precision).to(x.dtype)
        if ctx.needs_input_grad[1]:
            d_weight = _product(grad.T, x, ctx.precision).to(weight.dtype)
        return d_x, d_weight, None


def _product(a: Tensor, b: Tensor, precision: RouterMatmul) -> Tensor:
    """a [m, n] times b [n, p]: operands cut as `precision` says, sums and result in float32."""
    if torch.float64 in (a.dtype, b.dtype):
        return a.double() @ b.double()
    if precision is RouterMatmul.bf16:
        a, b = a.bfloat16(), b.bfloat16()
        if a.is_cuda:
            return torch.mm(a, b, out_dtype=torch.float32)
        # Products of bfloat16 numbers are exact in float32.
    with _float32_products(cut=precision is RouterMatmul.tf32):
        return a.float() @ b.float()


@contextmanager
def _float32_products(*, cut: bool) -> Iterator[None]:
    """Allow TensorFloat-32, or forbid it, for the products inside. Does nothing on a CPU."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if cut else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
