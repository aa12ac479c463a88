"""The Triton kernels of the mix over depth, each way; what they compute and keep: `triton`.

Two forms more are for the two phases of a layer (`two_phase`). With BANK > 0 the first BANK sources
are mixed by a second query too, in the same walks; of that mix the logarithm of the sum of
exponentials is kept. With MERGE the first of two sources is such a mix, whose score that is.

Shapes: T tokens, N sources, each [T, D]. Internal precision is float32. Formulas: `dense`.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
def _softmax(score, number, COUNT: tl.constexpr):
    """Weights of the first COUNT scores, zero for the rest, and the logarithm of their sum."""
    score = tl.where(number < COUNT, score, -float("inf"))
    top = tl.max(score, 0)
    weight = tl.where(number < COUNT, tl.exp(score - top), 0.0)
    total = tl.sum(weight, 0)
    return weight / total, top + tl.log(total)


@triton.jit
def _wide_query(query, key, channel, inside):
    w = tl.load(query + channel, mask=inside, other=0.0).to(tl.float32)
    return w * tl.load(key + channel, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _depth_mix_forward(
    sources, query, key, norm, bank_query, bank_key, out, bank, scores, inverses, bank_scores,
    log_sum, width, eps,
    N: tl.constexpr, PADDED: tl.constexpr, BANK: tl.constexpr, MERGE: tl.constexpr,
    NORM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, PADDED)
    at = _at(sources, token * width, N, PADDED)
    lane = tl.arange(0, BLOCK)
    squares = tl.zeros([PADDED, BLOCK // OWN], tl.float32)
    products = tl.zeros([PADDED, BLOCK // OWN], tl.float32)
    bank_products = tl.zeros([PADDED, BLOCK // OWN], tl.float32)
    for start in range(0, WIDTH, BLOCK):
        channel = start + lane
        inside = channel < width
        v = tl.load(at + channel[None, :], mask=(number < N)[:, None] & inside[None, :], other=0.0)
        v = v.to(tl.float32)
        squares += _partial(v * v, OWN)
        products += _partial(v * _wide_query(query, key, channel, inside)[None, :], OWN)
        if BANK:
            w = _wide_query(bank_query, bank_key, channel, inside)
            bank_products += _partial(v * w[None, :], OWN)
    inverse = tl.rsqrt(tl.sum(squares, 1) / width + eps)
    score = tl.sum(products, 1) * inverse
    if MERGE:  # the first source is a mix itself: no key, and the score of all that it has
        score = tl.where(number == 0, tl.load(log_sum + token), score)
        inverse = tl.where(number == 0, 0.0, inverse)
    tl.store(scores + token * N + number, score, mask=number < N)
    tl.store(inverses + token * N + number, inverse, mask=number < N)
    weight, _ = _softmax(score, number, N)
    bank_weight = weight
    if BANK:
        score = tl.sum(bank_products, 1) * inverse
        tl.store(bank_scores + token * N + number, score, mask=number < N)
        bank_weight, total_score = _softmax(score, number, BANK)
        tl.store(log_sum + token, total_score)
    total = tl.zeros([BLOCK], tl.float32)
    mixes = ()
    for start in tl.static_range(0, WIDTH, BLOCK):
        channel = start + lane
        inside = channel < width
        v = tl.load(at + channel[None, :], mask=(number < N)[:, None] & inside[None, :], other=0.0)
        v = v.to(tl.float32)
        mix = tl.sum(v * weight[:, None], 0)
        total += mix * mix
        mixes = mixes + (mix,)
        if BANK:
            mix = tl.sum(v * bank_weight[:, None], 0)
            tl.store(bank + token * width + channel, mix, mask=inside)
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
    sources, d_sources, added, query, key, norm, bank_query, bank_key, grad, d_bank, scores,
    inverses, bank_scores, d_log_sum, d_w, d_norm, d_bank_w, tokens, turns, width, eps,
    N: tl.constexpr, PADDED: tl.constexpr, BANK: tl.constexpr, MERGE: tl.constexpr,
    NORM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, OWN: tl.constexpr,
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
        known = (number < N) & there
        score = tl.load(scores + token * N + number, mask=known, other=0.0)
        inverse = tl.load(inverses + token * N + number, mask=known, other=0.0)
        weight, _ = _softmax(score, number, N)
        p = tl.zeros([PADDED, BLOCK // OWN], tl.float32)
        q = tl.zeros([PADDED, BLOCK // OWN], tl.float32)
        bank_p = tl.zeros([PADDED, BLOCK // OWN], tl.float32)
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
            if BANK:
                given_bank = tl.load(d_bank + row + channel, mask=inside, other=0.0)
                bank_p += _partial(v * given_bank[None, :], OWN)
        dot, rest = tl.sum(p, 1), tl.sum(q, 1)
        scale, along = 1.0, 0.0
        if NORM:
            scale = tl.rsqrt(tl.sum(weight * rest, 0) / width + eps)
            along = tl.sum(weight * dot, 0) * scale * scale * scale / width
            dot = dot * scale - rest * along
        slope = weight * (dot - tl.sum(weight * dot, 0))
        if MERGE:
            to_sum = tl.sum(tl.where(number == 0, slope, 0.0), 0)
            tl.store(d_log_sum + token, to_sum, mask=there)
        slope *= inverse
        # The key's norm takes out the part of the gradient that would only rescale v.
        shrink = slope * score * inverse / width
        bank_weight, bank_slope = weight, slope
        if BANK:
            score = tl.load(bank_scores + token * N + number, mask=known, other=0.0)
            bank_weight, _ = _softmax(score, number, BANK)
            dot = tl.sum(bank_p, 1)
            dot += tl.load(d_log_sum + token, mask=there, other=0.0) - tl.sum(bank_weight * dot, 0)
            bank_slope = bank_weight * dot * inverse
            shrink += bank_slope * score * inverse / width
        for start in range(0, WIDTH, BLOCK):
            channel = start + lane
            inside = (channel < width) & there
            both = (number < N)[:, None] & inside[None, :]
            v = tl.load(at + channel[None, :], mask=both, other=0.0).to(tl.float32)
            given = tl.load(grad + row + channel, mask=inside, other=0.0).to(tl.float32)
            w = _wide_query(query, key, channel, inside)
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
            if BANK:
                w_here = tl.sum(bank_slope[:, None] * v, 0)
                # Registers hold two such sums; the third lies in the cache.
                here = d_bank_w + tl.program_id(0).to(tl.int64) * width + channel
                w_here += tl.load(here, mask=inside & (turn > 0), other=0.0)
                tl.store(here, w_here, mask=inside)
                given_bank = tl.load(d_bank + row + channel, mask=inside, other=0.0)
                w = _wide_query(bank_query, bank_key, channel, inside)
                d_v += bank_weight[:, None] * given_bank[None, :] + bank_slope[:, None] * w[None, :]
            if MERGE:  # the gradient of a mix that is rounded must not be, or slopes lose digits
                of_bank = tl.sum(tl.where((number == 0)[:, None], d_v, 0.0), 0)
                tl.store(d_bank + row + channel, of_bank, mask=inside)
                both &= (number > 0)[:, None]
            adds = both & (((added >> number) & 1) == 1)[:, None]
            d_v += tl.load(to + channel[None, :], mask=adds, other=0.0)
            tl.store(to + channel[None, :], d_v, mask=both)
    row = tl.program_id(0).to(tl.int64) * width
    channels = part * BLOCK + lane[None, :]
    tl.store(d_w + row + channels, sums_w, mask=channels < width)
    if NORM:
        tl.store(d_norm + row + channels, sums_norm, mask=channels < width)
