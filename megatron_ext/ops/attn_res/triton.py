"""The mix over depth as one Triton kernel each way, with the norm of the sublayer that reads it.

A program takes whole tokens. Forward, each source is read once: scores and sum go along (softmax
with a running maximum). Backward, a token's sources are read twice in a row, the second time from
the cache. Kept for the backward pass are the sources and eight bytes a token and source. Sums over
tokens are partial sums of a fixed number of programs: the same bits on every run.

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

from megatron_ext.ops.launch import launch_settings, rows_of


@triton.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def _load_some(sources, at, inside, START: tl.constexpr, STOP: tl.constexpr):
    """Of each of these sources a part, in its dtype: all are on their way before one is used."""
    held = (tl.load(sources[START] + at, mask=inside, other=0.0),)
    for j in tl.static_range(START + 1, STOP):
        held = held + (tl.load(sources[j] + at, mask=inside, other=0.0),)
    return held


@triton.jit
def _depth_mix_forward(
    sources, query, key, norm, out, scores, inverses, width, eps,
    N: tl.constexpr, NORM: tl.constexpr, WIDTH: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, WIDTH)
    inside = channel < width
    q = tl.load(query + channel, mask=inside, other=0.0).to(tl.float32)
    w = q * tl.load(key + channel, mask=inside, other=0.0).to(tl.float32)
    mixed = tl.zeros([WIDTH], tl.float32)
    largest = -float("inf")
    total = 0.0
    for j in tl.static_range(N):
        if j % AHEAD == 0:
            at = token * width + channel
            held = _load_some(sources, at, inside, j, min(j + AHEAD, N))
        v = held[j % AHEAD].to(tl.float32)
        square, score = tl.reduce((v * v, v * w), 0, _add_pairs)
        inverse = tl.rsqrt(square / width + eps)
        score *= inverse
        tl.store(scores + token * N + j, score)
        tl.store(inverses + token * N + j, inverse)
        new = tl.maximum(largest, score)
        fade = tl.exp(largest - new)
        weight = tl.exp(score - new)
        mixed = mixed * fade + v * weight
        total = total * fade + weight
        largest = new
    mixed /= total
    if NORM:
        mixed *= tl.rsqrt(tl.sum(mixed * mixed, 0) / width + eps)
        mixed *= tl.load(norm + channel, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * width + channel, mixed, mask=inside)


@triton.jit
def _pick(pointers, j, N: tl.constexpr):
    """Pointer number j. A loop that is not unrolled holds one source at a time in registers."""
    pointer = pointers[0]
    for other in tl.static_range(1, N):
        pointer = tl.where(j == other, pointers[other], pointer)
    return pointer


@triton.jit
def _depth_mix_backward(
    sources, d_sources, query, key, norm, grad, scores, inverses, d_w, d_norm,
    tokens, turns, width, eps,
    N: tl.constexpr, PADDED: tl.constexpr, NORM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    channel = tl.arange(0, WIDTH)
    number = tl.arange(0, PADDED)
    sum_w = tl.zeros([WIDTH], tl.float32)
    sum_norm = tl.zeros([WIDTH], tl.float32)
    for turn in range(turns):
        token = tl.program_id(0).to(tl.int64) + turn * tl.num_programs(0)
        there = token < tokens
        inside = (channel < width) & there
        row = token * width
        # Beyond the last token everything is zero: a weight of finite size times zero.
        all_scores = tl.load(scores + token * N + number, mask=(number < N) & there, other=0.0)
        all_scores = tl.where(number < N, all_scores, -float("inf"))
        largest = tl.max(all_scores, 0)
        total = tl.sum(tl.exp(all_scores - largest), 0)
        through = tl.load(grad + row + channel, mask=inside, other=0.0).to(tl.float32)
        held = _load_some(sources, row + channel, inside, 0, N)
        mixed = tl.zeros([WIDTH], tl.float32)
        for j in tl.static_range(N):
            score = tl.load(scores + token * N + j, mask=there, other=0.0)
            mixed += tl.exp(score - largest) / total * held[j].to(tl.float32)
        if NORM:
            inverse = tl.rsqrt(tl.sum(mixed * mixed, 0) / width + eps)
            sum_norm += through * mixed * inverse
            through *= tl.load(norm + channel, mask=inside, other=0.0).to(tl.float32) * inverse
            along = tl.sum(through * mixed, 0) * inverse * inverse / width
            through -= mixed * along
        centre = tl.sum(through * mixed, 0)
        # Read again for every token: held all the time it would take registers from the sources.
        # Read again for every token: held all the time it would take registers from the sources.
        w = tl.load(query + channel, mask=inside, other=0.0, volatile=True).to(tl.float32)
        w *= tl.load(key + channel, mask=inside, other=0.0, volatile=True).to(tl.float32)
        for j in range(N):
            score = tl.load(scores + token * N + j, mask=there, other=0.0)
            inverse = tl.load(inverses + token * N + j, mask=there, other=0.0)
            weight = tl.exp(score - largest) / total
            v = tl.load(_pick(sources, j, N) + row + channel, mask=inside, other=0.0).to(tl.float32)
            slope = weight * (tl.sum(through * v, 0) - centre) * inverse
            sum_w += slope * v
            # The key's norm takes out the part of the gradient that would only rescale v.
            d_v = weight * through + slope * (w - v * (score * inverse / width))
            tl.store(_pick(d_sources, j, N) + row + channel, d_v, mask=inside)
    row = tl.program_id(0).to(tl.int64) * width
    tl.store(d_w + row + channel, sum_w, mask=channel < width)
    if NORM:
        tl.store(d_norm + row + channel, sum_norm, mask=channel < width)


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


def _settings(kernel: str, width: int) -> dict[str, int]:
    padded = triton.next_power_of_2(width)
    return {"WIDTH": padded, **launch_settings(kernel, padded)}


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
                NORM=norm_weight is not None,
                **_settings("depth_mix_forward", width),
            )
        ctx.save_for_backward(query, key_weight, norm_weight, scores, inverses, *rows)
        ctx.eps, ctx.shape = eps, sources[0].shape
        return out.view(ctx.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key_weight, norm_weight, scores, inverses, *rows = ctx.saved_tensors
        tokens, width = rows[0].shape
        grad = rows_of(grads[0]).contiguous()
        d_rows = [torch.empty_like(v) for v in rows]
        settings = _settings("depth_mix_backward", width)
        programs = min(tokens, settings.pop("PROGRAMS"))
        d_w, d_norm = rows[0].new_empty(2, programs, width, dtype=torch.float32)
        if programs:
            _depth_mix_backward[(programs,)](
                tuple(rows),
                tuple(d_rows),
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
            *(d.view(ctx.shape) for d in d_rows),
        )
