"""Sums of the rows of each token in one pass: every row is read once, the sum is float32.

Shapes: T tokens, M rows, L width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_ext.ops.launch import launch_settings, rows_of


@triton.jit
def _expert_rows_sum(rows, order, starts, out, width, rows_row, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    first = tl.load(starts + token)
    end = tl.load(starts + token + 1)
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(first, end):
        row = tl.load(order + i)
        total += tl.load(rows + row * rows_row + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * width + column, total, mask=inside)


def sum_rows_triton(x: Tensor, order: Tensor, starts: Tensor) -> Tensor:
    """Rows x [M, L] to sums [T, L] in x's dtype.

    Args:
        order: int64 [M], rows sorted by token; they are added in this order.
        starts: int64 [T + 1], where each token's rows begin in it.
    """
    x = rows_of(x)
    tokens, width = starts.numel() - 1, x.shape[1]
    out = torch.empty(tokens, width, dtype=x.dtype, device=x.device)
    if out.numel():
        settings = launch_settings("expert_rows", width)
        grid = (tokens, triton.cdiv(width, settings["BLOCK"]))
        _expert_rows_sum[grid](x, order, starts, out, width, x.stride(0), **settings)
    return out
