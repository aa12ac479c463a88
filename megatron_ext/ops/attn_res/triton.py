"""The mix over depth as one Triton kernel each way, with the norm of the sublayer that reads it.

A program takes whole tokens, in two walks over their channels that take all sources at once: the
first gives what is summed over channels, in one reduction for all sources; the second, which reads
from the cache, gives the result. All that norm and softmax need backward follows from
two sums a source:

    mix = sum_j weight_j v_j      p_j = <v_j, dout * norm>      q_j = <v_j, mix>
    |mix|^2 = sum_j weight_j q_j  <mix, dout * norm> = sum_j weight_j p_j

Kept for the backward pass are the sources and eight bytes a token and source. Sums over tokens are
partial sums of a fixed number of programs: the same bits on every run.

Shapes: T tokens, N sources, each [T, D]. Internal precision is float32. Formulas: `dense`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_ext.ops.attn_res.gradients import GradientSum, gradient_sum
from megatron_ext.ops.launch import launch_settings, rows_of


@triton.jit
def _at(pointers, row, N: tl.constexpr, PADDED: tl.constexpr):
    """Where a row of each source begins: [PADDED, 1]."""
    number = tl.arange(0, PADDED)
    found = pointers[0] + tl.zeros([PADDED], tl.int64)
    for j in tl.static_range(1, N):
        found = tl.where(number == j, pointers[j], found)
    return (found + row)[:, None]


@triton.jit
def _partial(x, OWN: tl.constexpr):
    """[PADDED, BLOCK] summed over neighbours that one thread has: [PADDED, BLOCK / OWN]."""
    return tl.sum(tl.reshape(x, [x.shape[0], x.shape[1] // OWN, OWN]), 2)


@triton.jit
def _depth_mix_forward(
    sources, query, key, norm, out, scores, inverses, width, eps,
    N: tl.constexpr, PADDED: tl.constexpr, NORM: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, PADDED)
    at = _at(sources, token * width, N, PADDED)
    lane = tl.arange(0, BLOCK)
    squares = tl.zeros([PADDED, BLOCK // OWN], tl.float32)
    products = tl.zeros([PADDED, BLOCK // OWN], tl.float32)
    for start in tl.static_range(0, WIDTH, BLOCK):
        channel = start + lane
        inside = channel < width
        v = tl.load(at + channel[None, :], mask=(number < N)[:, None] & inside[None, :], other=0.0)
        w = tl.load(query + channel, mask=inside, other=0.0).to(tl.float32)
        w *= tl.load(key + channel, mask=inside, other=0.0).to(tl.float32)
        v = v.to(tl.float32)
        squares += _partial(v * v, OWN)
        products += _partial(v * w[None, :], OWN)
    inverse = tl.rsqrt(tl.sum(squares, 1) / width + eps)
    score = tl.sum(products, 1) * inverse
    tl.store(scores + token * N + number, score, mask=number < N)
    tl.store(inverses + token * N + number, inverse, mask=number < N)
    score = tl.where(number < N, score, -float("inf"))
    weight = tl.exp(score - tl.max(score, 0))
    weight /= tl.sum(weight, 0)
    total = tl.zeros([BLOCK], tl.float32)
    mixes = ()
    for start in tl.static_range(0, WIDTH, BLOCK):
        channel = start + lane
        inside = channel < width
        v = tl.load(at + channel[None, :], mask=(number < N)[:, None] & inside[None, :], other=0.0)
        mix = tl.sum(v.to(tl.float32) * weight[:, None], 0)
        total += mix * mix
        mixes = mixes + (mix,)
    scale = tl.rsqrt(tl.sum(total, 0) / width + eps) if NORM else 1.0
    for start in tl.static_range(0, WIDTH, BLOCK):
        channel = start + lane
        inside = channel < width
        mix = mixes[start // BLOCK] * scale
        if NORM:
            mix *= tl.load(norm + channel, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + token * width + channel, mix, mask=inside)


@triton.jit(do_not_specialize=["added"])
def _depth_mix_backward(
    sources, d_sources, added, query, key, norm, grad, scores, inverses, d_w, d_norm,
    tokens, turns, width, eps,
    N: tl.constexpr, PADDED: tl.constexpr, NORM: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    number = tl.arange(0, PADDED)
    lane = tl.arange(0, BLOCK)
    part = tl.arange(0, WIDTH // BLOCK)[:, None]
    sums_w = tl.zeros([WIDTH // BLOCK, BLOCK], tl.float32)
    sums_norm = tl.zeros([WIDTH // BLOCK, BLOCK], tl.float32)
    for turn in range(turns):
        token = tl.program_id(0).to(tl.int64) + turn * tl.num_programs(0)
        there = token < tokens
        row = token * width
        at, to = _at(sources, row, N, PADDED), _at(d_sources, row, N, PADDED)
        # Beyond the last token everything is zero: a weight of finite size times zero.
        score = tl.load(scores + token * N + number, mask=(number < N) & there, other=0.0)
        inverse = tl.load(inverses + token * N + number, mask=(number < N) & there, other=0.0)
        weight = tl.where(number < N, score, -float("inf"))
        weight = tl.exp(weight - tl.max(weight, 0))
        weight /= tl.sum(weight, 0)
        p = tl.zeros([PADDED, BLOCK // OWN], tl.float32)
        q = tl.zeros([PADDED, BLOCK // OWN], tl.float32)
        for start in range(0, WIDTH, BLOCK):
            channel = start + lane
            inside = (channel < width) & there
            both = (number < N)[:, None] & inside[None, :]
            v = tl.load(at + channel[None, :], mask=both, other=0.0).to(tl.float32)
            given = tl.load(grad + row + channel, mask=inside, other=0.0).to(tl.float32)
            if NORM:
                given *= tl.load(norm + channel, mask=inside, other=0.0).to(tl.float32)
            mix = tl.sum(v * weight[:, None], 0)
            p += _partial(v * given[None, :], OWN)
            q += _partial(v * mix[None, :], OWN)
        dot, rest = tl.sum(p, 1), tl.sum(q, 1)
        scale, along = 1.0, 0.0
        if NORM:
            scale = tl.rsqrt(tl.sum(weight * rest, 0) / width + eps)
            along = tl.sum(weight * dot, 0) * scale * scale * scale / width
            dot = dot * scale - rest * along
        slope = weight * (dot - tl.sum(weight * dot, 0)) * inverse
        # The key's norm takes out the part of the gradient that would only rescale v.
        shrink = slope * score * inverse / width
        for start in range(0, WIDTH, BLOCK):
            channel = start + lane
            inside = (channel < width) & there
            both = (number < N)[:, None] & inside[None, :]
            v = tl.load(at + channel[None, :], mask=both, other=0.0).to(tl.float32)
            given = tl.load(grad + row + channel, mask=inside, other=0.0).to(tl.float32)
            w = tl.load(query + channel, mask=inside, other=0.0).to(tl.float32)
            w *= tl.load(key + channel, mask=inside, other=0.0).to(tl.float32)
            through = given
            if NORM:
                mix = tl.sum(v * weight[:, None], 0)
                sums_norm += tl.where(part == start // BLOCK, (given * mix * scale)[None, :], 0.0)
                through *= tl.load(norm + channel, mask=inside, other=0.0).to(tl.float32) * scale
                through -= mix * along
            w_here = tl.sum(slope[:, None] * v, 0)
            sums_w += tl.where(part == start // BLOCK, w_here[None, :], 0.0)
            d_v = weight[:, None] * through[None, :] + slope[:, None] * w[None, :]
            d_v -= shrink[:, None] * v
            adds = both & (((added >> number) & 1) == 1)[:, None]
            d_v += tl.load(to + channel[None, :], mask=adds, other=0.0)
            tl.store(to + channel[None, :], d_v, mask=both)
    row = tl.program_id(0).to(tl.int64) * width
    channels = part * BLOCK + lane[None, :]
    tl.store(d_w + row + channels, sums_w, mask=channels < width)
    if NORM:
        tl.store(d_norm + row + channels, sums_norm, mask=channels < width)


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


def _settings(kernel: str, width: int, sources: int) -> dict[str, int]:
    padded = max(8, triton.next_power_of_2(width))
    settings = launch_settings(kernel, padded)
    # A thread has some channels of every source: sums over sources stay inside of it. As many as
    # its registers hold.
    own = 8 if sources <= 8 else 4
    block = min(padded, 32 * own * settings["num_warps"])
    return {"WIDTH": padded, "BLOCK": block, "OWN": own, **settings}


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
        scores, inverses = rows[0].new_empty(2, tokens, count, dtype=torch.float32)
        if out.numel():
            _depth_mix_forward[(tokens,)](
                tuple(rows),
                query,
                key_weight,
                query if norm_weight is None else norm_weight,
                out,
                scores,
                inverses,
                width,
                eps,
                N=count,
                PADDED=triton.next_power_of_2(count),
                NORM=norm_weight is not None,
                **_settings("depth_mix_forward", width, count),
            )
        ctx.save_for_backward(query, key_weight, norm_weight, scores, inverses, *rows)
        ctx.eps, ctx.shape = eps, sources[0].shape
        ctx.sums = [gradient_sum(v) for v in sources]
        return out.view(ctx.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key_weight, norm_weight, scores, inverses, *rows = ctx.saved_tensors
        tokens, width = rows[0].shape
        grad = rows_of(grads[0]).contiguous()
        d_rows, added = _gradients(rows, ctx.sums)
        settings = _settings("depth_mix_backward", width, len(rows))
        programs = min(tokens, settings.pop("PROGRAMS"))
        d_w, d_norm = rows[0].new_empty(2, programs, width, dtype=torch.float32)
        if programs:
            _depth_mix_backward[(programs,)](
                tuple(rows),
                tuple(d_rows),
                added,
                query,
                key_weight,
                query if norm_weight is None else norm_weight,
                grad,
                scores,
                inverses,
                d_w,
                d_norm,
                tokens,
                triton.cdiv(tokens, programs),
                width,
                ctx.eps,
                N=len(rows),
                PADDED=triton.next_power_of_2(len(rows)),
                NORM=norm_weight is not None,
                **settings,
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
