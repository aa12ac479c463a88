"""What health counts of decay gates, in one pass over them; formulas: `health` and `gate`.

Shapes: B batch, T tokens, H heads, K width of a key head. Internal precision is float32. Counts are
integers and sums over programs are taken in a fixed order: the same bits on every run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILES = 8  # a program's


@triton.jit
def _decay_health(
    z, slope, bias, numbers, histogram, tokens, width, z_batch, z_token, z_head, lower_bound, limit,
    LOWEST: tl.constexpr, AN_OCTAVE: tl.constexpr, BINS: tl.constexpr, ALL: tl.constexpr,
    SOFTPLUS: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    part, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    channel = tl.arange(0, WIDTH)
    there = channel < width
    factor = tl.load(slope + head)
    shift = tl.load(bias + head * width + channel, mask=there, other=0.0)
    at = z + row.to(tl.int64) * z_batch + head.to(tl.int64) * z_head
    # Of a channel: added up over channels at the end.
    decay = tl.zeros([WIDTH], tl.float32)
    low = tl.zeros([WIDTH], tl.int32)
    high = tl.zeros([WIDTH], tl.int32)
    most = tl.zeros([WIDTH], tl.float32)
    counts = tl.zeros([ALL], tl.int32)
    for turn in range(TILES):
        token = (part * TILES + turn) * TILE + tl.arange(0, TILE)
        inside = (token < tokens)[:, None] & there[None, :]
        place = token.to(tl.int64)[:, None] * z_token + channel[None, :]
        x = tl.load(at + place, mask=inside, other=0.0).to(tl.float32) + shift[None, :]
        if SOFTPLUS:
            # log(1 + e) is e where the sum would round it away.
            e = tl.exp(-tl.abs(x))
            rate = factor * (tl.maximum(x, 0.0) + tl.where(e < 1e-4, e, tl.log(1 + e)))
        else:
            rate = -lower_bound / (1 + tl.exp(-factor * x))
        rate = tl.where(inside, rate, 0.0)
        decay += tl.sum(tl.where(inside, tl.exp(-rate), 0.0), 0)
        low += tl.sum((inside & (rate >= -lower_bound * (1 - limit))).to(tl.int32), 0)
        high += tl.sum((inside & (rate <= -lower_bound * limit)).to(tl.int32), 0)
        most = tl.maximum(most, tl.sum(rate, 0))
        octave = tl.floor((tl.log2(rate) - LOWEST) * AN_OCTAVE) + 1
        # NaN is no bin; the loss is NaN as well then, and training stops with a better message.
        octave = tl.where(octave > 0, tl.minimum(octave, BINS - 1.0), 0.0)
        found = tl.where(inside, octave.to(tl.int32), BINS)
        counts += tl.histogram(tl.reshape(found, [TILE * WIDTH]), ALL)
    at = (row * tl.num_programs(1) + head) * tl.num_programs(0) + part
    total = tl.sum(decay, 0)
    tl.store(numbers + at * 4, total)
    tl.store(numbers + at * 4 + 1, tl.sum(low, 0).to(tl.float32))
    tl.store(numbers + at * 4 + 2, tl.sum(high, 0).to(tl.float32))
    # A maximum leaves NaN out: it comes by way of the sum.
    tl.store(numbers + at * 4 + 3, tl.where(total == total, tl.max(most, 0), total))
    number = tl.arange(0, ALL)
    found = (number < BINS) & (counts > 0)
    tl.atomic_add(histogram + number, counts.to(tl.int64), mask=found)


def decay_statistics(
    z: Tensor,
    slope: Tensor,
    bias: Tensor,
    *,
    softplus: bool,
    lower_bound: float,
    saturated: float,
    tile: int,
    octaves: tuple[int, int],
    bins: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums over decay gates of rows of tokens.

    Args:
        z: raw gate input [B, T, H, K], channels without gaps.
        slope: [H], ones for a gate without; bias: [H, K].
        softplus: the gate has no bound.
        lower_bound: smallest log-decay a token.
        saturated: share of the range, at either end of it, in which a gate counts as saturated.
        tile: tokens whose rates are added up, a power of two.
        octaves: log2 of the rate at which bins begin, and bins an octave.
        bins: of the histogram, the ends included.

    Returns:
        Sums of exp(g), of gates at the lower end and at the upper, float64 [3]; the largest sum of
        rates over a tile, float64 scalar; counts of rates by bin, int64 [bins].
    """
    batch, tokens, heads, width = z.shape
    grid = (triton.cdiv(tokens, tile * TILES), heads, batch)
    numbers = torch.empty(grid[0] * heads * batch, 4, dtype=torch.float32, device=z.device)
    histogram = torch.zeros(bins, dtype=torch.int64, device=z.device)
    _decay_health[grid](
        z, slope.float().contiguous(), bias.float().contiguous(), numbers, histogram,
        tokens, width, z.stride(0), z.stride(1), z.stride(2), lower_bound, saturated,
        LOWEST=octaves[0], AN_OCTAVE=octaves[1], BINS=bins, ALL=triton.next_power_of_2(bins + 1),
        SOFTPLUS=softplus, TILE=tile, TILES=TILES, WIDTH=triton.next_power_of_2(width),
    )  # fmt: skip
    return numbers[:, :3].double().sum(0), numbers[:, 3].amax().double(), histogram
