"""The end of a step in two Triton kernels, experts one by one, then all: the new bias from
histograms of margins, the record of the step, and statistics cleared.

In plain torch these are some seventy small kernels, which a GPU has to wait for. Numbers are
float64 as in `Bins.quantile`: the same up to its last bits.

Shapes: E experts, B bins.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_ext.config.schema import BinPlacement
from megatron_ext.ops.quantile.histogram import Bins
from megatron_ext.ops.quantile.load import LayerLoad
from megatron_ext.ops.quantile.triton import _origin


@triton.jit
def _edge(place, low, step, number, CENTRED: tl.constexpr, SHIFT: tl.constexpr):
    """`Bins.edges`, with the outermost twice: where a place begins, and the one before ends."""
    index = tl.minimum(tl.maximum(place - 1, 0), number)
    if CENTRED:
        away = index - number // 2
        size = ((low + tl.abs(away)) << SHIFT).to(tl.float32, bitcast=True).to(tl.float64)
        return tl.where(away == 0, 0.0, tl.where(away < 0, -size, size))
    else:
        return low.to(tl.float64) + step.to(tl.float64) * index.to(tl.float64)


@triton.jit
def _order_statistic(
    many, below, rank, at, low, step, number, CENTRED: tl.constexpr, SHIFT: tl.constexpr
):
    """Value and width of the bin of the `rank`-th margin, counted from 0."""
    place = tl.minimum(tl.sum((below <= rank).to(tl.int32)), number + 1)
    mass = tl.sum(tl.where(at == place, many, 0))
    before = tl.sum(tl.where(at == place, below - many, 0))
    begin = _edge(place, low, step, number, CENTRED, SHIFT)
    size = _edge(place + 1, low, step, number, CENTRED, SHIFT) - begin
    share = (rank - before).to(tl.float64) + 0.5
    return begin + size * (share / tl.maximum(mass, 1).to(tl.float64)), size


@triton.jit
def _update_experts(
    histogram, bias, value, predicted, widest, outside, width, number, top_k, span,
    CENTRED: tl.constexpr, SHIFT: tl.constexpr, ALL: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    low, step = _origin(bias, width, number, span, CENTRED, SHIFT, ALL)
    at = tl.arange(0, PLACES)
    row = histogram + expert.to(tl.int64) * (number + 2)
    many = tl.load(row + at, mask=at < number + 2, other=0)
    tl.debug_barrier()  # cleared when all threads have read
    tl.store(row + at, tl.zeros_like(many), mask=at < number + 2)
    below = tl.cumsum(many)  # at most 2^31 - 1 tokens a step: see `Bins.zeros`
    tokens = tl.sum(many)
    last = tl.maximum(tokens - 1, 0)
    product = last.to(tl.int64) * top_k
    rank = (product // width).to(tl.int32)
    share = (product % width).to(tl.float64) / width
    # Places beyond the bins must not be taken for filled ones.
    below = tl.where(at < number + 2, below, 2147483647)
    lower, size = _order_statistic(many, below, rank, at, low, step, number, CENTRED, SHIFT)
    upper, next_size = _order_statistic(
        many, below, tl.minimum(rank + 1, last), at, low, step, number, CENTRED, SHIFT
    )
    found = lower + share * (upper - lower)
    if CENTRED:
        found += tl.load(bias + expert).to(tl.float64)
    tl.store(value + expert, found)
    tl.store(predicted + expert, tokens.to(tl.float64) * top_k / width)
    tl.store(widest + expert, tl.maximum(size, next_size))
    ends = (at == 0) | (at == number + 1)
    tl.store(outside + expert, tl.sum(tl.where(ends, many, 0)))


@triton.jit
def _update_all(
    value, widest, outside, counts, bias, kept, old_bias, new_bias, numbers, bin_width,
    width, top_k,
    LEVEL: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    expert = tl.arange(0, ALL)
    here = expert < width
    load = tl.load(counts + expert, mask=here, other=0)
    tokens = tl.load(counts + width)
    own = tl.load(bias + expert, mask=here, other=0.0)
    found = tl.load(value + expert, mask=here, other=0.0)
    beyond = tl.load(outside + expert, mask=here, other=0).to(tl.int64)
    tl.debug_barrier()  # changed when all threads have read
    tl.store(kept + expert, load, mask=here)
    tl.store(counts + expert, tl.zeros_like(load), mask=here)
    tl.store(counts + width, 0)
    tl.store(old_bias + expert, own, mask=here)
    if LEVEL:
        levelled = (found - tl.sum(found) / width).to(tl.float32)
        own = tl.where(tokens > 0, levelled, own)
    tl.store(new_bias + expert, own, mask=here)
    tl.store(bias + expert, own, mask=here)
    tl.store(bin_width, tl.max(tl.load(widest + expert, mask=here, other=0.0)))
    tl.store(numbers, tokens)
    tl.store(numbers + 1, tl.sum(beyond))
    tl.store(numbers + 2, tokens * top_k - tl.sum(load))


def level_triton(
    counts: Tensor, histogram: Tensor, bias: Tensor, *, bins: Bins, top_k: int, layer: int
) -> LayerLoad:
    """See `ops.quantile.level`."""
    experts = len(bias)
    value, predicted, widest = bias.new_empty(3, experts, dtype=torch.float64).unbind()
    old_bias, new_bias = bias.new_empty(2, experts).unbind()
    outside = bias.new_empty(experts, dtype=torch.int32)
    kept, numbers = counts.new_empty(experts), counts.new_empty(3)
    width = bias.new_empty((), dtype=torch.float64)
    every = triton.next_power_of_2(experts)
    _update_experts[(experts,)](
        histogram,
        bias,
        value,
        predicted,
        widest,
        outside,
        experts,
        bins.number,
        top_k,
        bins.wide_span,
        CENTRED=bins.placement is BinPlacement.centred,
        SHIFT=bins.shift,
        ALL=every,
        PLACES=triton.next_power_of_2(bins.number + 2),
        num_warps=4,
    )
    _update_all[(1,)](
        value,
        widest,
        outside,
        counts,
        bias,
        kept,
        old_bias,
        new_bias,
        numbers,
        width,
        experts,
        top_k,
        LEVEL=top_k < experts,
        ALL=every,
        num_warps=4,
    )
    tokens, out_of_range, dropped = numbers.unbind()
    return LayerLoad(
        layer=layer,
        top_k=top_k,
        tokens=tokens,
        counts=kept,
        bias=old_bias,
        new_bias=new_bias,
        predicted=predicted,
        out_of_range=out_of_range,
        bin_width=width,
        dropped=dropped,
    )
