"""The short convolution of q, k and v as Triton kernels that also change the layout.

A program walks down the rows of a few channels and holds what the taps still need in registers, so
that each element is read once. The backward pass computes again what is before the SiLU instead of
keeping it, and gives dx in the same walk: TAPS - 1 rows after a row no gradient reaches it.

Shapes: T rows (halo and tokens), b batch, F = H * K channels of q, of k and of v, W taps.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_ext.ops.launch import launch_settings


@triton.jit
def _repeat(value, TIMES: tl.constexpr):
    """`value` as a tuple of TIMES."""
    out = (value,)
    for _ in tl.static_range(1, TIMES):
        out = out + (value,)
    return out


@triton.jit
def _load_taps(weight, channel, inside, TAPS: tl.constexpr):
    """Weights by how many rows back they look."""
    out = (tl.load(weight + channel * TAPS + (TAPS - 1), mask=inside, other=0.0),)
    for back in tl.static_range(1, TAPS):
        w = tl.load(weight + channel * TAPS + (TAPS - 1 - back), mask=inside, other=0.0)
        out = out + (w,)
    return out


@triton.jit
def _load_rows(pointer, row, stride, first, last, inside, ROWS: tl.constexpr):
    """ROWS rows from `row` on, zero outside of [first, last): together, before one is used."""
    seen = inside & (row >= first) & (row < last)
    out = (tl.load(pointer + row * stride, mask=seen, other=0.0),)
    for i in tl.static_range(1, ROWS):
        seen = inside & (row + i >= first) & (row + i < last)
        out = out + (tl.load(pointer + (row + i) * stride, mask=seen, other=0.0),)
    return out


@triton.jit
def _of_document(x, row, back, first, DOCUMENTS: tl.constexpr):
    """x, which belongs `back` rows before `row`; zero if another document is there."""
    if DOCUMENTS:
        x = tl.where(row - back >= first, x, 0.0)
    return x


@triton.jit
def _qkv_conv_forward(
    x, weight, starts, out, length, width, x_row, x_batch, out_part, out_batch, halo,
    DOCUMENTS: tl.constexpr, TAPS: tl.constexpr, ROWS: tl.constexpr, AHEAD: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(width, BLOCK)
    part = (tl.program_id(1) // blocks).to(tl.int64)
    column = (tl.program_id(1) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    item = tl.program_id(2).to(tl.int64)
    begin = tl.program_id(0).to(tl.int64) * ROWS + halo
    here = x + item * x_batch + part * width + column
    to = out + part * out_part + item * out_batch + column
    taps = _load_taps(weight, part * width + column, inside, TAPS)
    before = _repeat(tl.zeros([BLOCK], tl.float32), TAPS - 1)
    for i in tl.static_range(1, TAPS):
        row = begin - TAPS + i
        value = tl.load(here + row * x_row, mask=inside & (row >= 0), other=0.0).to(tl.float32)
        before = (value,) + before[: TAPS - 2]
    for offset in range(0, ROWS, AHEAD):
        values = _load_rows(here, begin + offset, x_row, 0, length, inside, AHEAD)
        for i in tl.static_range(AHEAD):
            row = begin + offset + i
            first = tl.load(starts + row, mask=row < length, other=0) if DOCUMENTS else 0
            value = values[i].to(tl.float32)
            z = value * taps[0]
            for back in tl.static_range(1, TAPS):
                z += _of_document(before[back - 1], row, back, first, DOCUMENTS) * taps[back]
            before = (value,) + before[: TAPS - 2]
            tl.store(to + (row - halo) * width, z * tl.sigmoid(z), mask=inside & (row < length))


@triton.jit
def _qkv_conv_backward(
    x, weight, starts, grads, d_x, d_weight, length, width, channels, x_row, x_batch,
    grad_batch, d_x_row, d_x_batch, halo,
    DOCUMENTS: tl.constexpr, TAPS: tl.constexpr, ROWS: tl.constexpr, AHEAD: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(width, BLOCK)
    part = (tl.program_id(1) // blocks).to(tl.int64)
    column = (tl.program_id(1) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    item = tl.program_id(2).to(tl.int64)
    begin = tl.program_id(0).to(tl.int64) * ROWS
    end = tl.minimum(begin + ROWS, length)
    here = x + item * x_batch + part * width + column
    grad = tl.where(part == 0, grads[0], tl.where(part == 1, grads[1], grads[2]))
    grad += item * grad_batch + column
    to = d_x + item * d_x_batch + part * width + column
    taps = _load_taps(weight, part * width + column, inside, TAPS)
    zero = tl.zeros([BLOCK], tl.float32)
    before, dx = _repeat(zero, TAPS - 1), _repeat(zero, TAPS - 1)
    d_taps = _repeat(zero, TAPS)
    for i in tl.static_range(1, TAPS):
        row = begin - TAPS + i
        value = tl.load(here + row * x_row, mask=inside & (row >= 0), other=0.0).to(tl.float32)
        before = (value,) + before[: TAPS - 2]
    # TAPS - 1 rows of the next program's are walked too: their gradients reach back.
    for offset in range(0, ROWS + TAPS - 1, AHEAD):
        values = _load_rows(here, begin + offset, x_row, 0, length, inside, AHEAD)
        dys = _load_rows(grad, begin + offset - halo, width, 0, length - halo, inside, AHEAD)
        for i in tl.static_range(AHEAD):
            row = begin + offset + i
            first = tl.load(starts + row, mask=row < length, other=0) if DOCUMENTS else 0
            value = values[i].to(tl.float32)
            z = value * taps[0]
            for back in tl.static_range(1, TAPS):
                z += _of_document(before[back - 1], row, back, first, DOCUMENTS) * taps[back]
            s = tl.sigmoid(z)
            dz = dys[i].to(tl.float32) * s * (1.0 + z * (1.0 - s))
            mine = tl.where(row < end, dz, 0.0)
            new_dx = (dz * taps[0],)
            new_d_taps = (d_taps[0] + mine * value,)
            for back in tl.static_range(1, TAPS):
                seen = _of_document(before[back - 1], row, back, first, DOCUMENTS)
                new_d_taps = new_d_taps + (d_taps[back] + mine * seen,)
                reached = _of_document(dz, row, back, first, DOCUMENTS)
                new_dx = new_dx + (dx[back - 1] + reached * taps[back],)
            d_taps = new_d_taps
            done = row - (TAPS - 1)
            kept = inside & (done >= begin) & (done < end)
            tl.store(to + done * d_x_row, new_dx[TAPS - 1], mask=kept)
            dx = new_dx[: TAPS - 1]
            before = (value,) + before[: TAPS - 2]
    table = item * tl.num_programs(0) + tl.program_id(0)
    for back in tl.static_range(TAPS):
        at = (table * TAPS + (TAPS - 1 - back)) * channels + part * width + column
        tl.store(d_weight + at, d_taps[back], mask=inside)


def qkv_conv_triton(
    qkv: Tensor, weight: Tensor, *, heads: int, halo: int = 0, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """See `ops.qkv_conv.qkv_conv`.

    Raises:
        ValueError: documents and more than one row of a batch.
    """
    starts = None
    if cu_seqlens is not None:
        if qkv.shape[1] != 1:
            raise ValueError(f"cu_seqlens: given with batch {qkv.shape[1]}, allowed 1")
        bounds = cu_seqlens.long()
        rows = torch.arange(qkv.shape[0], device=qkv.device)
        # Of several documents that begin at a row, the last one has it: the others are empty.
        starts = bounds[torch.searchsorted(bounds, rows, right=True) - 1]
    q, k, v = _QkvConv.apply(qkv, weight, starts, halo)
    return tuple(x.unflatten(-1, (heads, -1)) for x in (q, k, v))


class _QkvConv(torch.autograd.Function):
    """[T, b, 3F] and [3, F, W] to three of [b, T - halo, F]."""

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, weight: Tensor, starts: Tensor | None, halo: int
    ) -> tuple[Tensor, ...]:
        qkv = qkv if qkv.stride(-1) == 1 else qkv.contiguous()
        weight = weight.contiguous()
        ctx.save_for_backward(qkv, weight, starts)
        ctx.halo = halo
        length, batch, channels = qkv.shape
        width, taps = channels // 3, weight.shape[-1]
        out = qkv.new_empty(3, batch, length - halo, width)
        settings = launch_settings("qkv_conv_forward", width)
        if out.numel():
            grid = (
                triton.cdiv(length - halo, settings["ROWS"]),
                3 * triton.cdiv(width, settings["BLOCK"]),
                batch,
            )
            _qkv_conv_forward[grid](
                qkv,
                weight,
                qkv if starts is None else starts,
                out,
                length,
                width,
                *qkv.stride()[:2],
                *out.stride()[:2],
                halo,
                DOCUMENTS=starts is not None,
                TAPS=taps,
                **settings,
            )
        return out.unbind(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        qkv, weight, starts = ctx.saved_tensors
        length, batch, channels = qkv.shape
        width, taps = channels // 3, weight.shape[-1]
        settings = launch_settings("qkv_conv_backward", width)
        programs = triton.cdiv(length, settings["ROWS"])
        grads = tuple(x.contiguous() for x in grads)
        d_qkv = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
        tables = weight.new_empty(batch * programs, taps, channels, dtype=torch.float32)
        if d_qkv.numel():
            _qkv_conv_backward[(programs, 3 * triton.cdiv(width, settings["BLOCK"]), batch)](
                qkv,
                weight,
                qkv if starts is None else starts,
                grads,
                d_qkv,
                tables,
                length,
                width,
                channels,
                *qkv.stride()[:2],
                grads[0].stride(0),
                *d_qkv.stride()[:2],
                ctx.halo,
                DOCUMENTS=starts is not None,
                TAPS=taps,
                **settings,
            )
        d_weight = tables.sum(0).t().reshape(weight.shape).to(weight.dtype)
        return d_qkv, d_weight, None, None
