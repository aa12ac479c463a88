"""KDA over a sequence whose consecutive parts lie on the ranks of a group.

``context_kda`` is ``kda`` of the whole sequence, each rank giving and getting its part. Two forms
of the core: the dense chunked one, written out, which repeats nothing but the sweep over states;
and one around any other backend, which treats it as a black box and runs it again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_ext.ops.kda.chunked import (
    input_gradients,
    output_gradients,
    outputs,
    prepare,
    split_saved,
)
from megatron_ext.ops.kda.documents import chunk_layout, document_lengths, from_chunks, to_chunks
from megatron_ext.ops.kda.exchange import first_state, last_gradient
from megatron_ext.ops.kda.gate import compute_dtype
from megatron_ext.ops.kda.sweep import (
    sweep,
    sweep_backward,
    sweep_backward_initial,
    sweep_final,
)
from megatron_ext.ops.kda.tiles import CHUNK, TILE, Products

# (q, k, v, z, beta_logits, A_log, dt_bias, initial_state) -> (o, state after each document)
Core = Callable[..., tuple[Tensor, Tensor | None]]


def chunk_context_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    lower_bound: float | None,
    cu_seqlens: Tensor | None,
    continued: bool,
    group: dist.ProcessGroup,
) -> tuple[Tensor, Tensor]:
    """``dense.chunk_kda`` of the whole sequence, for this rank's part. Collective, as its backward.

    Args:
        q, k, v, g, beta: of this rank's tokens, as for ``chunk_kda``; the same shapes on all ranks.
        lower_bound: of ``g``; not checked.
        cu_seqlens: bounds of documents within this rank's tokens, none of them empty; then B = 1.
        continued: the first document began on an earlier rank.
        group: ranks in the order of the sequence.

    Returns:
        Output [B, T, H, V] in the dtype of ``v``; the state after each document of this rank
        [N or B, H, K, V], without a gradient.
    """
    batch, tokens, _, _ = q.shape
    dtype = compute_dtype(q)
    lengths = document_lengths(cu_seqlens, batch=batch, tokens=tokens)
    layout = chunk_layout(
        lengths, batch=batch, tokens=tokens, chunk=CHUNK, tile=TILE, device=q.device
    )
    # Places of the first and the last document among the ranked ones.
    places = [0, 0]
    if lengths is not None and layout.order is not None:
        order = layout.order.tolist()
        places = [order.index(0), order.index(len(lengths) - 1)]
    chunks = (to_chunks(x.to(dtype), layout=layout) for x in (q, k, v, g, beta.unsqueeze(-1)))
    out, final = _ContextKda.apply(  # type: ignore[no-untyped-call]
        *chunks,
        layout.active,
        lower_bound,
        batch if lengths is None else len(lengths),
        slice(0, batch) if lengths is None else slice(places[0], places[0] + 1),
        slice(0, batch) if lengths is None else slice(places[1], places[1] + 1),
        continued,
        group,
    )
    if layout.order is not None:
        final = torch.empty_like(final).index_copy(0, layout.order, final)
    return from_chunks(out, layout=layout, batch=batch, tokens=tokens).to(v.dtype), final


class _ContextKda(torch.autograd.Function):
    """``ChunkedKda`` whose first document's state comes from the ranks before this one."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        active: tuple[int, ...],
        lower_bound: float | None,
        documents: int,
        first: slice,
        last: slice,
        continued: bool,
        group: dist.ProcessGroup,
    ) -> tuple[Tensor, Tensor]:
        prepared = prepare(q, k, v, g, beta, lower_bound=lower_bound)
        parts, w = prepared.parts, prepared.w
        initial = q.new_zeros(documents, q.shape[1], q.shape[3], v.shape[3])
        left = sweep_final(w, prepared.u, parts.k_out, parts.decay, initial, active=active)
        transition = None
        if continued and first == last:
            eye = torch.eye(q.shape[3], dtype=q.dtype, device=q.device)
            identity = eye.expand(documents, q.shape[1], -1, -1)
            transition = sweep_final(w, None, parts.k_out, parts.decay, identity, active=active)
        received = first_state(left[last], transition, group=group)
        if continued:
            initial[first] = received
        states, new, final = sweep(w, prepared.u, parts.k_out, parts.decay, initial, active=active)
        out = outputs(prepared, states, new)
        ctx.mark_non_differentiable(final)
        ctx.options = (active, lower_bound, documents, first, last, continued, group)
        ctx.has_transition = transition is not None
        kept = () if transition is None else (transition,)
        ctx.save_for_backward(q, k, v, g, beta, states, new, *prepared.saved(), *kept)
        return out, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tensors, transition = ctx.saved_tensors, None
        if ctx.has_transition:
            *tensors, transition = tensors
        inputs, (states, new), saved = split_saved(tuple(tensors))
        active, lower_bound, documents, first, last, continued, group = ctx.options
        _, w, *products = saved
        parts = Products(*products)
        d_out = grads[0].contiguous()
        d_states, d_new = output_gradients(parts, states, d_out)
        own = sweep_backward_initial(
            w, parts.k_out, parts.decay, d_states, d_new, active=active, documents=documents
        )
        d_final = torch.zeros_like(own)
        handed_back = own[first] if continued else torch.zeros_like(own[first])
        d_final[last] = last_gradient(handed_back, transition, group=group)
        after, _ = sweep_backward(
            w, parts.k_out, parts.decay, d_states, d_new, d_final, active=active
        )
        flow = (states, new, after, d_new)
        d_inputs = input_gradients(inputs, saved, flow, d_out, lower_bound=lower_bound)
        return *d_inputs, *(None,) * 7


def any_context_kda(
    inputs: tuple[Tensor | None, ...],
    *,
    core: Core,
    documents: int,
    continued: bool,
    group: dist.ProcessGroup,
) -> tuple[Tensor, Tensor]:
    """``context_kda`` around a backend that only knows initial and final states.

    It runs three times forward (its own state and transition, then the output) and is run again
    for the backward pass, which so keeps nothing but the inputs.

    Args:
        inputs: q, k, v, z, beta_logits, A_log (or None), dt_bias, as for ``kda``.
        core: the backend. Its states are [documents, H, K, V].
        documents: on this rank, or rows of the batch without documents.
        continued: the first document began on an earlier rank.
        group: ranks in the order of the sequence.

    Returns:
        As ``chunk_context_kda``.
    """
    out, final = _AnyContextKda.apply(  # type: ignore[no-untyped-call]
        core, documents, continued, group, *inputs
    )
    return out, final


class _AnyContextKda(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        core: Core,
        documents: int,
        continued: bool,
        group: dist.ProcessGroup,
        *inputs: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        q, k, v, *rest = inputs
        assert q is not None
        assert v is not None
        batch, _, heads, key_dim = q.shape
        # With documents the chain runs through the first and the last one; else through every row.
        chained = batch if documents == batch else 1
        shape = (documents, heads, key_dim)
        dtype = compute_dtype(q)
        initial = torch.zeros(*shape, v.shape[-1], dtype=dtype, device=q.device)
        _, left = core(q, k, v, *rest, initial)
        assert left is not None
        transition = None
        if continued and chained == documents:
            eye = torch.eye(key_dim, dtype=dtype, device=q.device).expand(*shape, -1)
            nothing = q.new_zeros(*q.shape[:3], key_dim)
            _, transition = core(q, k, nothing, *rest, eye.contiguous())
        received = first_state(left[documents - chained :].to(dtype), transition, group=group)
        if continued:
            initial[:chained] = received
        out, final = core(q, k, v, *rest, initial)
        assert final is not None
        ctx.mark_non_differentiable(final)
        ctx.core, ctx.continued, ctx.group, ctx.chained = core, continued, group, chained
        ctx.save_for_backward(initial, transition, *inputs)
        return out, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        initial, transition, *inputs = ctx.saved_tensors
        with torch.enable_grad():
            leaves = [None if x is None else x.detach().requires_grad_() for x in inputs]
            initial = initial.detach().requires_grad_()
            out, final = ctx.core(*leaves, initial)
        (own,) = torch.autograd.grad(out, initial, grads[0], retain_graph=True)
        own = own[: ctx.chained]
        if not ctx.continued:
            own = torch.zeros_like(own)
        d_final = torch.zeros_like(final)
        d_final[len(final) - ctx.chained :] = last_gradient(own, transition, group=ctx.group)
        given = [x for x in leaves if x is not None]
        found = iter(torch.autograd.grad((out, final), given, (grads[0], d_final)))
        return None, None, None, None, *(None if x is None else next(found) for x in leaves)
