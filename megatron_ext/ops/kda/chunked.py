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
from megatron_ext.ops.kda.tiles import (
    TILE,
    Products,
    chunk_products,
    chunk_products_backward,
    empty_products,
)

CPU_BLOCK = 1 << 18  # elements of a [x, H, C, K] temporary, 1 MiB: the fastest of 2^14 to 2^22
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
    initial and final [N, H, K, V] in rank order; o [X, H, C, V]. ``active`` as in ``sweep``,
    ``lower_bound`` as in ``tiles``.
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
        chunks, heads, size, _ = q.shape
        parts = empty_products(k)
        inverse = q.new_empty(chunks, heads, size, size)
        w, u = torch.empty_like(q), torch.empty_like(v)
        for b in _blocks(q):
            here = parts.block(b)
            chunk_products(q[b], k[b], g[b], here, tile=TILE, lower_bound=lower_bound)
            invert_unit_lower(beta[b] * here.square[:, :, 1], inverse[b], tile=TILE)
            torch.matmul(inverse[b], here.since[:, :, 1] * beta[b], out=w[b])
            torch.matmul(inverse[b], v[b] * beta[b], out=u[b])
        states, new, final = sweep(w, u, parts.k_out, parts.decay, initial, active=active)
        out = u  # not needed any more
        for b in _blocks(q):
            here = parts.block(b)
            torch.matmul(here.since[:, :, 0], states[b], out=out[b])
            out[b] += here.square[:, :, 0] @ new[b]
        ctx.options = (active, lower_bound)
        products = (parts.square, parts.since, parts.k_out, parts.decay)
        ctx.save_for_backward(q, k, v, g, beta, inverse, w, states, new, *products)
        return out, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, g, beta, inverse, w, states, new, *products = ctx.saved_tensors
        active, lower_bound = ctx.options
        parts = Products(*products)
        d_out = grads[0].contiguous()
        d_states, d_new = torch.empty_like(states), torch.empty_like(new)
        for b in _blocks(q):
            here = parts.block(b)
            torch.matmul(here.since[:, :, 0].transpose(-1, -2), d_out[b], out=d_states[b])
            torch.matmul(here.square[:, :, 0].transpose(-1, -2), d_out[b], out=d_new[b])
        after, d_initial = sweep_backward(
            w, parts.k_out, parts.decay, d_states, d_new, grads[1], active=active
        )
        d_q, d_k, d_v, d_g = (torch.empty_like(x) for x in (q, k, v, g))
        d_beta = torch.empty_like(beta)
        for b in _blocks(q):
            here = parts.block(b)
            states_t, new_t = states[b].transpose(-1, -2), new[b].transpose(-1, -2)
            # new = (I + beta kk)^-1 beta (v - k_in S). With d = (I + beta kk)^-T d_new:
            # d is the gradient of beta (v - k_in S), and that of beta kk is -d new^T.
            d = inverse[b].transpose(-1, -2) @ d_new[b]
            both = torch.cat((d_out[b], d), 2)
            square = (both @ new_t).view(here.square.shape)
            since = (both @ states_t).view(here.since.shape)
            d_lower, d_right = square[:, :, 1].neg_(), since[:, :, 1].neg_()
            # kk is zero on and above the diagonal, so what d_lower holds there does not count
            d_beta[b] = (d_lower * here.square[:, :, 1]).sum(-1, keepdim=True)
            d_beta[b] += (d_right * here.since[:, :, 1]).sum(-1, keepdim=True)
            d_beta[b] += (d * v[b]).sum(-1, keepdim=True)
            d_lower *= beta[b]
            d_right *= beta[b]
            grad = Products(
                square=square,
                since=since,
                k_out=new[b] @ after[b].transpose(-1, -2),
                decay=(states[b] * after[b]).sum(-1),
            )
            torch.mul(d, beta[b], out=d_v[b])
            chunk_products_backward(
                q[b],
                k[b],
                g[b],
                grad,
                (d_q[b], d_k[b], d_g[b]),
                tile=TILE,
                lower_bound=lower_bound,
            )
        return d_q, d_k, d_v, d_g, d_beta, d_initial, None, None
