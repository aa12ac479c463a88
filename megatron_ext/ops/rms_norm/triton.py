"""The RMS norm as one Triton kernel each way: every tensor is read or written once.

Rows up to `WIDEST` are held in registers; wider ones are read twice, the second time from the
cache. The backward kernel also adds the gradient that comes through the residual, and sums the
weight's over the rows of a program: a number of programs fixed by the shape, so the same bits on
every run. Kept is one float32 a row beside the inputs.

    y = x r w,  r = 1 / sqrt(mean(x^2) + eps)
    dx = r (dy w - x r mean(dy w x r)) + d_residual        dw = sum over rows of dy x r

Shapes: M rows, D width. Internal precision is float32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_ext.ops.launch import launch_settings, rows_of

WIDEST = 8192


@triton.jit(do_not_specialize=["rows"])
def _rms_norm_forward(
    x, weight, out, inverse, rows, width, x_row, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    there = row < rows
    lane = tl.arange(0, BLOCK)[None, :]
    if WHOLE:
        inside = there & (lane < width)
        v = tl.load(x + row * x_row + lane, mask=inside, other=0.0).to(tl.float32)
        w = tl.load(weight + lane, mask=lane < width, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(v * v, 1)[:, None] / width + eps)
        tl.store(out + row * width + lane, v * scale * w, mask=inside)
    else:
        squares = tl.zeros([ROWS, BLOCK], tl.float32)
        for start in range(0, width, BLOCK):
            column = start + lane
            inside = there & (column < width)
            v = tl.load(x + row * x_row + column, mask=inside, other=0.0).to(tl.float32)
            squares += v * v
        scale = tl.rsqrt(tl.sum(squares, 1)[:, None] / width + eps)
        for start in range(0, width, BLOCK):
            column = start + lane
            inside = there & (column < width)
            v = tl.load(x + row * x_row + column, mask=inside, other=0.0).to(tl.float32)
            w = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
            tl.store(out + row * width + column, v * scale * w, mask=inside)
    tl.store(inverse + row, scale, mask=there)


@triton.jit(do_not_specialize=["rows", "turns"])
def _rms_norm_backward(
    x, weight, inverse, grad, passed, d_x, d_weight,
    rows, turns, width, x_row, grad_row, passed_row,
    PASSED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)[None, :]
    part = d_weight + program * width
    if WHOLE:
        total = tl.zeros([ROWS, BLOCK], tl.float32)
        for turn in range(turns):
            row = (program + turn * tl.num_programs(0)) * ROWS + tl.arange(0, ROWS)[:, None]
            inside = (row < rows) & (lane < width)
            v = tl.load(x + row * x_row + lane, mask=inside, other=0.0)
            dy = tl.load(grad + row * grad_row + lane, mask=inside, other=0.0)
            if PASSED:
                more = tl.load(passed + row * passed_row + lane, mask=inside, other=0.0)
            # A mask that knows the row keeps the compiler from taking the load out of the loop:
            # kept, the weight would take a third of the registers; it comes from the cache.
            known = inside if ROWS == 1 else lane < width
            w = tl.load(weight + lane, mask=known, other=0.0).to(tl.float32)
            scale = tl.load(inverse + row, mask=row < rows, other=0.0)
            normed = v.to(tl.float32) * scale
            through = dy.to(tl.float32) * w
            total += dy.to(tl.float32) * normed
            along = tl.sum(through * normed, 1)[:, None] / width
            d = scale * (through - normed * along)
            if PASSED:
                d += more.to(tl.float32)
            tl.store(d_x + row * width + lane, d, mask=inside)
        column = tl.arange(0, BLOCK)
        tl.store(part + column, tl.sum(total, 0), mask=column < width)
    else:  # one row a turn
        for turn in range(turns):
            row = program + turn * tl.num_programs(0)
            there = row < rows
            scale = tl.load(inverse + row, mask=there, other=0.0)
            products = tl.zeros([ROWS, BLOCK], tl.float32)
            for start in range(0, width, BLOCK):
                column = start + lane
                inside = there & (column < width)
                v = tl.load(x + row * x_row + column, mask=inside, other=0.0).to(tl.float32)
                dy = tl.load(grad + row * grad_row + column, mask=inside, other=0.0).to(tl.float32)
                w = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
                products += dy * w * v
            along = tl.sum(tl.sum(products, 1), 0) * scale / width
            for start in range(0, width, BLOCK):
                column = start + lane
                inside = there & (column < width)
                v = tl.load(x + row * x_row + column, mask=inside, other=0.0).to(tl.float32)
                dy = tl.load(grad + row * grad_row + column, mask=inside, other=0.0).to(tl.float32)
                w = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
                normed = v * scale
                d = scale * (dy * w - normed * along)
                if PASSED:
                    more = tl.load(passed + row * passed_row + column, mask=inside, other=0.0)
                    d += more.to(tl.float32)
                tl.store(d_x + row * width + column, d, mask=inside)
                # The program's own row of the table is its accumulator, in the cache.
                known = tl.load(part + column, mask=(column < width) & (turn > 0), other=0.0)
                tl.store(part + column, known + dy * normed, mask=column < width)
            tl.debug_barrier()  # what one thread has stored another may load


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `ops.rms_norm.rms_norm`."""
    out: Tensor = _RmsNorm.apply(x, weight, eps, False)
    return out


def rms_norm_residual_triton(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `ops.rms_norm.rms_norm_residual`."""
    out: tuple[Tensor, Tensor] = _RmsNorm.apply(x, weight, eps, True)
    return out


def _settings(kernel: str, width: int) -> dict[str, int]:
    """Launch settings, with a tile of one row or several whole ones."""
    block = min(max(16, triton.next_power_of_2(width)), WIDEST)
    settings = dict(launch_settings(kernel, block))
    fitting = max(1, settings.pop("ELEMENTS") // block)
    whole = block >= width
    return {"ROWS": fitting if whole else 1, "BLOCK": block, "WHOLE": whole, **settings}


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, eps: float, passes: bool
    ) -> Tensor | tuple[Tensor, Tensor]:
        weight = weight.contiguous()
        rows = rows_of(x)
        count, width = rows.shape
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        inverse = x.new_empty(count, dtype=torch.float32)
        if out.numel():
            settings = _settings("rms_norm_forward", width)
            _rms_norm_forward[(triton.cdiv(count, settings["ROWS"]),)](
                rows, weight, out, inverse, count, width, rows.stride(0), eps, **settings
            )
        ctx.save_for_backward(rows, weight, inverse)
        ctx.shape = x.shape
        ctx.set_materialize_grads(False)
        # A view: autograd needs another tensor than the input to hang this function on.
        return (out, x.view_as(x)) if passes else out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        rows, weight, inverse = ctx.saved_tensors
        passed = grads[1] if len(grads) > 1 else None
        if grads[0] is None:
            return passed, None, None, None
        grad = rows_of(grads[0])
        more = grad if passed is None else rows_of(passed)
        count, width = rows.shape
        d_x = torch.empty(ctx.shape, dtype=rows.dtype, device=rows.device)
        settings = _settings("rms_norm_backward", width)
        tiles = triton.cdiv(count, settings["ROWS"])
        programs = min(tiles, settings.pop("PROGRAMS"))
        parts = rows.new_empty(programs, width, dtype=torch.float32)
        if d_x.numel():
            _rms_norm_backward[(programs,)](
                rows,
                weight,
                inverse,
                grad,
                more,
                d_x,
                parts,
                count,
                triton.cdiv(tiles, programs),
                width,
                rows.stride(0),
                grad.stride(0),
                more.stride(0),
                PASSED=passed is not None,
                **settings,
            )
        return d_x, parts.sum(0).to(weight.dtype), None, None
