"""The only sequential part of the chunked form: the state, carried from chunk to chunk.

    new = u - w S          what this chunk writes, given the state at its start
    S <- Diag(decay) S + k_out^T new

Chunks come step-major (see ``documents.ChunkLayout``). The loops hold two small products a step;
every gradient that is not part of the recurrence is one product over all chunks after the loop.

Shapes: X chunks, H heads, C tokens a chunk, K width of a key, V of a value, N documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class StateSweep(torch.autograd.Function):
    """(w, u, k_out, decay, initial) -> (states at chunk starts, new, final states).

    w [X, H, C, K], u [X, H, C, V], k_out [X, H, C, K], decay [X, H, K], initial [N, H, K, V] in rank
    order; states [X, H, K, V], new [X, H, C, V], final [N, H, K, V].
    """

    @staticmethod
    def forward(
        ctx: Any,
        w: Tensor,
        u: Tensor,
        k_out: Tensor,
        decay: Tensor,
        initial: Tensor,
        active: Sequence[int],
    ) -> tuple[Tensor, Tensor, Tensor]:
        states = u.new_empty(u.shape[0], *initial.shape[1:])
        new = torch.empty_like(u)
        final = initial.clone()
        k_t = k_out.transpose(-1, -2)
        start = 0
        for count in active:
            block = slice(start, start + count)
            state = states[block]
            state.copy_(final[:count])
            torch.sub(u[block], w[block] @ state, out=new[block])
            torch.addcmul(
                k_t[block] @ new[block], decay[block].unsqueeze(-1), state, out=final[:count]
            )
            start += count
        ctx.active = tuple(active)
        ctx.save_for_backward(w, k_out, decay, states, new)
        return states, new, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        w, k_out, decay, states, new = ctx.saved_tensors
        d_states, d_new, d_final = grads
        d_new = d_new.clone()
        carried = torch.empty_like(states)  # gradient of the state after each chunk
        grad = d_final.clone()
        w_t = w.transpose(-1, -2)
        stop = states.shape[0]
        for count in reversed(ctx.active):
            block = slice(stop - count, stop)
            after = carried[block]
            after.copy_(grad[:count])
            d_new[block] += k_out[block] @ after
            step = torch.addcmul(d_states[block], decay[block].unsqueeze(-1), after)
            torch.sub(step, w_t[block] @ d_new[block], out=grad[:count])
            stop -= count
        d_w = (d_new @ states.transpose(-1, -2)).neg_()
        d_k = new @ carried.transpose(-1, -2)
        d_decay = (states * carried).sum(-1)
        return d_w, d_new, d_k, d_decay, grad, None
