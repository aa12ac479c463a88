"""Kimi Delta Attention in chunks: plain torch, any device, differentiable, documents.

With Gamma the decay since the start of a chunk (Kimi Linear, equations 2 to 9):

    L = StrictTril(Diag(beta) (Gamma*K) (K/Gamma)^T)      A = Tril((Gamma*Q) (K/Gamma)^T)
    [W, U] = (I + L)^-1 Diag(beta) [Gamma*K, V]
    O = (Gamma*Q) S + A (U - W S)
    S <- Diag(Gamma_C) S + ((Gamma_C/Gamma)*K)^T (U - W S)

Only the last line is sequential, over chunks and within a document; all else is batched over every
chunk of every document. Internal precision is max(float32, dtype of the input).

Shapes: B batch, T tokens, H heads, K width of a key head, V width of a value head, N documents,
X chunks of C tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ext.ops.kda.chunked import ChunkedKda
from megatron_ext.ops.kda.documents import chunk_layout, document_lengths, from_chunks, to_chunks
from megatron_ext.ops.kda.gate import compute_dtype
from megatron_ext.ops.kda.tiles import CHUNK, MAX_NATS, TILE


def check_log_decay(g: Tensor, *, lower_bound: float) -> None:
    """Refuses a log-decay outside [lower_bound, 0]; one pass over ``g`` and one number read back.

    Raises:
        ValueError: a value lies outside or is not a number.
    """
    if g.numel() == 0:
        return
    low, high = (float(x) for x in torch.aminmax(g.detach()))
    # Rounding of the gate's own sigmoid may exceed the bound by an ulp, never by more.
    if not (low >= lower_bound * (1 + 1e-6) and high <= 0.0):
        raise ValueError(
            f"g: given a log-decay in [{low:g}, {high:g}], allowed [{lower_bound:g}, 0] on the "
            "dense path, whose tiles overflow outside it; bound the gate, or pass "
            "lower_bound=None for the element-wise path"
        )


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    lower_bound: float | None = -5.0,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    check: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """The recurrence of ``reference.recurrent_kda``, in chunks of 64 tokens and tiles of 16.

    Args:
        q: queries [B, T, H, K], used as given (no norm, no scale).
        k: keys [B, T, H, K], used as given; norms above 1 are allowed but grow the state.
        v: values [B, T, H, V].
        g: log-decay [B, T, H, K], in nats, within [lower_bound, 0].
        beta: write strength [B, T, H], in [0, 1].
        lower_bound: of ``g``, in [-5.4, 0); None: unbounded, with diagonal tiles computed element
            by element (slower).
        cu_seqlens: document offsets [N + 1], int32 or int64; then B must be 1.
        initial_state: [N or B, H, K, V]; zero when None.
        output_final_state: also return the state after each document.
        check: look at ``g`` (one pass, one synchronisation); off where its form bounds it.

    Returns:
        Output [B, T, H, V] in the dtype of ``v``; final state [N or B, H, K, V] in float32 (float64
        for float64 input), or None. First derivatives only.

    Raises:
        ValueError: ``g`` outside its bound, a bound that a tile cannot take, or wrong offsets.
    """
    batch, tokens, heads, key_dim = q.shape
    dtype = compute_dtype(q)
    if lower_bound is not None:
        if not 0 < -lower_bound * TILE <= MAX_NATS:
            raise ValueError(
                f"lower_bound: given {lower_bound:g}, allowed [{-MAX_NATS / TILE:.2f}, 0) on the "
                "dense path; K3 uses -5"
            )
        if check:
            check_log_decay(g, lower_bound=lower_bound)
    lengths = document_lengths(cu_seqlens, batch=batch, tokens=tokens)
    layout = chunk_layout(
        lengths, batch=batch, tokens=tokens, chunk=CHUNK, tile=TILE, device=q.device
    )
    documents = batch if lengths is None else len(lengths)
    if initial_state is None:
        state = torch.zeros(documents, heads, key_dim, v.shape[-1], dtype=dtype, device=q.device)
    else:
        state = initial_state.to(dtype)
        if layout.order is not None:
            state = state.index_select(0, layout.order)
    if tokens == 0:
        final = state if initial_state is None else initial_state.to(dtype)
        return v, final if output_final_state else None
    qc, kc, vc, gc, bc = (
        to_chunks(x.to(dtype), layout=layout) for x in (q, k, v, g, beta.unsqueeze(-1))
    )
    out, final = ChunkedKda.apply(  # type: ignore[no-untyped-call]
        qc, kc, vc, gc, bc, state, layout.active, lower_bound
    )
    out = from_chunks(out, layout=layout, batch=batch, tokens=tokens).to(v.dtype)
    if not output_final_state:
        return out, None
    if layout.order is not None:
        final = torch.empty_like(final).index_copy(0, layout.order, final)
    return out, final
