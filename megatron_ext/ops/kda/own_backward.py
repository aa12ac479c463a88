"""The backward pass of KDA inside chunks of 64 tokens, once the states' gradients are known.

Two Triton kernels. `_kda_backward_solve`, a program a chunk and head: the gradient back through the
triangular inverse and those of the two products between tokens. `_kda_backward_chunk`, the same
grid: gradients of queries, keys and log-decay, which stay on the chip in float32 until they are
whole, running sum included.

With A the inverse, S the state before the chunk, N the writes and dN their whole gradient:
d = A^T dN is the gradient of beta (v - k_in S), and that of beta k k^T is -d N^T; hence
beta d_beta = d . N. Formulas: Kimi Linear (chunked form); layouts: fla-core 0.6.

The decay between tokens i >= j of one chunk, exp(G_i - G_j), is split into a factor of the row and
one of the column: around the middle of the chunk for pairs of different halves, where no factor
exceeds 1, and around the middle of the half for pairs of one half, at most e^80 with gates
of at least -5. The products' gradients are divided by a power of two near their largest, so that
such factors leave the range of float32 under no scale of a loss. Products are taken in the inputs'
dtype, but the gradient of the decay is a difference of sums over the same pairs: it is computed
from the *rounded* factors, the same for row and column, so that what cancels in the formula cancels
here too, and bfloat16 is enough.

Shapes: B batch, T tokens, H heads, K and V widths of a key and value head, NT chunks, [later,
earlier] tokens of a pair; inside the kernels tiles are [channels, tokens].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_ext.ops.launch import launch_settings

CHUNK = 64
WIDTHS = (128,)


@triton.jit
def _settled(x, COMPILED: tl.constexpr):
    # A value that is computed here and not where it is used: without it the compiler puts off sums
    # until their terms fill the registers. Not for the interpreter, which knows no assembly.
    if COMPILED:
        x = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=False, pack=1
        )
    return x


@triton.jit
def _late(x, COMPILED: tl.constexpr):
    # The same for an offset, whose addresses would else be computed, and kept, from the start.
    if COMPILED:
        x = tl.inline_asm_elementwise(
            "mov.b64 $0, $1;", "=l,l", [x], dtype=tl.int64, is_pure=False, pack=1
        )
    return x


@triton.jit
def _sum_from(x, later, TYPE: tl.constexpr):
    # Sums of each row from a column on, by a matrix of ones: exact in three parts of 8 bits.
    if tl.float32 == TYPE:
        return tl.dot(x, later, input_precision="ieee")
    high = x.to(TYPE)
    x -= high.to(tl.float32)
    middle = x.to(TYPE)
    low = (x - middle.to(tl.float32)).to(TYPE)
    return tl.dot(low, later, tl.dot(middle, later, tl.dot(high, later)))


@triton.jit
def _chunk_place(cu_seqlens, chunk_indices, chunk, length, chunks, DOCUMENTS: tl.constexpr):
    if DOCUMENTS:
        document = tl.load(chunk_indices + 2 * chunk)
        begin = tl.load(cu_seqlens + document).to(tl.int64)
        end = tl.load(cu_seqlens + document + 1).to(tl.int64)
        begin += tl.load(chunk_indices + 2 * chunk + 1).to(tl.int64) * 64
    else:
        begin = chunk // chunks * length
        end = begin + length
        begin += chunk % chunks * 64
    return begin, tl.minimum(end - begin, 64).to(tl.int32) - 1


@triton.jit
def _kda_backward_solve(
    beta, inverse, v_new, d_out, d_new, d_v, d_beta, right, qk, kk, diagonal, units,
    cu_seqlens, chunk_indices, scale, length, chunks, heads,
    VALUE: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = v_new.dtype.element_ty
    program = tl.program_id(0).to(tl.int64)
    chunk, head = program // heads, program % heads
    begin, last = _chunk_place(cu_seqlens, chunk_indices, chunk, length, chunks, DOCUMENTS)
    start = begin * heads + head
    token = tl.arange(0, 64)
    row, column = token[:, None], token[None, :]
    there = token <= last
    of_value = (token * heads)[:, None] * VALUE + tl.arange(0, VALUE)[None, :]
    of_pair = (token * heads)[:, None] * 64 + column
    inside = there[:, None]
    solved = tl.load(inverse + start * 64 + of_pair, mask=inside, other=0.0)
    of_new = tl.load(d_new + start * VALUE + of_value, mask=inside, other=0.0)
    new = tl.load(v_new + start * VALUE + of_value, mask=inside, other=0.0)
    out = tl.load(d_out + start * VALUE + of_value, mask=inside, other=0.0)
    write = tl.load(beta + start + token * heads, mask=there, other=1.0)
    through = tl.dot(tl.trans(solved), of_new)
    tl.store(d_v + start * VALUE + of_value, (through * write[:, None]).to(dtype), mask=inside)
    through = through.to(dtype)
    tl.store(right + start * VALUE + of_value, through, mask=inside)
    of_kk = -tl.dot(through, tl.trans(new))
    of_qk = tl.dot(out, tl.trans(new)) * scale
    at = start + token * heads
    same = row == column
    tl.store(diagonal + at, tl.sum(tl.where(same, of_qk, 0.0), 1), mask=there)
    tl.store(d_beta + at, tl.sum(tl.where(same, -of_kk, 0.0), 1) / write, mask=there)
    of_qk = tl.where(row > column, of_qk, 0.0)
    of_kk = tl.where(row > column, of_kk, 0.0)
    # a power of two near the largest, and its inverse
    top = tl.max(tl.max(tl.maximum(tl.abs(of_qk), tl.abs(of_kk)), 1), 0)
    top = tl.minimum(tl.maximum(top, 1e-30), 1e30)
    bits = top.to(tl.int32, bitcast=True) & 0x7F800000
    tl.store(units + program, bits.to(tl.float32, bitcast=True))
    per_unit = (0x7F000000 - bits).to(tl.float32, bitcast=True)
    tl.store(qk + start * 64 + of_pair, (of_qk * per_unit).to(dtype), mask=inside)
    tl.store(kk + start * 64 + of_pair, (of_kk * per_unit).to(dtype), mask=inside)


@triton.jit
def _half_chunk(
    q, k, decay, beta, d_out, right, v_new, qk, kk, diagonal, state, after, unit,
    middle, total, channel, last, start, scale, heads,
    WIDTH: tl.constexpr, VALUE: tl.constexpr, LATER: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = q.dtype.element_ty
    start = _late(start, COMPILED)
    q += start * WIDTH
    k += start * WIDTH
    decay += start * WIDTH
    beta += start
    place: tl.constexpr = 32 if LATER else 0
    token = place + tl.arange(0, 32)
    other = 32 - place + tl.arange(0, 32)
    there, there_other = token <= last, other <= last
    inside = there[None, :]
    of_value = (token * heads)[:, None] * VALUE + tl.arange(0, VALUE)[None, :]
    out = tl.load(d_out + start * VALUE + of_value, mask=there[:, None], other=0.0)
    through = tl.load(right + start * VALUE + of_value, mask=there[:, None], other=0.0)
    new = tl.load(v_new + start * VALUE + of_value, mask=there[:, None], other=0.0)
    of_channel = (token * heads)[None, :] * WIDTH + channel[:, None]
    write = tl.load(beta + token * heads, mask=there, other=0.0)[None, :]
    passed = tl.load(decay + of_channel, mask=inside, other=0.0)
    query = tl.load(q + of_channel, mask=inside, other=0.0).to(tl.float32)
    key = tl.load(k + of_channel, mask=inside, other=0.0).to(tl.float32)
    at = tl.minimum(tl.maximum(last, place), place + 15) * heads * WIDTH + channel
    reference = tl.load(decay + at, mask=(channel >= 0) & (place <= last), other=0.0)[:, None]

    of_query = tl.dot(state, tl.trans(out))
    # Zero, in the layout of products: what is added to it need not change layouts later.
    anchor = of_query * 0.0
    passed += anchor
    query += anchor
    key += anchor
    since = tl.exp2(passed)
    of_query *= since * scale
    of_passed = query * of_query
    of_query = _settled(of_query, COMPILED)
    of_passed = _settled(of_passed, COMPILED)
    of_key = tl.dot(state, tl.trans(through)) * (-since * write)
    of_passed += key * of_key
    of_key = _settled(of_key, COMPILED)
    of_passed = _settled(of_passed, COMPILED)
    of_out = tl.dot(after, tl.trans(new)) * tl.exp2(total[:, None] - passed)
    of_key += of_out
    of_out *= key
    of_passed -= of_out
    of_total = tl.sum(of_out, 1)
    of_key = _settled(of_key, COMPILED)
    of_passed = _settled(of_passed, COMPILED)

    # pairs of different halves, around the middle of the chunk
    passed = _settled(passed, COMPILED)
    near = tl.exp2(-tl.abs(passed - middle))
    of_pair = (32 + tl.arange(0, 32))[:, None] * (heads * 64) + tl.arange(0, 32)[None, :]
    late = (32 + tl.arange(0, 32) <= last)[:, None]
    far_qk = tl.load(qk + start * 64 + of_pair, mask=late, other=0.0)
    far_kk = tl.load(kk + start * 64 + of_pair, mask=late, other=0.0)
    of_other = (other * heads)[None, :] * WIDTH + channel[:, None]
    outside = there_other[None, :]
    key_other = tl.load(k + of_other, mask=outside, other=0.0).to(tl.float32) + anchor
    near_other = tl.load(decay + of_other, mask=outside, other=0.0) + anchor
    near_other = tl.exp2(-tl.abs(near_other - middle))
    if LATER:
        factor = (key_other * near_other).to(dtype)
        product = tl.dot(factor, tl.trans(far_qk)) * unit
        of_passed += (query * near).to(dtype).to(tl.float32) * product
        of_query += near * product
        product = tl.dot(factor, tl.trans(far_kk)) * unit
        near *= write
        of_passed += (key * near).to(dtype).to(tl.float32) * product
        of_key += near * product
    else:
        query_other = tl.load(q + of_other, mask=outside, other=0.0).to(tl.float32) + anchor
        write_other = tl.load(beta + other * heads, mask=there_other, other=0.0)[None, :]
        product = tl.dot((query_other * near_other).to(dtype), far_qk)
        near_other *= write_other
        product = tl.dot((key_other * near_other).to(dtype), far_kk, product) * unit
        of_passed -= (key * near).to(dtype).to(tl.float32) * product
        of_key += near * product
    of_query = _settled(of_query, COMPILED)
    of_key = _settled(of_key, COMPILED)
    of_passed = _settled(of_passed, COMPILED)

    # pairs of this half, around its middle; a token with itself does not decay
    of_pair = token[:, None] * (heads * 64) + token[None, :]
    near_qk = tl.load(qk + start * 64 + of_pair, mask=there[:, None], other=0.0)
    near_kk = tl.load(kk + start * 64 + of_pair, mask=there[:, None], other=0.0)
    straight = tl.load(diagonal + start + token * heads, mask=there, other=0.0)[None, :]
    passed = _settled(passed, COMPILED)
    shift = tl.where(inside, passed - reference, 0.0)
    rise = tl.exp2(shift)
    fall = tl.exp2(-shift)
    factor_in = (key * fall).to(dtype)
    product = tl.dot(factor_in, tl.trans(near_qk))
    factor = (query * rise).to(dtype)
    of_passed += factor.to(tl.float32) * product * unit
    # the unit last: a product alone may be as small as e^-80 units
    of_query += rise * product * unit + straight * key
    of_query = _settled(of_query, COMPILED)
    of_passed = _settled(of_passed, COMPILED)
    back = tl.dot(factor, near_qk)
    product = tl.dot(factor_in, tl.trans(near_kk))
    rise *= write
    factor = (key * rise).to(dtype)
    of_passed += factor.to(tl.float32) * product * unit
    of_key += rise * product * unit + straight * query
    of_key = _settled(of_key, COMPILED)
    of_passed = _settled(of_passed, COMPILED)
    back = tl.dot(factor, near_kk, back)
    of_passed -= factor_in.to(tl.float32) * back * unit
    of_key += fall * back * unit
    return of_query, of_key, of_passed, of_total


@triton.jit
def _kda_backward_chunk(
    q, k, decay, beta, states, v_new, d_out, d_states, right, qk, kk, diagonal, units,
    d_q, d_k, d_g, cu_seqlens, chunk_indices, scale, length, chunks, heads,
    WIDTH: tl.constexpr, VALUE: tl.constexpr, DOCUMENTS: tl.constexpr,
    COMPILED: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = q.dtype.element_ty
    program = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, WIDTH)
    chunk, head = program // heads, program % heads
    begin, last = _chunk_place(cu_seqlens, chunk_indices, chunk, length, chunks, DOCUMENTS)
    start = begin * heads + head
    of_state = program * (WIDTH * VALUE)
    at = channel[:, None] * VALUE + tl.arange(0, VALUE)[None, :]
    state = tl.load(states + of_state + at)
    after = tl.load(d_states + of_state + at)
    of_total = tl.sum(state.to(tl.float32) * after.to(tl.float32), 1)
    unit = tl.load(units + program)
    of_decay = decay + start * WIDTH + channel
    pitch = heads * WIDTH
    middle = tl.load(of_decay + tl.minimum(last, 31) * pitch)[:, None]
    total = tl.load(of_decay + last * pitch)
    of_total *= tl.exp2(total)
    token = tl.arange(0, 32)
    later = (token[:, None] >= token[None, :]).to(tl.float32).to(dtype)

    of_query, of_key, of_passed, of_last = _half_chunk(
        q, k, decay, beta, d_out, right, v_new, qk, kk, diagonal, state, after, unit,
        middle, total, channel, last, start, scale, heads, WIDTH, VALUE, False, COMPILED,
    )  # fmt: skip
    of_total += of_last
    at = (token * heads)[None, :] * WIDTH + channel[:, None]
    there = (token <= last)[None, :]
    start = _late(start, COMPILED)
    tl.store(d_q + start * WIDTH + at, of_query, mask=there)
    start = _late(start, COMPILED)
    tl.store(d_k + start * WIDTH + at, of_key, mask=there)
    of_early = _settled(_sum_from(of_passed, later, dtype), COMPILED)

    of_query, of_key, of_passed, of_last = _half_chunk(
        q, k, decay, beta, d_out, right, v_new, qk, kk, diagonal, state, after, unit,
        middle, total, channel, last, start, scale, heads, WIDTH, VALUE, True, COMPILED,
    )  # fmt: skip
    of_total = (of_total + of_last)[:, None]
    at_late = ((32 + token) * heads)[None, :] * WIDTH + channel[:, None]
    there_late = (32 + token <= last)[None, :]
    start = _late(start, COMPILED)
    tl.store(d_q + start * WIDTH + at_late, of_query, mask=there_late)
    start = _late(start, COMPILED)
    tl.store(d_k + start * WIDTH + at_late, of_key, mask=there_late)
    start = _late(start, COMPILED)
    of_late = _sum_from(of_passed, later, dtype) + of_total
    tl.store(d_g + start * WIDTH + at_late, of_late, mask=there_late)
    of_total += tl.sum(of_passed, 1)[:, None]
    tl.store(d_g + start * WIDTH + at, of_early + of_total, mask=there)


def chunk_backward(
    q: Tensor,
    k: Tensor,
    G: Tensor,
    beta: Tensor,
    inverse: Tensor,
    states: Tensor,
    v_new: Tensor,
    d_out: Tensor,
    d_states: Tensor,
    d_new: Tensor,
    *,
    scale: float,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of what enters the chunked form, from the flow along the recurrence.

    All tensors are contiguous; those without a dtype here are bfloat16 (on a CPU, in Triton's
    interpreter, float32 too).

    Args:
        q, k: normalised, q not scaled [B, T, H, K].
        G: log-decay summed from the start of its chunk, to the base 2, float32 [B, T, H, K]; at
            least -5 nats a token, which is not checked.
        beta: write strength, positive, float32 [B, T, H].
        inverse: (I + strictly lower beta k k^T)^-1 of each chunk [B, T, H, 64].
        states: before each chunk [B, NT, H, K, V].
        v_new: writes [B, T, H, V].
        d_out: gradient of the output [B, T, H, V].
        d_states: gradient of the state after each chunk [B, NT, H, K, V].
        d_new: whole gradient of the writes [B, T, H, V].
        scale: of the queries.
        cu_seqlens: document offsets [N + 1]; B is 1.
        chunk_indices: (document, chunk in it) of each chunk [NT, 2], with ``cu_seqlens``.

    Returns:
        d_q, d_k [B, T, H, K], of the normalised ones, float32; d_v [B, T, H, V]; d_g [B, T, H, K],
        of each token's log-decay in nats, float32; d_beta [B, T, H], float32.

    Raises:
        ValueError: a width or dtype that the kernels do not have.
    """
    batch, tokens, heads, width = q.shape
    value = v_new.shape[-1]
    if width not in WIDTHS or value not in WIDTHS:
        raise ValueError(f"head widths: given K={width} and V={value}, allowed {WIDTHS[0]}")
    compiled = q.device.type == "cuda"
    if compiled and q.dtype is not torch.bfloat16:
        raise ValueError(f"dtype of q: given {q.dtype}, allowed torch.bfloat16 on a GPU")
    chunks = triton.cdiv(tokens, CHUNK)
    d_q, d_k, d_g = (torch.empty(q.shape, dtype=torch.float32, device=q.device) for _ in range(3))
    d_v, right, d_beta, diagonal = (torch.empty_like(x) for x in (v_new, v_new, beta, beta))
    qk, kk = torch.empty_like(inverse), torch.empty_like(inverse)
    number = batch * chunks if chunk_indices is None else len(chunk_indices)
    units = torch.empty(number, heads, dtype=torch.float32, device=q.device)
    place = (cu_seqlens, chunk_indices, scale, tokens, chunks, heads)
    if number:
        _kda_backward_solve[(number * heads,)](
            *(beta, inverse, v_new, d_out, d_new, d_v, d_beta, right, qk, kk, diagonal, units),
            *place,
            VALUE=value,
            DOCUMENTS=cu_seqlens is not None,
            **launch_settings("kda_backward_solve", width),
        )
        _kda_backward_chunk[(number * heads,)](
            *(q, k, G, beta, states, v_new, d_out, d_states, right, qk, kk, diagonal, units),
            *(d_q, d_k, d_g, *place),
            WIDTH=width,
            VALUE=value,
            DOCUMENTS=cu_seqlens is not None,
            COMPILED=compiled,
            **launch_settings("kda_backward_chunk", width),
        )
    return d_q, d_k, d_v, d_g, d_beta
