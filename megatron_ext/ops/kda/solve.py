"""Inverse of a unit lower triangular matrix, blockwise, with its own backward.

Shapes: C rows, a multiple of the tile width t.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class UnitLowerInverse(torch.autograd.Function):
    """(I + L)^-1 for a strictly lower triangular L [..., C, C].

    The diagonal tiles are inverted by forward substitution; pairs of blocks are then merged:
    [[A, 0], [B, D]]^-1 = [[A^-1, 0], [-D^-1 B A^-1, D^-1]]. A Neumann product would need no
    substitution, but its powers of L cancel badly when keys are nearly identical.
    """

    @staticmethod
    def forward(ctx: Any, lower: Tensor, tile: int) -> Tensor:
        inverse = _invert(lower, tile)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        transposed = inverse.transpose(-1, -2)
        grad = transposed @ grads[0] @ transposed
        return grad.neg_().tril_(-1), None


def _invert(lower: Tensor, tile: int) -> Tensor:
    size = lower.shape[-1]
    count = size // tile
    inverse = torch.zeros_like(lower)
    blocks = lower.unflatten(-2, (count, tile)).unflatten(-1, (count, tile))
    diagonal = blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)  # [..., count, t, t]
    eye = torch.eye(tile, dtype=lower.dtype, device=lower.device)
    solved = torch.linalg.solve_triangular(
        diagonal.contiguous(), eye.expand_as(diagonal), upper=False, unitriangular=True
    )
    for i in range(count):
        part = slice(i * tile, (i + 1) * tile)
        inverse[..., part, part] = solved[..., i, :, :]
    for i in range(1, count):
        # Row block i of the inverse: -D^-1 (row of L) (inverse of everything above).
        part, above = slice(i * tile, (i + 1) * tile), slice(0, i * tile)
        product = lower[..., part, above] @ inverse[..., above, above]
        inverse[..., part, above] = -(solved[..., i, :, :] @ product)
    return inverse
