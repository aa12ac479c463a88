"""The two kernels of the mix over depth.

A program takes whole tokens, in two walks over their channels that take all sources at once: the
first gives what is summed over channels, the second, which reads from the cache, gives the result.
Sources are a tuple, so that their number needs no padding, and what is summed over channels of all
of them is joined into one tensor, so that threads wait for each other once a walk. All that norm
and softmax need backward follows from two sums a source:

    mix = sum_j weight_j v_j      p_j = <v_j, dout * norm>      q_j = <v_j, mix>
    |mix|^2 = sum_j weight_j q_j  <mix, dout * norm> = sum_j weight_j p_j

The forward pass keeps score_j, 1 / rms(v_j) and q_j. Sums over tokens are partial sums of a fixed
number of programs: the same bits on every run.

Shapes: T tokens, N sources, each [T, D]; kept float32 [T, 3, N]. Internal precision is float32.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _offset(row, channel, inside, OWN: tl.constexpr, ALIGNED: tl.constexpr):
    """row + channel, in a form that the compiler does not take apart: it would keep some pointers
    of each source in registers, two a pointer and loop."""
    found = tl.where(inside, row + channel, 0)
    if ALIGNED:
        found = tl.max_contiguous(tl.multiple_of(found, OWN), OWN)
    return found


@triton.jit
def _read(sources, offset, inside, N: tl.constexpr):
    """Some channels of a row of each source: a tuple of [BLOCK]."""
    found = ()
    for j in tl.static_range(N):
        found = found + (tl.load(sources[j] + offset, mask=inside, other=0.0),)
    return found


@triton.jit
def _product(vector, factor, channel, inside):
    """Some channels of the product of two vectors: [BLOCK] in float32."""
    found = tl.load(vector + channel, mask=inside, other=0.0).to(tl.float32)
    return found * tl.load(factor + channel, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _weighted(values, weights, N: tl.constexpr):
    """sum_j weights_j values_j: [BLOCK] in float32."""
    found = values[0].to(tl.float32) * weights[0]
    for j in tl.static_range(1, N):
        found += values[j].to(tl.float32) * weights[j]
    return found


@triton.jit
def _zeros(count: tl.constexpr, size: tl.constexpr):
    found = ()
    for _ in tl.static_range(count):
        found = found + (tl.zeros([size], tl.float32),)
    return found


@triton.jit
def _add_products(sums, values, factor, N: tl.constexpr, OWN: tl.constexpr):
    """Adds values_j * factor to sums_j [BLOCK / OWN]: a thread's neighbours into one number."""
    found = ()
    for j in tl.static_range(N):
        product = values[j].to(tl.float32) * factor
        product = tl.reshape(product, [product.shape[0] // OWN, OWN])
        found = found + (sums[j] + tl.sum(product, 1),)
    return found


@triton.jit
def _totals(parts, COUNT: tl.constexpr, DOUBLINGS: tl.constexpr):
    """The sum of each of COUNT <= 2^DOUBLINGS tensors [lanes], as scalars, in one reduction."""
    lanes: tl.constexpr = parts[0].shape[0]
    joined = parts
    for _ in tl.static_range(2**DOUBLINGS - COUNT):
        joined = joined + (tl.zeros([lanes], tl.float32),)
    for _ in tl.static_range(DOUBLINGS):
        pairs = ()
        for i in tl.static_range(len(joined) // 2):
            pairs = pairs + (tl.join(joined[i], joined[i + len(joined) // 2]),)
        joined = pairs
    found = (tl.sum(joined[0], 0),)
    for level in tl.static_range(DOUBLINGS):
        first, second = (), ()
        for i in tl.static_range(2**level):
            a, b = tl.split(found[i])
            first, second = first + (a,), second + (b,)
        found = first + second
    return found


@triton.jit
def _softmax(scores, N: tl.constexpr):
    top = scores[0]
    for j in tl.static_range(1, N):
        top = tl.maximum(top, scores[j])
    total = 0.0
    weights = ()
    for j in tl.static_range(N):
        weights = weights + (tl.exp(scores[j] - top),)
        total += weights[j]
    found = ()
    for j in tl.static_range(N):
        found = found + (weights[j] / total,)
    return found


@triton.jit
def _dot(a, b, N: tl.constexpr):
    found = a[0] * b[0]
    for j in tl.static_range(1, N):
        found += a[j] * b[j]
    return found


@triton.jit
def depth_mix_forward(
    sources, query, key, norm, out, kept, width, eps,
    N: tl.constexpr, DOUBLINGS: tl.constexpr, NORM: tl.constexpr,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, OWN: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    row = token * width
    lane = tl.arange(0, BLOCK)
    squares, products = _zeros(N, BLOCK // OWN), _zeros(N, BLOCK // OWN)
    for part in range(PARTS):
        channel = part * BLOCK + lane
        inside = channel < width
        v = _read(sources, _offset(row, channel, inside, OWN, ALIGNED), inside, N)
        w = _product(query, key, channel, inside)
        products = _add_products(products, v, w, N, OWN)
        more = ()
        for j in tl.static_range(N):
            own = tl.reshape(v[j].to(tl.float32), [BLOCK // OWN, OWN])
            more = more + (squares[j] + tl.sum(own * own, 1),)
        squares = more
    totals = _totals(squares + products, 2 * N, DOUBLINGS + 1)
    score = ()
    for j in tl.static_range(N):
        inverse = tl.rsqrt(totals[j] / width + eps)
        score = score + (totals[N + j] * inverse,)
        tl.store(kept + token * 3 * N + j, score[j])
        tl.store(kept + token * 3 * N + N + j, inverse)
    weight = _softmax(score, N)
    # Backwards: what was read last is the nearest.
    mixes = ()
    along = _zeros(N, BLOCK // OWN)
    for turn in tl.static_range(PARTS):
        channel = (PARTS - 1 - turn) * BLOCK + lane
        inside = channel < width
        v = _read(sources, _offset(row, channel, inside, OWN, ALIGNED), inside, N)
        mix = _weighted(v, weight, N)
        if NORM:
            along = _add_products(along, v, mix, N, OWN)
            mixes = mixes + (mix,)
        else:
            tl.store(out + row + channel, mix, mask=inside)
    if NORM:
        rest = _totals(along, N, DOUBLINGS)
        for j in tl.static_range(N):
            tl.store(kept + token * 3 * N + 2 * N + j, rest[j])
        scale = tl.rsqrt(_dot(weight, rest, N) / width + eps)
        for turn in tl.static_range(PARTS):
            channel = (PARTS - 1 - turn) * BLOCK + lane
            inside = channel < width
            factor = tl.load(norm + channel, mask=inside, other=0.0).to(tl.float32)
            tl.store(out + row + channel, mixes[turn] * scale * factor, mask=inside)


@triton.jit
def _moved(sums, more, COUNT: tl.constexpr):
    """Adds to the last one and makes it the first."""
    found = (sums[COUNT - 1] + more,)
    for i in tl.static_range(COUNT - 1):
        found = found + (sums[i],)
    return found


@triton.jit(do_not_specialize=["added"])
def depth_mix_backward(
    sources, d_sources, added, query, key, norm, grad, kept, d_w, d_norm, tokens, width, eps,
    N: tl.constexpr, DOUBLINGS: tl.constexpr, NORM: tl.constexpr,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, OWN: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    first, step = tl.program_id(0), tl.num_programs(0)
    lane = tl.arange(0, BLOCK)
    sums_w, sums_norm = _zeros(PARTS, BLOCK), _zeros(PARTS, BLOCK)
    for turn in range(tl.cdiv(tokens - first, step)):
        token = first.to(tl.int64) + turn * step
        row = token * width
        p = _zeros(N, BLOCK // OWN)
        for part in range(PARTS):
            channel = part * BLOCK + lane
            inside = channel < width
            v = _read(sources, _offset(row, channel, inside, OWN, ALIGNED), inside, N)
            given = tl.load(grad + row + channel, mask=inside, other=0.0).to(tl.float32)
            if NORM:
                given *= tl.load(norm + channel, mask=inside, other=0.0).to(tl.float32)
            p = _add_products(p, v, given, N, OWN)
        dot = _totals(p, N, DOUBLINGS)
        # Not before: they would take registers from the first walk.
        score, inverse, rest = (), (), ()
        for j in tl.static_range(N):
            score = score + (tl.load(kept + token * 3 * N + j),)
            inverse = inverse + (tl.load(kept + token * 3 * N + N + j),)
            if NORM:
                rest = rest + (tl.load(kept + token * 3 * N + 2 * N + j),)
        weight = _softmax(score, N)
        scale, along = 1.0, 0.0
        if NORM:
            scale = tl.rsqrt(_dot(weight, rest, N) / width + eps)
            along = _dot(weight, dot, N) * scale * scale * scale / width
            scaled = ()
            for j in tl.static_range(N):
                scaled = scaled + (dot[j] * scale - rest[j] * along,)
            dot = scaled
        mean = _dot(weight, dot, N)
        slope, shrink = (), ()
        for j in tl.static_range(N):
            slope = slope + (weight[j] * (dot[j] - mean) * inverse[j],)
            # The key's norm takes out the part of the gradient that would only rescale v.
            shrink = shrink + (slope[j] * score[j] * inverse[j] / width,)
        # Backwards: what was read last is the nearest. Sums move up by one: to name one by its
        # number the loop would have to be unrolled.
        for i in range(PARTS):
            channel = (PARTS - 1 - i) * BLOCK + lane
            inside = channel < width
            v = _read(sources, _offset(row, channel, inside, OWN, ALIGNED), inside, N)
            through = tl.load(grad + row + channel, mask=inside, other=0.0).to(tl.float32)
            w = _product(query, key, channel, inside)
            if NORM:
                mix = _weighted(v, weight, N)
                sums_norm = _moved(sums_norm, through * mix * scale, PARTS)
                through *= tl.load(norm + channel, mask=inside, other=0.0).to(tl.float32) * scale
                through -= mix * along
            sums_w = _moved(sums_w, _weighted(v, slope, N), PARTS)
            offset = _offset(row, channel, inside, OWN, ALIGNED)
            for j in tl.static_range(N):
                to = d_sources[j] + offset
                d_v = tl.load(to, mask=inside & (((added >> j) & 1) == 1), other=0.0).to(tl.float32)
                d_v += weight[j] * through
                d_v += slope[j] * w
                d_v -= shrink[j] * v[j].to(tl.float32)
                tl.store(to, d_v, mask=inside)
    row = first.to(tl.int64) * width
    for part in tl.static_range(PARTS):
        channel = part * BLOCK + lane
        tl.store(d_w + row + channel, sums_w[part], mask=channel < width)
        if NORM:
            tl.store(d_norm + row + channel, sums_norm[part], mask=channel < width)
