"""SiTU-GLU as one Triton kernel each way: every tensor is read or written once.

The work of an element is a handful of elementary functions, and at three or five 16-bit numbers an
element memory leaves time for about 40 and 70 instructions. Hence one reciprocal for all three
quotients, and no library functions. Internal precision is float32, relative error about 1e-6.

Shapes: M rows, F width of a branch.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_ext.ops.launch import launch_settings, rows_of
from megatron_ext.ops.situ.dense import branches


@triton.jit
def _bent(x, BOUNDED: tl.constexpr):
    """n, d, s with tanh(x) = n / d and its derivative s / d^2; without a bound, of x itself."""
    if BOUNDED:
        # The exponent is never positive: nothing overflows, and d lies in [1, 2].
        e = tl.exp2(tl.abs(x) * -2.8853900817779268)
        d = 1.0 + e
        square = x * x
        # Where 1 - e cancels, x - x^3/3 is exact to 2/15 x^4 < 1e-6.
        small = x * d * (1.0 - square * 0.3333333)
        n = tl.where(square < 0.0025, small, tl.where(x < 0, e - 1.0, 1.0 - e))
        s = 4.0 * e
    else:
        n = x
        d = tl.full(x.shape, 1.0, tl.float32)
        s = d
    return n, d, s


@triton.jit
def _inverse(d):
    # A division would guard against a range that cannot occur here, in seven more instructions.
    root = tl.rsqrt(d)
    return root * root


@triton.jit
def _situ_forward(
    gate, up, scale, out, width, gate_row, up_row, beta, linear_beta,
    HAS_SCALE: tl.constexpr, BOUNDED_GATE: tl.constexpr, BOUNDED_UP: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    factor = beta * linear_beta
    if HAS_SCALE:
        factor *= tl.load(scale + row).to(tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        g = tl.load(gate + row * gate_row + column, mask=inside, other=0.0).to(tl.float32)
        u = tl.load(up + row * up_row + column, mask=inside, other=0.0).to(tl.float32)
        x, y = g * (1.0 / beta), u * (1.0 / linear_beta)
        n_x, d_x, _ = _bent(x, BOUNDED_GATE)
        n_y, d_y, _ = _bent(y, BOUNDED_UP)
        e_g = tl.exp2(tl.abs(g) * -1.4426950408889634)
        h = n_x * n_y * tl.where(g < 0, e_g, 1.0) * factor * _inverse(d_x * d_y * (1.0 + e_g))
        tl.store(out + row * width + column, h, mask=inside)


@triton.jit
def _situ_backward(
    gate, up, scale, grad, d_gate, d_up, d_scale,
    width, gate_row, up_row, grad_row, d_gate_row, d_up_row, beta, linear_beta,
    HAS_SCALE: tl.constexpr, BOUNDED_GATE: tl.constexpr, BOUNDED_UP: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    factor = 1.0
    total = tl.zeros([BLOCK], tl.float32)
    if HAS_SCALE:
        factor = tl.load(scale + row).to(tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        g = tl.load(gate + row * gate_row + column, mask=inside, other=0.0).to(tl.float32)
        u = tl.load(up + row * up_row + column, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(grad + row * grad_row + column, mask=inside, other=0.0).to(tl.float32)
        x, y = g * (1.0 / beta), u * (1.0 / linear_beta)
        n_x, d_x, s_x = _bent(x, BOUNDED_GATE)
        n_y, d_y, s_y = _bent(y, BOUNDED_UP)
        e_g = tl.exp2(tl.abs(g) * -1.4426950408889634)
        d_g = 1.0 + e_g
        xy = d_x * d_y
        inverse = _inverse(xy * d_g)
        r_g, r_xy = inverse * xy, inverse * d_g
        r_x, r_y = r_xy * d_y, r_xy * d_x
        far = e_g * r_g
        sigma, rest = tl.where(g < 0, far, r_g), tl.where(g < 0, r_g, far)
        phi, psi = n_x * r_x * sigma * beta, n_y * r_y * linear_beta
        if HAS_SCALE:
            total += dy * phi * psi
            dy *= factor
        # phi' = sigmoid (sech^2(g/b) + b tanh(g/b) (1 - sigmoid)), psi' = sech^2(u/c)
        dg = dy * psi * (sigma * s_x * r_x * r_x + phi * rest)
        tl.store(d_gate + row * d_gate_row + column, dg, mask=inside)
        tl.store(d_up + row * d_up_row + column, dy * phi * s_y * r_y * r_y, mask=inside)
    if HAS_SCALE:
        tl.store(d_scale + row, tl.sum(total))


def situ_glu_triton(
    gate: Tensor,
    up: Tensor | None = None,
    *,
    beta: float | None,
    linear_beta: float | None,
    scale: Tensor | None = None,
) -> Tensor:
    """See `ops.situ.situ_glu`."""
    out: Tensor = _SituGlu.apply(gate, up, scale, beta, linear_beta)
    return out


class _SituGlu(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        gate: Tensor,
        up: Tensor | None,
        scale: Tensor | None,
        beta: float | None,
        linear_beta: float | None,
    ) -> Tensor:
        ctx.save_for_backward(gate, up, scale)
        ctx.bounds = (beta, linear_beta)
        g, u = (rows_of(x) for x in branches(gate, up))
        rows, width = g.shape
        out = g.new_empty(rows, width)
        if rows:
            _situ_forward[(rows,)](
                g,
                u,
                g if scale is None else scale.reshape(-1).contiguous(),
                out,
                width,
                g.stride(0),
                u.stride(0),
                beta or 1.0,
                linear_beta or 1.0,
                HAS_SCALE=scale is not None,
                BOUNDED_GATE=beta is not None,
                BOUNDED_UP=linear_beta is not None,
                **launch_settings("situ_forward", width),
            )
        return out.view(*gate.shape[:-1], width)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, scale = ctx.saved_tensors
        beta, linear_beta = ctx.bounds
        g, u = (rows_of(x) for x in branches(gate, up))
        dy = rows_of(grads[0])
        rows, width = g.shape
        d_gate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        d_up = None if up is None else torch.empty(up.shape, dtype=up.dtype, device=up.device)
        d_scale = None if scale is None else scale.new_empty(scale.shape)
        to_gate, to_up = (rows_of(x) for x in branches(d_gate, d_up))
        if rows:
            _situ_backward[(rows,)](
                g,
                u,
                g if scale is None else scale.reshape(-1).contiguous(),
                dy,
                to_gate,
                to_up,
                g if d_scale is None else d_scale,
                width,
                g.stride(0),
                u.stride(0),
                dy.stride(0),
                to_gate.stride(0),
                to_up.stride(0),
                beta or 1.0,
                linear_beta or 1.0,
                HAS_SCALE=scale is not None,
                BOUNDED_GATE=beta is not None,
                BOUNDED_UP=linear_beta is not None,
                **launch_settings("situ_backward", width),
            )
        return d_gate, d_up, d_scale, None, None
