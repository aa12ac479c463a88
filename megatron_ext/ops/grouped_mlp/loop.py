"""Grouped matrix product as a loop over the groups: any device, any dtype, empty groups too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class LoopLinear(torch.autograd.Function):
    """x [M, K], weight [E, N, K] to [M, N]; group e is the next ``sizes[e]`` rows.

    Its own backward, since indexing a stacked weight under autograd makes a gradient of the whole
    stack for every expert, and since experts without rows must get zeros, not None: reductions of
    gradients wait for every parameter.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, sizes: list[int]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sizes = sizes
        out = x.new_empty(x.shape[0], weight.shape[1])
        for rows, target, matrix in zip(
            torch.split(x, sizes), torch.split(out, sizes), weight, strict=True
        ):
            if rows.shape[0]:
                torch.mm(rows, matrix.T, out=target)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad, sizes = grads[0].contiguous(), ctx.sizes
        d_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        d_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        start = 0
        for expert, size in enumerate(sizes):
            rows = slice(start, start + size)
            start += size
            if d_x is not None and size:
                torch.mm(grad[rows], weight[expert], out=d_x[rows])
            if d_weight is not None:
                if size:
                    torch.mm(grad[rows].T, x[rows], out=d_weight[expert])
                else:
                    d_weight[expert].zero_()
        return d_x, d_weight, None
