"""Forward and backward of the chunked form, on tensors that are already laid out in chunks.

Written out rather than left to autograd for range (see ``tiles``), for memory (a third of what
autograd would keep) and for speed on CPUs: everything but the sweep runs over blocks of chunks that
fit the cache.

Shapes: X chunks, H heads, C tokens a chunk, K width of a key, V of a value, N documents.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Prepared:
    """Everything about the chunks that does not depend on the state.

    Attributes:
        parts: decayed products.
        inverse: (I + L)^-1 [X, H, C, C].
        w: what a state adds to the writes of its chunk, negated [X, H, C, K].
        u: what a chunk would write with a state of zero [X, H, C, V].
    """

    parts: Products
    inverse: Tensor
    w: Tensor
    u: Tensor

    def saved(self) -> tuple[Tensor, ...]:
        """What the backward pass needs: all but ``u``."""
        parts = self.parts
        return (self.inverse, self.w, parts.square, parts.since, parts.k_out, parts.decay)


def prepare(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, lower_bound: float | None
) -> Prepared:
    """The products, the inverse, w and u of every chunk; arguments as ``ChunkedKda``."""
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
    return Prepared(parts, inverse, w, u)


def outputs(prepared: Prepared, states: Tensor, new: Tensor) -> Tensor:
    """o [X, H, C, V] from the state at the start of each chunk and what each writes.

    It takes the place of ``prepared.u``, which is not needed any more.
    """
    out = prepared.u
    for b in _blocks(prepared.w):
        here = prepared.parts.block(b)
        torch.matmul(here.since[:, :, 0], states[b], out=out[b])
        out[b] += here.square[:, :, 0] @ new[b]
    return out


def output_gradients(parts: Products, states: Tensor, d_out: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients that reach the states and the writes straight from the outputs."""
    d_states, d_new = torch.empty_like(states), torch.empty_like(d_out)
    for b in _blocks(parts.k_out):
        here = parts.block(b)
        torch.matmul(here.since[:, :, 0].transpose(-1, -2), d_out[b], out=d_states[b])
        torch.matmul(here.square[:, :, 0].transpose(-1, -2), d_out[b], out=d_new[b])
    return d_states, d_new


def input_gradients(
    inputs: tuple[Tensor, ...],
    saved: tuple[Tensor, ...],
    flow: tuple[Tensor, ...],
    d_out: Tensor,
    *,
    lower_bound: float | None,
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, g and beta, once those along the recurrence are known.

    Args:
        inputs: q, k, v, g, beta.
        saved: as ``Prepared.saved``.
        flow: states at the start of the chunks, writes, gradient of the states after the chunks
            (of ``sweep_backward``), whole gradient of the writes.
        d_out: gradient of o.
        lower_bound: as for ``ChunkedKda``.
    """
    q, k, v, g, beta = inputs
    inverse, _, *products = saved
    states, new, after, d_new = flow
    parts = Products(*products)
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
    return d_q, d_k, d_v, d_g, d_beta


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
        prepared = prepare(q, k, v, g, beta, lower_bound=lower_bound)
        parts = prepared.parts
        states, new, final = sweep(
            prepared.w, prepared.u, parts.k_out, parts.decay, initial, active=active
        )
        out = outputs(prepared, states, new)
        ctx.options = (active, lower_bound)
        ctx.save_for_backward(q, k, v, g, beta, states, new, *prepared.saved())
        return out, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs, (states, new), saved = split_saved(ctx.saved_tensors)
        active, lower_bound = ctx.options
        _, w, *products = saved
        parts = Products(*products)
        d_out = grads[0].contiguous()
        d_states, d_new = output_gradients(parts, states, d_out)
        after, d_initial = sweep_backward(
            w, parts.k_out, parts.decay, d_states, d_new, grads[1], active=active
        )
        flow = (states, new, after, d_new)
        d_inputs = input_gradients(inputs, saved, flow, d_out, lower_bound=lower_bound)
        return *d_inputs, d_initial, None, None


def split_saved(
    tensors: tuple[Tensor, ...],
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Inputs, (states, writes), ``Prepared.saved`` - in the order in which they were saved."""
    return tensors[:5], tensors[5:7], tensors[7:]
