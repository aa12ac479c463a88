"""The mix over depth as one Triton kernel each way, with the norm of the sublayer that reads it.

Kept for the backward pass are the sources and twelve bytes a token and source. The kernels are in
`triton_kernels`, formulas in `dense`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_ext.ops.attn_res.gradients import GradientSum, gradient_sum
from megatron_ext.ops.attn_res.triton_kernels import depth_mix_backward, depth_mix_forward
from megatron_ext.ops.launch import launch_settings, rows_of


def depth_mix_triton(
    sources: Sequence[Tensor],
    query: Tensor,
    key_weight: Tensor,
    *,
    eps: float,
    norm_weight: Tensor | None = None,
) -> Tensor:
    """See `ops.attn_res.depth_mix`. First derivatives only."""
    out: Tensor = _DepthMix.apply(query, key_weight, norm_weight, eps, *sources)
    return out


def settings(kernel: str, width: int, sources: int) -> dict[str, int]:
    """How to launch `depth_mix_forward` or `depth_mix_backward`, and its constants."""
    found = launch_settings(kernel, width)
    # A thread has OWN neighbouring channels of every source: sums over those stay inside of it.
    own = found["OWN"]
    block = min(max(own, triton.next_power_of_2(width)), 32 * own * found["num_warps"])
    return {
        "PARTS": triton.cdiv(width, block),
        "BLOCK": block,
        "DOUBLINGS": (sources - 1).bit_length(),
        "ALIGNED": width % own == 0,
        **found,
    }


class _DepthMix(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key_weight: Tensor,
        norm_weight: Tensor | None,
        eps: float,
        *sources: Tensor,
    ) -> Tensor:
        rows = [rows_of(v).contiguous() for v in sources]
        (tokens, width), count = rows[0].shape, len(rows)
        out = torch.empty_like(rows[0])
        kept = rows[0].new_empty(tokens, 3, count, dtype=torch.float32)
        if out.numel():
            depth_mix_forward[(tokens,)](
                tuple(rows),
                query,
                key_weight,
                query if norm_weight is None else norm_weight,
                out,
                kept,
                width,
                eps,
                N=count,
                NORM=norm_weight is not None,
                **settings("depth_mix_forward", width, count),
            )
        ctx.save_for_backward(query, key_weight, norm_weight, kept, *rows)
        ctx.eps, ctx.shape = eps, sources[0].shape
        ctx.sums = [gradient_sum(v) for v in sources]
        return out.view(ctx.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key_weight, norm_weight, kept, *rows = ctx.saved_tensors
        tokens, width = rows[0].shape
        grad = rows_of(grads[0]).contiguous()
        d_rows, added = _gradients(rows, ctx.sums)
        launch = settings("depth_mix_backward", width, len(rows))
        programs = min(tokens, launch.pop("PROGRAMS"))
        d_w, d_norm = rows[0].new_empty(2, programs, width, dtype=torch.float32)
        if programs:
            depth_mix_backward[(programs,)](
                tuple(rows),
                tuple(d_rows),
                added,
                query,
                key_weight,
                query if norm_weight is None else norm_weight,
                grad,
                kept,
                d_w,
                d_norm,
                tokens,
                width,
                ctx.eps,
                N=len(rows),
                NORM=norm_weight is not None,
                **launch,
            )
        along = d_w.sum(0)
        return (
            (along * key_weight.float()).to(query.dtype),
            (along * query.float()).to(key_weight.dtype),
            None if norm_weight is None else d_norm.sum(0).to(norm_weight.dtype),
            None,
            *(
                d.view(ctx.shape) if sum_here is None else None
                for d, sum_here in zip(d_rows, ctx.sums, strict=True)
            ),
        )


def _gradients(
    rows: Sequence[Tensor], sums: Sequence[GradientSum | None]
) -> tuple[list[Tensor], int]:
    """Where the gradient of each source goes; and as bits, which are added to what is there."""
    found, added = [], 0
    for number, (row, sum_here) in enumerate(zip(rows, sums, strict=True)):
        total = None if sum_here is None else sum_here.total
        if total is None:
            total = torch.empty_like(row)
        else:
            added |= 1 << number
        if sum_here is not None:
            sum_here.total = total
        found.append(total)
    return found, added
