"""Kimi Delta Attention, token by token: the formula, slow, in any floating dtype.

    S <- Diag(exp(g_t)) S
    S <- S + beta_t k_t (v_t - k_t^T S)^T
    o_t = S^T q_t

Shapes: B batch, T tokens, H heads, K width of a key head, V width of a value head, N documents.
Source: Kimi Linear, equation 1. Every other form of KDA in this package is compared with this one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ext.ops.kda.documents import document_lengths
from megatron_ext.ops.kda.gate import compute_dtype


def recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Runs the recurrence; queries and keys are used as given (no norm, no scale).

    Args:
        q: queries [B, T, H, K].
        k: keys [B, T, H, K].
        v: values [B, T, H, V].
        g: log-decay [B, T, H, K], in nats, not positive.
        beta: write strength [B, T, H], in [0, 1].
        cu_seqlens: document offsets [N + 1], int32 or int64; then B must be 1.
        initial_state: [N or B, H, K, V]; zero when None.
        output_final_state: also return the state after each document.

    Returns:
        Output [B, T, H, V] in the dtype of ``v``; final state [N or B, H, K, V] in float32 (float64
        for float64 input), or None.

    Raises:
        ValueError: shapes or ``cu_seqlens`` do not fit.
    """
    batch, tokens, heads, key_dim = q.shape
    dtype = compute_dtype(q)
    lengths = document_lengths(cu_seqlens, batch=batch, tokens=tokens)
    if lengths is None:
        pieces = [(slice(None), 0, tokens)]
    else:
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        pieces = [(slice(0, 1), a, a + n) for a, n in zip(starts, lengths, strict=True)]
    outputs: list[Tensor] = []
    finals: list[Tensor] = []
    for index, (rows, start, stop) in enumerate(pieces):
        if initial_state is None:
            count = batch if lengths is None else 1
            state = q.new_zeros(count, heads, key_dim, v.shape[-1], dtype=dtype)
        else:
            state = initial_state if lengths is None else initial_state[index : index + 1]
            state = state.to(dtype)
        for t in range(start, stop):
            q_t, k_t, v_t, g_t = (x[rows, t].to(dtype) for x in (q, k, v, g))
            beta_t = beta[rows, t].to(dtype)
            state = g_t.exp()[..., None] * state
            error = v_t - torch.einsum("bhk,bhkv->bhv", k_t, state)
            state = state + torch.einsum("bh,bhk,bhv->bhkv", beta_t, k_t, error)
            outputs.append(torch.einsum("bhk,bhkv->bhv", q_t, state))
        finals.append(state)
    out = torch.stack(outputs, 1) if outputs else torch.zeros_like(v, dtype=dtype)
    return out.to(v.dtype), torch.cat(finals) if output_final_state else None
