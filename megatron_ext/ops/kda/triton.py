"""What a KDA kernel without a fused norm and gate is given, as one Triton kernel each way.

Every tensor is read or written once, in the layout that it has. Formulas: `gate`. Internal
precision is float32.

Shapes: b batch, s sequence, H heads, K channels of a head; T = b * s tokens, the sequence first.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_ext.ops.kda.gate import NORM_EPS
from megatron_ext.ops.launch import launch_settings

Prepared = tuple[Tensor, Tensor, Tensor, Tensor]


@triton.jit
def _kda_inputs_forward(
    q, k, z, beta, slope, bias, q_out, k_out, g_out, beta_out, tokens, length, heads, width,
    q_batch, q_row, q_head, k_batch, k_row, k_head, z_batch, z_row, z_head,
    beta_batch, beta_row, beta_head, lower_bound, eps,
    SLOPE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    head = program % heads
    row = (program // heads) * ROWS + tl.arange(0, ROWS)
    item, place = (row // length)[:, None], (row % length)[:, None]
    channel = tl.arange(0, WIDTH)[None, :]
    there = row[:, None] < tokens
    inside = there & (channel < width)
    out = (row[:, None] * heads + head) * width + channel
    x = tl.load(
        q + item * q_batch + place * q_row + head * q_head + channel, mask=inside, other=0.0
    )
    x = x.to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x, 1)[:, None] + eps)
    tl.store(q_out + out, x, mask=inside)
    x = tl.load(
        k + item * k_batch + place * k_row + head * k_head + channel, mask=inside, other=0.0
    )
    x = x.to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x, 1)[:, None] + eps)
    tl.store(k_out + out, x, mask=inside)
    x = tl.load(
        z + item * z_batch + place * z_row + head * z_head + channel, mask=inside, other=0.0
    )
    x = x.to(tl.float32)
    x += tl.load(bias + head * width + channel, mask=channel < width, other=0.0).to(tl.float32)
    if SLOPE:
        x *= tl.exp(tl.load(slope + head).to(tl.float32))
    tl.store(g_out + out, tl.sigmoid(x) * lower_bound, mask=inside)
    b = tl.load(
        beta + item * beta_batch + place * beta_row + head * beta_head, mask=there, other=0.0
    )
    tl.store(beta_out + row[:, None] * heads + head, tl.sigmoid(b.to(tl.float32)), mask=there)


@triton.jit
def _norm_backward(x, grad, eps, inverses, at, mask, UNIT: tl.constexpr):
    """UNIT: `x` is normed already, by numbers [ROWS, 1] that lie at `inverses + at`."""
    x = x.to(tl.float32)
    grad = grad.to(tl.float32)
    if UNIT:
        inverse = tl.load(inverses + at, mask=mask, other=0.0)
    else:
        inverse = tl.rsqrt(tl.sum(x * x, 1)[:, None] + eps)
        x *= inverse
    return inverse * (grad - x * tl.sum(grad * x, 1)[:, None])


@triton.jit
def _kda_inputs_backward(
    q, k, z, beta, slope, bias, q_inverse, k_inverse, q_grad, k_grad, g_grad, beta_grad,
    d_q, d_k, d_z, d_beta, d_slope, d_bias, tokens, length, heads, width,
    q_batch, q_row, q_head, k_batch, k_row, k_head, z_batch, z_row, z_head,
    beta_batch, beta_row, beta_head, dz_batch, dz_row, dz_head, lower_bound, eps,
    SLOPE: tl.constexpr, UNIT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    head = program % heads
    channel = tl.arange(0, WIDTH)[None, :]
    offset = tl.load(bias + head * width + channel, mask=channel < width, other=0.0)
    offset = offset.to(tl.float32)
    rate = 1.0
    if SLOPE:
        rate = tl.exp(tl.load(slope + head).to(tl.float32))
    of_slope = tl.zeros([ROWS, WIDTH], tl.float32)
    of_bias = tl.zeros([ROWS, WIDTH], tl.float32)
    for step in range(STEPS):
        row = ((program // heads) * STEPS + step) * ROWS + tl.arange(0, ROWS)
        item, place = (row // length)[:, None], (row % length)[:, None]
        there = row[:, None] < tokens
        inside = there & (channel < width)
        flat = row[:, None] * heads + head
        at = flat * width + channel
        x = tl.load(
            q + item * q_batch + place * q_row + head * q_head + channel, mask=inside, other=0.0
        )
        grad = tl.load(q_grad + at, mask=inside, other=0.0)
        x = _norm_backward(x, grad, eps, q_inverse, flat, there, UNIT)
        tl.store(d_q + at, x, mask=inside)
        x = tl.load(
            k + item * k_batch + place * k_row + head * k_head + channel, mask=inside, other=0.0
        )
        grad = tl.load(k_grad + at, mask=inside, other=0.0)
        x = _norm_backward(x, grad, eps, k_inverse, flat, there, UNIT)
        tl.store(d_k + at, x, mask=inside)
        x = tl.load(
            z + item * z_batch + place * z_row + head * z_head + channel, mask=inside, other=0.0
        )
        y = (x.to(tl.float32) + offset) * rate
        sigma = tl.sigmoid(y)
        grad = tl.load(g_grad + at, mask=inside, other=0.0).to(tl.float32)
        of_y = grad * lower_bound * sigma * (1.0 - sigma)
        of_z = of_y * rate
        tl.store(
            d_z + item * dz_batch + place * dz_row + head * dz_head + channel, of_z, mask=inside
        )
        of_slope += of_y * y
        of_bias += of_z
        b = tl.load(
            beta + item * beta_batch + place * beta_row + head * beta_head, mask=there, other=0.0
        )
        b = tl.sigmoid(b.to(tl.float32))
        grad = tl.load(beta_grad + flat, mask=there, other=0.0).to(tl.float32)
        tl.store(d_beta + flat, grad * b * (1.0 - b), mask=there)
    column = tl.arange(0, WIDTH)
    tl.store(d_bias + program * width + column, tl.sum(of_bias, 0), mask=column < width)
    if SLOPE:
        tl.store(d_slope + program, tl.sum(tl.sum(of_slope, 1), 0))


def kda_inputs_triton(
    q: Tensor,
    k: Tensor,
    z: Tensor,
    beta_logits: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor,
    lower_bound: float,
) -> Prepared:
    """See `ops.kda.inputs.kda_inputs`."""
    made: Prepared = _KdaInputs.apply(q, k, z, beta_logits, A_log, dt_bias, lower_bound)
    return made


def _along(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _settings(kernel: str, width: int) -> dict[str, int]:
    return {"WIDTH": triton.next_power_of_2(width), **launch_settings(kernel, width)}


class _KdaInputs(torch.autograd.Function):
    """Keeps its inputs as they are, and computes what it needs anew."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        z: Tensor,
        beta: Tensor,
        slope: Tensor | None,
        bias: Tensor,
        lower_bound: float,
    ) -> Prepared:
        q, k, z, bias = _along(q), _along(k), _along(z), bias.contiguous()
        ctx.save_for_backward(q, k, z, beta, slope, bias)
        ctx.lower_bound = lower_bound
        batch, length, heads, width = q.shape
        tokens = batch * length
        made = (
            torch.empty(tokens, heads, width, dtype=q.dtype, device=q.device),
            torch.empty(tokens, heads, width, dtype=k.dtype, device=q.device),
            torch.empty(tokens, heads, width, dtype=torch.float32, device=q.device),
            torch.empty(tokens, heads, dtype=torch.float32, device=q.device),
        )
        settings = _settings("kda_inputs_forward", width)
        if tokens:
            _kda_inputs_forward[(triton.cdiv(tokens, settings["ROWS"]) * heads,)](
                *(q, k, z, beta, bias if slope is None else slope, bias, *made),
                *(tokens, length, heads, width),
                *(*q.stride()[:3], *k.stride()[:3], *z.stride()[:3], *beta.stride()),
                *(lower_bound, NORM_EPS),
                SLOPE=slope is not None,
                **settings,
            )
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *kda_inputs_backward(ctx.saved_tensors, grads, ctx.lower_bound), None


def kda_inputs_backward(
    inputs: tuple[Tensor | None, ...],
    grads: tuple[Tensor, ...],
    lower_bound: float,
    *,
    inverses: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, z, beta_logits, A_log and dt_bias.

    Args:
        inputs: these, as for `kda_inputs_triton`, neighbours in memory along K.
        grads: of normed q and k, log-decay and write strength [B * T, H, ...] or [B, T, H, ...].
        lower_bound: as for `kda_inputs_triton`.
        inverses: q and k of `inputs` are normed already, by these numbers, float32 [B, T, H],
            contiguous; the gradients are those before it.
    """
    q, k, z, beta, slope, bias = inputs
    assert q is not None
    assert k is not None
    assert z is not None
    assert beta is not None
    assert bias is not None
    batch, length, heads, width = q.shape
    tokens, settings = batch * length, _settings("kda_inputs_backward", width)
    d_q, d_k = (torch.empty(q.shape, dtype=x.dtype, device=q.device) for x in (q, k))
    d_z = torch.empty_like(z)  # in the layout of z, where that has no holes
    d_beta = torch.empty(beta.shape, dtype=beta.dtype, device=q.device)
    tiles = triton.cdiv(tokens, settings["ROWS"] * settings["STEPS"])
    d_bias = torch.empty(tiles, heads, width, dtype=torch.float32, device=q.device)
    d_slope = torch.empty(tiles, heads, dtype=torch.float32, device=q.device)
    if tokens:
        _kda_inputs_backward[(tiles * heads,)](
            *(q, k, z, beta, bias if slope is None else slope, bias),
            *((bias, bias) if inverses is None else inverses),  # read where they are given
            *(x.contiguous() for x in grads),
            *(d_q, d_k, d_z, d_beta, d_slope, d_bias, tokens, length, heads, width),
            *(*q.stride()[:3], *k.stride()[:3], *z.stride()[:3], *beta.stride()),
            *(*d_z.stride()[:3], lower_bound, NORM_EPS),
            SLOPE=slope is not None,
            UNIT=inverses is not None,
            **settings,
        )
    of_slope = None if slope is None else d_slope.sum(0).to(slope.dtype)
    return d_q, d_k, d_z, d_beta, of_slope, d_bias.sum(0).to(bias.dtype)
