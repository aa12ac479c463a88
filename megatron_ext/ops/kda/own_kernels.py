"""Two small Triton kernels of the backend `own`: the norm of queries and keys, and one product.

Shapes: B batch, T tokens, H heads, K and V widths of a key and value head, X chunks of 64 tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_ext.ops.kda.gate import NORM_EPS
from megatron_ext.ops.kda.tiles import CHUNK
from megatron_ext.ops.launch import launch_settings


@triton.jit
def _unit(x, eps):
    x = x.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, 1)[:, None] + eps)
    return x * inverse, inverse


@triton.jit
def _kda_unit_rows(
    q, k, q_out, k_out, q_inverse, k_inverse, tokens, length, heads,
    q_batch, q_row, q_head, k_batch, k_row, k_head, eps,
    WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    head = program % heads
    row = (program // heads) * ROWS + tl.arange(0, ROWS)[:, None]
    item, place = row // length, row % length
    channel = tl.arange(0, WIDTH)[None, :]
    inside = row < tokens
    flat = row * heads + head
    at = item * q_batch + place * q_row + head * q_head + channel
    x, inverse = _unit(tl.load(q + at, mask=inside, other=0.0), eps)
    tl.store(q_out + flat * WIDTH + channel, x, mask=inside)
    tl.store(q_inverse + flat, inverse, mask=inside)
    at = item * k_batch + place * k_row + head * k_head + channel
    x, inverse = _unit(tl.load(k + at, mask=inside, other=0.0), eps)
    tl.store(k_out + flat * WIDTH + channel, x, mask=inside)
    tl.store(k_inverse + flat, inverse, mask=inside)


@triton.jit
def _kda_values_backward(
    qk, d_out, d_new, starts, places, length, heads,
    WIDTH: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    head, chunk = program % heads, program // heads
    if DOCUMENTS:
        document = tl.load(places + 2 * chunk)
        begin = tl.load(starts + document) + 64 * tl.load(places + 2 * chunk + 1)
        left = tl.load(starts + document + 1) - begin
    else:
        chunks = (length + 63) // 64
        begin = chunk // chunks * length + 64 * (chunk % chunks)
        left = length - 64 * (chunk % chunks)
    place = tl.arange(0, 64)
    flat = ((begin + place) * heads + head)[:, None]
    inside = (place < left)[:, None]
    row = place[None, :]
    products = tl.load(qk + flat * 64 + row, mask=inside & (row <= place[:, None]), other=0.0)
    at = flat * WIDTH + tl.arange(0, WIDTH)[None, :]
    grad = tl.load(d_out + at, mask=inside, other=0.0)
    tl.store(d_new + at, tl.dot(tl.trans(products), grad), mask=inside)


def unit_rows(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries and keys of length 1 (`gate.normalise`). No gradient.

    Args:
        q, k: [B, T, H, K], K a power of two.

    Returns:
        Both, contiguous, in their own dtypes; one over their lengths before, float32 [B, T, H].
    """
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    batch, length, heads, width = q.shape
    made = [torch.empty(q.shape, dtype=x.dtype, device=q.device) for x in (q, k)]
    inverses = [torch.empty(q.shape[:3], dtype=torch.float32, device=q.device) for _ in made]
    settings = launch_settings("kda_unit_rows", width)
    if q.numel():
        _kda_unit_rows[(triton.cdiv(batch * length, settings["ROWS"]) * heads,)](
            *(q, k, *made, *inverses, batch * length, length, heads),
            *(*q.stride()[:3], *k.stride()[:3], NORM_EPS),
            WIDTH=width,
            **settings,
        )
    return made[0], made[1], inverses[0], inverses[1]


def values_backward(
    qk: Tensor, d_out: Tensor, *, cu_seqlens: Tensor | None, chunk_indices: Tensor | None
) -> Tensor:
    """Gradient of a chunk's new values through its own outputs [B, T, H, V].

    Args:
        qk: scaled products of a chunk's queries and keys, [B, T, H, 64]; not read above the
            diagonal.
        d_out: gradient of the outputs [B, T, H, V], in the dtype of `qk`; V a power of two.
        cu_seqlens: offsets of documents [N + 1]; None: rows of a batch.
        chunk_indices: document, and chunk within it, of each chunk [X, 2]; None as `cu_seqlens`.
    """
    qk, d_out = qk.contiguous(), d_out.contiguous()
    batch, length, heads, width = d_out.shape
    made = torch.empty_like(d_out)
    count = batch * triton.cdiv(length, CHUNK) if chunk_indices is None else len(chunk_indices)
    if count:
        _kda_values_backward[(count * heads,)](
            *(qk, d_out, made, *(qk if x is None else x for x in (cu_seqlens, chunk_indices))),
            *(length, heads),
            WIDTH=width,
            DOCUMENTS=chunk_indices is not None,
            **launch_settings("kda_values_backward", width),
        )
    return made
