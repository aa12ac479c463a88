"""The output gate as one Triton kernel each way: every tensor is read or written once, in the
layout that it has, so that no transposed copy is made.

Shapes: b batch, s sequence, H heads, D channels of a head; T = s * b tokens in the order of the
result. Internal precision is float32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_ext.ops.launch import launch_settings

# Tokens of one program, whose part of the weight's gradient is one row of a table.
TOKENS = 8


@triton.jit
def _head_gate_forward(
    o, gate, weight, out, batch, heads, width,
    o_batch, o_row, o_head, gate_row, gate_batch, eps,
    NORM: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    place, item = token // batch, token % batch
    channel = tl.arange(0, WIDTH)[None, :]
    for start in range(0, heads, HEADS):
        head = start + tl.arange(0, HEADS)[:, None]
        inside = (head < heads) & (channel < width)
        x = tl.load(
            o + item * o_batch + place * o_row + head * o_head + channel, mask=inside, other=0.0
        ).to(tl.float32)
        at = head * width + channel
        g = tl.load(gate + place * gate_row + item * gate_batch + at, mask=inside, other=0.0)
        y = x * tl.sigmoid(g.to(tl.float32))
        if NORM:
            w = tl.load(weight + channel, mask=channel < width, other=0.0).to(tl.float32)
            y *= tl.rsqrt(tl.sum(x * x, 1)[:, None] / width + eps) * w
        tl.store(out + token * heads * width + at, y, mask=inside)


@triton.jit
def _head_gate_backward(
    o, gate, weight, grad, d_o, d_gate, d_weight, tokens, batch, heads, width,
    o_batch, o_row, o_head, gate_row, gate_batch, grad_row, grad_batch, length, eps,
    NORM: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    channel = tl.arange(0, WIDTH)[None, :]
    total = tl.zeros([HEADS, WIDTH], tl.float32)
    w = tl.full([1, WIDTH], 1.0, tl.float32)
    if NORM:
        w = tl.load(weight + channel, mask=channel < width, other=0.0).to(tl.float32)
    first = tl.program_id(0).to(tl.int64) * TOKENS
    for step in range(TOKENS):
        token = first + step
        place, item = token // batch, token % batch
        for start in range(0, heads, HEADS):
            head = start + tl.arange(0, HEADS)[:, None]
            inside = (head < heads) & (channel < width) & (token < tokens)
            at = head * width + channel
            x = tl.load(
                o + item * o_batch + place * o_row + head * o_head + channel, mask=inside, other=0.0
            ).to(tl.float32)
            g = tl.load(gate + place * gate_row + item * gate_batch + at, mask=inside, other=0.0)
            dy = tl.load(grad + place * grad_row + item * grad_batch + at, mask=inside, other=0.0)
            sigma = tl.sigmoid(g.to(tl.float32))
            through = dy.to(tl.float32) * sigma
            if NORM:
                scale = tl.rsqrt(tl.sum(x * x, 1)[:, None] / width + eps)
                normed = x * scale
                total += through * normed
                through *= w
                along = tl.sum(through * normed, 1)[:, None] / width
                dx = scale * (through - normed * along)
            else:
                normed = x
                dx = through
            tl.store(d_o + (item * length + place) * heads * width + at, dx, mask=inside)
            tl.store(
                d_gate + token * heads * width + at, through * normed * (1.0 - sigma), mask=inside
            )
    if NORM:
        column = tl.arange(0, WIDTH)
        tl.store(
            d_weight + tl.program_id(0).to(tl.int64) * width + column,
            tl.sum(total, 0),
            mask=column < width,
        )


def head_gate_triton(o: Tensor, gate: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """See `ops.gating.head_gate`."""
    out: Tensor = _HeadGate.apply(o, gate, weight, eps)
    return out


def _settings(kernel: str, heads: int, width: int) -> dict[str, int]:
    """Launch settings, with a tile of some heads that are whole."""
    padded = triton.next_power_of_2(width)
    settings = launch_settings(kernel, padded)
    fitting = max(1, settings["ELEMENTS"] // padded)
    return {
        "WIDTH": padded,
        "HEADS": min(fitting, triton.next_power_of_2(heads)),
        "num_warps": settings["num_warps"],
    }


def _along(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


class _HeadGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, o: Tensor, gate: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        o, gate = _along(o), _along(gate)
        ctx.save_for_backward(o, gate, weight)
        ctx.eps = eps
        batch, length, heads, width = o.shape
        out = torch.empty(length, batch, heads * width, dtype=o.dtype, device=o.device)
        if out.numel():
            _head_gate_forward[(length * batch,)](
                o,
                gate,
                o if weight is None else weight,
                out,
                batch,
                heads,
                width,
                *o.stride()[:3],
                *gate.stride()[:2],
                eps,
                NORM=weight is not None,
                **_settings("head_gate_forward", heads, width),
            )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        o, gate, weight = ctx.saved_tensors
        grad = _along(grads[0])
        batch, length, heads, width = o.shape
        tokens = length * batch
        d_o = torch.empty(o.shape, dtype=o.dtype, device=o.device)
        d_gate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        programs = triton.cdiv(tokens, TOKENS)
        parts = o.new_empty(programs if weight is not None else 0, width, dtype=torch.float32)
        if d_o.numel():
            _head_gate_backward[(programs,)](
                o,
                gate,
                o if weight is None else weight,
                grad,
                d_o,
                d_gate,
                parts,
                tokens,
                batch,
                heads,
                width,
                *o.stride()[:3],
                *gate.stride()[:2],
                *grad.stride()[:2],
                length,
                ctx.eps,
                NORM=weight is not None,
                TOKENS=TOKENS,
                **_settings("head_gate_backward", heads, width),
            )
        d_weight = None if weight is None else parts.sum(0).to(weight.dtype)
        return d_o, d_gate, d_weight, None
