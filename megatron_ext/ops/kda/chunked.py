"""Forward and backward of the chunked form, on tensors that are already laid out in chunks.

Written out rather than left to autograd for range (see ``tiles``), for memory (a third of what
autograd would keep) and for speed on CPUs: everything but the sweep runs over blocks of chunks that
fit the cache.

Shapes: X chunks, H heads, C tokens a chunk, K width of a key, V of a value, N documents.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_ext.ops.kda.solve import invert_unit_lower
from megatron_ext.ops.kda.sweep import sweep, sweep_backward
from megatron_ext.ops.kda.tiles import TILE, Products, chunk_products, chunk_products_backward

CPU_BLOCK = 1 << 16  # elements of a [x, H, C, K] temporary: a dozen of them fit a core's cache
GPU_BLOCK = 1 << 27  # 512 MiB in float32: bounds the temporaries of long sequences


def _blocks(like: Tensor) -> Iterator[slice]:
    chunks = like.shape[0]
    limit = CPU_BLOCK if like.device.type == "cpu" else GPU_BLOCK
    step = max(1, limit // max(1, like[0].numel()))
    for start in range(0, chunks, step):
        yield slice(start, min(chunks, start + step))


class ChunkedKda(torch.autograd.Function):
    """(q, k, v, g, beta, initial) -> (o, final).

    q, k, g [X, H, C, K], v [X, H, C, V], beta [X, H, C, 1], all contiguous and of one dtype;
    initial and final [N, H, K, V] in rank order; o [X, H, C, V]. ``active`` and ``lower_bound`` as in
    ``sweep`` and ``tiles``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        initial: Tensor,
        active: tuple[int, ...],
        lower_bound: float | None,
    ) -> tuple[Tensor, Tensor]:
        chunks, heads, size, key_dim = q.shape
        square = (chunks, heads, size, size)
        qk, kk, inverse = q.new_empty(square), q.new_empty(square), q.new_empty(square)
        q_in, k_out = torch.empty_like(q), torch.empty_like(q)
        w, u = torch.empty_like(q), torch.empty_like(v)
        decay = q.new_empty(chunks, heads, key_dim)
        for b in _blocks(q):
            parts = chunk_products(q[b], k[b], g[b], tile=TILE, lower_bound=lower_bound)
            inverse[b] = invert_unit_lower(beta[b] * parts.kk, tile=TILE)
            torch.matmul(inverse[b], parts.k_in.mul_(beta[b]), out=w[b])
            torch.matmul(inverse[b], v[b] * beta[b], out=u[b])
            qk[b], kk[b], q_in[b] = parts.qk, parts.kk, parts.q_in
            k_out[b], decay[b] = parts.k_out, parts.decay
        states, new, final = sweep(w, u, k_out, decay, initial, active=active)
        out = torch.empty_like(v)
        for b in _blocks(q):
            torch.matmul(q_in[b], states[b], out=out[b])
            out[b] += qk[b] @ new[b]
        ctx.options = (active, lower_bound)
        ctx.save_for_backward(
            q, k, v, g, beta, qk, kk, inverse, q_in, k_out, decay, w, u, states, new
        )
        return out, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, g, beta, qk, kk, inverse, q_in, k_out, decay, w, u, states, new = ctx.saved_tensors
        active, lower_bound = ctx.options
        d_out = grads[0].contiguous()
        d_states, d_new = torch.empty_like(states), torch.empty_like(new)
        for b in _blocks(q):
            torch.matmul(q_in[b].transpose(-1, -2), d_out[b], out=d_states[b])
            torch.matmul(qk[b].transpose(-1, -2), d_out[b], out=d_new[b])
        after, d_initial = sweep_backward(w, k_out, decay, d_states, d_new, grads[1], active=active)
        d_q, d_k, d_v, d_g = (torch.empty_like(x) for x in (q, k, v, g))
        d_beta = torch.empty_like(beta)
        for b in _blocks(q):
            inverse_t = inverse[b].transpose(-1, -2)
            states_t = states[b].transpose(-1, -2)
            # [w, u] = inverse [r, s] with r = beta k_in and s = beta v, inverse of I + beta kk
            d_r = (inverse_t @ (d_new[b] @ states_t)).neg_()
            d_s = inverse_t @ d_new[b]
            d_lower = d_r @ w[b].transpose(-1, -2)
            d_lower = (d_lower + d_s @ u[b].transpose(-1, -2)).neg_()
            grad = Products(
                qk=d_out[b] @ new[b].transpose(-1, -2),
                kk=d_lower * beta[b],
                q_in=d_out[b] @ states_t,
                k_in=d_r * beta[b],
                k_out=new[b] @ after[b].transpose(-1, -2),
                decay=(states[b] * after[b]).sum(-1),
            )
            d_q[b], d_k[b], d_g[b], k_in = chunk_products_backward(
                q[b], k[b], g[b], grad, tile=TILE, lower_bound=lower_bound
            )
            torch.mul(d_s, beta[b], out=d_v[b])
            # kk is zero on and above the diagonal, so junk of d_lower there does not count
            d_beta[b] = (
                (d_lower * kk[b]).sum(-1, keepdim=True)
                + (d_r * k_in).sum(-1, keepdim=True)
                + (d_s * v[b]).sum(-1, keepdim=True)
            )
        return d_q, d_k, d_v, d_g, d_beta, d_initial, None, None
