"""The short convolution of q, k and v as Triton kernels that also change the layout.

One kernel forward, one for each of the three gradients backward. Rows of a tile are read once from
memory and again, for the other taps, from the cache; the backward pass recomputes what is before
the SiLU instead of keeping it.

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
def _qkv_conv_forward(
    x, weight, starts, out, length, width, x_row, x_batch, out_part, out_batch, halo,
    DOCUMENTS: tl.constexpr, TAPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(width, BLOCK)
    part = (tl.program_id(1) // blocks).to(tl.int64)
    column = (tl.program_id(1) % blocks) * BLOCK + tl.arange(0, BLOCK)[None, :]
    item = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * ROWS + halo + tl.arange(0, ROWS)[:, None]
    alive = row < length
    first = tl.zeros([ROWS, 1], tl.int64)
    if DOCUMENTS:
        first = tl.load(starts + row, mask=alive, other=0)
    z = tl.zeros([ROWS, BLOCK], tl.float32)
    here = x + item * x_batch + part * width + column
    for tap in tl.static_range(TAPS):
        source = row - (TAPS - 1 - tap)
        seen = alive & (source >= first) & (column < width)
        value = tl.load(here + source * x_row, mask=seen, other=0.0).to(tl.float32)
        w = tl.load(weight + (part * width + column) * TAPS + tap, mask=column < width, other=0.0)
        z += value * w
    to = out + part * out_part + item * out_batch + (row - halo) * width + column
    tl.store(to, z * tl.sigmoid(z), mask=alive & (column < width))


@triton.jit
def _qkv_conv_backward(
    x, weight, starts, grad, d_x, d_weight, length, width, channels, x_row, x_batch,
    grad_batch, d_x_row, d_x_batch, halo, part,
    DOCUMENTS: tl.constexpr, TAPS: tl.constexpr, TAPS_PADDED: tl.constexpr, STEPS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    item = tl.program_id(2).to(tl.int64)
    here = x + item * x_batch + part * width + column
    weights = weight + (part * width + column) * TAPS
    total = tl.zeros([TAPS_PADDED, BLOCK], tl.float32)
    slot = tl.arange(0, TAPS_PADDED)[:, None]
    for step in range(STEPS):
        block = tl.program_id(0).to(tl.int64) * STEPS + step
        row = block * ROWS + tl.arange(0, ROWS)[:, None]
        dx = tl.zeros([ROWS, BLOCK], tl.float32)
        # What a later row's result has of this one: that row's gradient before the SiLU.
        for ahead in tl.static_range(TAPS):
            later = row + ahead
            alive = (later >= halo) & (later < length)
            first = tl.zeros([ROWS, 1], tl.int64)
            if DOCUMENTS:
                first = tl.load(starts + later, mask=alive, other=0)
            z = tl.zeros([ROWS, BLOCK], tl.float32)
            for tap in tl.static_range(TAPS):
                source = later - (TAPS - 1 - tap)
                seen = alive & (source >= first) & (column < width)
                value = tl.load(here + source * x_row, mask=seen, other=0.0).to(tl.float32)
                z += value * tl.load(weights + tap, mask=column < width, other=0.0)
            dy = tl.load(
                grad + item * grad_batch + (later - halo) * width + column,
                mask=alive & (column < width),
                other=0.0,
            )
            s = tl.sigmoid(z)
            dz = dy.to(tl.float32) * s * (1.0 + z * (1.0 - s))
            w = tl.load(weights + (TAPS - 1 - ahead), mask=column < width, other=0.0)
            dx += tl.where(row >= first, dz, 0.0) * w
            if ahead == 0:
                for tap in tl.static_range(TAPS):
                    source = later - (TAPS - 1 - tap)
                    seen = alive & (source >= first) & (column < width)
                    value = tl.load(here + source * x_row, mask=seen, other=0.0).to(tl.float32)
                    summed = tl.sum(dz * value, 0)[None, :]
                    total += tl.where(slot == tap, summed, 0.0)
        to = d_x + row * d_x_row + item * d_x_batch + part * width + column
        tl.store(to, dx, mask=(row < length) & (column < width))
    table = item * tl.num_programs(0) + tl.program_id(0)
    at = (table * channels + part * width + column) * TAPS + slot
    tl.store(d_weight + at, total, mask=(slot < TAPS) & (column < width))


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
        programs = triton.cdiv(length, settings["ROWS"] * settings["STEPS"])
        d_qkv = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
        tables = weight.new_empty(batch * programs, channels, taps, dtype=torch.float32)
        for part, grad in enumerate(x.contiguous() for x in grads):
            if d_qkv.numel():
                _qkv_conv_backward[(programs, triton.cdiv(width, settings["BLOCK"]), batch)](
                    qkv,
                    weight,
                    qkv if starts is None else starts,
                    grad,
                    d_qkv,
                    tables,
                    length,
                    width,
                    channels,
                    *qkv.stride()[:2],
                    grad.stride(0),
                    *d_qkv.stride()[:2],
                    ctx.halo,
                    part,
                    DOCUMENTS=starts is not None,
                    TAPS=taps,
                    TAPS_PADDED=triton.next_power_of_2(taps),
                    **settings,
                )
        d_weight = tables.sum(0).view(weight.shape).to(weight.dtype)
        return d_qkv, d_weight, None, None
