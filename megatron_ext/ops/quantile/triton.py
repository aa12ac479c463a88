"""The statistics of a micro-batch, histograms of margins and load, in one pass over the scores.

A program takes some experts and some tokens. One added in memory for each of T x E margins took
four times as long as all this kernel (on an H200). But most margins of an expert lie in few bins:
what falls into a window of `WINDOW` bins is counted in registers, eight bits a bin (so `TOKENS` is
below 256), and added at the end; only the others are added one by one. Where the window lies
changes the time and no count. Uniform bins, of which margins fill hundreds, have none.

Integers are added in whatever order, with the same sum. The bin of a margin is that of `Bins.add`,
bit for bit: divisions are rounded correctly.

Shapes: T tokens, E experts, B bins.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_ext.config.schema import BinPlacement
from megatron_ext.ops.launch import launch_settings, rows_of
from megatron_ext.ops.quantile.histogram import Bins


@triton.jit
def _origin(
    bias, width, number, span, CENTRED: tl.constexpr, SHIFT: tl.constexpr, ALL: tl.constexpr
):  # fmt: skip
    """Where bins begin: leading bits of the first (`Bins._first`), or its lower end and width."""
    others = tl.arange(0, ALL)
    every = tl.load(bias + others, mask=others < width, other=float("inf"))
    smallest = tl.min(every)
    largest = tl.max(tl.where(others < width, every, float("-inf")))
    if CENTRED:
        # The octave of the widest offset, from the exponent of its float.
        octave = ((span + largest - smallest).to(tl.int32, bitcast=True) >> 23) + 1
        return (octave << (23 - SHIFT)) - number // 2, 1.0
    else:
        low = smallest - span
        return low, tl.div_rn(largest + span - low, number.to(tl.float32))


@triton.jit
def _places(
    score, bias, cutoff, low, step, number,
    CENTRED: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """`Bins._bin`; `low` and `step` are from `_origin`."""
    if CENTRED:
        offset = cutoff - (score + bias)
        size = offset.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        half = number // 2
        place = tl.minimum(tl.maximum((size >> SHIFT) - low, 0), half)
        return tl.where(offset < 0, half - place, half + 1 + place)
    else:
        place = tl.floor(tl.div_rn(cutoff - score - low, step)).to(tl.int32) + 1
        return tl.minimum(tl.maximum(place, 0), number + 1)


@triton.jit
def _rows(pointer, first, row_stride, column, tokens, here, COUNT: tl.constexpr):
    """The next rows, zeros beyond the last, as a tuple."""
    found = ()
    for i in tl.static_range(COUNT):
        row = (first + i).to(tl.int64)
        inside = here & (first + i < tokens)
        found = found + (tl.load(pointer + row * row_stride + column, mask=inside, other=0),)
    return found


@triton.jit
def _zeros(COUNT: tl.constexpr, SIZE: tl.constexpr):
    made = ()
    for _ in tl.static_range(COUNT):
        made = made + (tl.zeros([SIZE], tl.int32),)
    return made


@triton.jit
def _with_one(words, near, away):
    """One more in the eight bits of place `away` of some words."""
    one = tl.where(near, 1 << ((away & 3) * 8), 0)
    made = ()
    for i in tl.static_range(len(words)):
        made = made + (words[i] + tl.where(away >> 2 == i, one, 0),)
    return made


@triton.jit
def _statistics(
    scores, bias, cutoff, valid, map, histogram, counts,
    tokens, width, number, span, scores_row, map_row,
    CENTRED: tl.constexpr, SHIFT: tl.constexpr, VALID: tl.constexpr, ALL: tl.constexpr,
    TOKENS: tl.constexpr, AHEAD: tl.constexpr, EXPERTS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    low, step = _origin(bias, width, number, span, CENTRED, SHIFT, ALL)
    begin = tl.program_id(1) * TOKENS
    column = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    here = column < width
    own_bias = tl.load(bias + column, mask=here, other=0.0)
    place = column.to(tl.int64) * (number + 2)
    taken = tl.zeros([EXPERTS], tl.int32)
    present = 0
    words = _zeros(WINDOW // 4, EXPERTS)
    base = tl.zeros([EXPERTS], tl.int32)
    if WINDOW:
        # From what the first tokens show: margins end above, and thin out below.
        score = _rows(scores, begin, scores_row, column, tokens, here, AHEAD)
        for i in tl.static_range(AHEAD):
            cut = tl.load(cutoff + begin + i, mask=begin + i < tokens, other=0.0)
            bin = _places(score[i], own_bias, cut, low, step, number, CENTRED, SHIFT)
            base = tl.maximum(base, bin)
        base += 3 - WINDOW
    for offset in range(0, TOKENS, AHEAD):
        first = begin + offset
        # Before anything is added: what is read later would wait for it.
        score = _rows(scores, first, scores_row, column, tokens, here, AHEAD)
        chosen = _rows(map, first, map_row, column, tokens, here, AHEAD)
        for i in tl.static_range(AHEAD):
            inside = first + i < tokens
            if VALID:
                inside = inside & (tl.load(valid + first + i, mask=inside, other=0) != 0)
            cut = tl.load(cutoff + first + i, mask=inside, other=0.0)
            present += inside.to(tl.int32)
            counted = here & inside
            taken += tl.where(counted, chosen[i].to(tl.int32), 0)
            bin = _places(score[i], own_bias, cut, low, step, number, CENTRED, SHIFT)
            alone = counted
            if WINDOW:
                away = bin - base
                near = counted & (away >= 0) & (away < WINDOW)
                words = _with_one(words, near, away)
                alone = counted & ~near
            tl.atomic_add(histogram + (place + bin), 1, mask=alone, sem="relaxed")
    for i in tl.static_range(WINDOW):
        many = (words[i // 4] >> (8 * (i % 4))) & 255
        tl.atomic_add(histogram + (place + base + i), many, mask=many > 0, sem="relaxed")
    tl.atomic_add(counts + column, taken.to(tl.int64), mask=taken > 0, sem="relaxed")
    if tl.program_id(0) == 0:
        tl.atomic_add(counts + width, tl.cast(present, tl.int64), sem="relaxed")


def add_statistics_triton(
    counts: Tensor,
    histogram: Tensor,
    scores: Tensor,
    *,
    bins: Bins,
    map: Tensor,
    cutoff: Tensor,
    bias: Tensor,
    valid: Tensor | None,
) -> None:
    """See `ops.quantile.add_statistics`; scores, cut-off and bias are float32."""
    scores, chosen = rows_of(scores), rows_of(map).view(torch.uint8)
    tokens, width = scores.shape
    if not tokens:
        return
    centred = bins.placement is BinPlacement.centred
    settings = launch_settings("statistics", width)
    settings = settings | {"WINDOW": settings["WINDOW"] if centred else 0}
    grid = (
        triton.cdiv(width, settings["EXPERTS"]),
        triton.cdiv(tokens, settings["TOKENS"]),
    )
    _statistics[grid](
        scores,
        bias.contiguous(),
        cutoff.contiguous(),
        chosen if valid is None else valid.contiguous().view(torch.uint8),
        chosen,
        histogram,
        counts,
        tokens,
        width,
        bins.number,
        bins.wide_span,
        scores.stride(0),
        chosen.stride(0),
        CENTRED=centred,
        SHIFT=bins.shift,
        VALID=valid is not None,
        ALL=triton.next_power_of_2(width),
        **settings,
    )
