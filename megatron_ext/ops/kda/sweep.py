"""The only sequential part of the chunked form: the state, carried from chunk to chunk.

    new = u - w S          what this chunk writes, given the state at its start
    S <- Diag(decay) S + k_out^T new

Chunks come step-major (see ``documents.ChunkLayout``). The loops hold two small products a step;
every gradient that is not part of the recurrence is one product over all chunks, elsewhere.

Shapes: X chunks, H heads, C tokens a chunk, K width of a key, V of a value, N documents.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def sweep(
    w: Tensor, u: Tensor, k_out: Tensor, decay: Tensor, initial: Tensor, *, active: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs the states through the chunks.

    Args:
        w: [X, H, C, K].
        u: [X, H, C, V].
        k_out: [X, H, C, K].
        decay: [X, H, K].
        initial: [N, H, K, V], in rank order.
        active: documents that have a chunk at each step.

    Returns:
        State at the start of each chunk [X, H, K, V]; what each chunk writes, ``new`` [X, H, C, V];
        state after each document [N, H, K, V].
    """
    states = u.new_empty(u.shape[0], *initial.shape[1:])
    new = torch.empty_like(u, memory_format=torch.contiguous_format)
    final = initial.clone()
    k_t, decay = k_out.transpose(-1, -2), decay.unsqueeze(-1)
    start = 0
    for count in active:
        block = slice(start, start + count)
        state = states[block]
        state.copy_(final[:count])
        torch.sub(u[block], w[block] @ state, out=new[block])
        torch.addcmul(k_t[block] @ new[block], decay[block], state, out=final[:count])
        start += count
    return states, new, final


def sweep_backward(
    w: Tensor,
    k_out: Tensor,
    decay: Tensor,
    d_states: Tensor,
    d_new: Tensor,
    d_final: Tensor,
    *,
    active: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Gradients that travel along the recurrence.

    Args:
        w: as for ``sweep``, as ``k_out`` and ``decay``.
        k_out: [X, H, C, K].
        decay: [X, H, K].
        d_states: gradient of the states from outside the recurrence [X, H, K, V].
        d_new: gradient of ``new`` from outside; overwritten with the whole gradient.
        d_final: [N, H, K, V].
        active: as for ``sweep``.

    Returns:
        Gradient of the state after each chunk [X, H, K, V]; gradient of the initial state.
    """
    after = torch.empty_like(d_states)
    grad = d_final.clone()
    w_t, decay = w.transpose(-1, -2), decay.unsqueeze(-1)
    stop = d_states.shape[0]
    for count in reversed(active):
        block = slice(stop - count, stop)
        after[block] = grad[:count]
        d_new[block] += k_out[block] @ after[block]
        step = torch.addcmul(d_states[block], decay[block], after[block])
        torch.sub(step, w_t[block] @ d_new[block], out=grad[:count])
        stop -= count
    return after, grad


def sweep_final(
    w: Tensor,
    u: Tensor | None,
    k_out: Tensor,
    decay: Tensor,
    initial: Tensor,
    *,
    active: Sequence[int],
) -> Tensor:
    """The last states of ``sweep`` alone, without keeping one for every chunk.

    Args:
        w: as for ``sweep``, as ``k_out``, ``decay``, ``active``.
        u: [X, H, C, V]; None: values of zero, so that states are only carried. From the identity
            (V = K) that gives the transition, whose product with a first state is the last one's
            part that depends on it.
        k_out: [X, H, C, K].
        decay: [X, H, K].
        initial: [N, H, K, V].
        active: documents that have a chunk at each step.
    """
    final = initial.clone()
    k_t, decay = k_out.transpose(-1, -2), decay.unsqueeze(-1)
    start = 0
    for count in active:
        block = slice(start, start + count)
        state = final[:count]
        new = w[block] @ state
        new = new.neg_() if u is None else torch.sub(u[block], new)
        final[:count] = torch.addcmul(k_t[block] @ new, decay[block], state)
        start += count
    return final


def sweep_backward_initial(
    w: Tensor,
    k_out: Tensor,
    decay: Tensor,
    d_states: Tensor,
    d_new: Tensor,
    *,
    active: Sequence[int],
    documents: int,
) -> Tensor:
    """The gradient of the initial states of ``sweep_backward`` alone, for final ones of zero.

    Arguments as there, none of which is overwritten; ``documents`` is N.

    Returns:
        [N, H, K, V].
    """
    grad = d_states.new_zeros(documents, *d_states.shape[1:])
    w_t, decay = w.transpose(-1, -2), decay.unsqueeze(-1)
    stop = d_states.shape[0]
    for count in reversed(active):
        block = slice(stop - count, stop)
        after = grad[:count]
        new = d_new[block] + k_out[block] @ after
        step = torch.addcmul(d_states[block], decay[block], after)
        torch.sub(step, w_t[block] @ new, out=grad[:count])
        stop -= count
    return grad
