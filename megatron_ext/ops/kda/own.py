"""KDA with fla's forward pass and our own backward pass within chunks.

fla's backward pass within a chunk is two kernels that hand sums in float32 to each other; of ours
(`own_backward`) the second keeps them on chip. fla's kernels for the forward pass, the sweeps over
states and what the backward pass computes again are called as fla-core 0.6 has them, outside its
public interface: `own_fit` says where all of it runs. fla is imported at the first call, not with
this module.

Shapes: B batch, T tokens, H heads, K = V width of a head, N documents, X chunks of 64 tokens.
"""

# ruff: noqa: N803  (A_log is the name of the parameter in every checkpoint)
from __future__ import annotations

import importlib
import math
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_ext.config.schema import Gate
from megatron_ext.ops import without_memory
from megatron_ext.ops.kda.documents import document_lengths
from megatron_ext.ops.kda.own_fit import FLA, HEAD_DIM
from megatron_ext.ops.kda.own_sweep import segments
from megatron_ext.ops.kda.own_sweep import starts as segment_starts
from megatron_ext.ops.kda.tiles import CHUNK


def own_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    beta_logits: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor,
    *,
    gate: Gate,
    lower_bound: float,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    recompute: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """``kda`` of this package, where ``own_fit`` says that it can run.

    Arguments as ``megatron_ext.ops.kda.kda``.

    Raises:
        ValueError: ``cu_seqlens`` with a batch.
    """
    if cu_seqlens is not None and q.shape[0] != 1:  # raises; offsets are not read back from the GPU
        document_lengths(cu_seqlens, batch=q.shape[0], tokens=q.shape[1])
    state = None if initial_state is None else initial_state.float().contiguous()
    documents = q.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    if q.shape[1] == 0:
        return _nothing(v, state, documents if output_final_state else None)
    raw = (q, k, v, z, beta_logits)
    keep = not recompute and torch.is_grad_enabled()
    slope = None if A_log is None else A_log.float().contiguous()
    bias = dt_bias.float().contiguous()
    if q.device.type == "meta":  # a stand-in
        query, key, value, raw_gate, logits = (x.contiguous() for x in raw)
        filler = dt_bias.new_zeros(q.shape[2]) if slope is None else slope
        return without_memory.kda(
            *(query, key, value, raw_gate, logits, filler, bias, state),
            documents=documents,
            output_final_state=output_final_state,
            keep=without_memory.KeptByKda.ours if keep else None,
        )
    offsets = None if cu_seqlens is None else cu_seqlens.long()
    plain = (x.contiguous() for x in (v, z, beta_logits))  # queries and keys are read as they lie
    out, final = _OwnKda.apply(  # type: ignore[no-untyped-call]  # torch's own lacks types
        q, k, *plain, slope, bias, state, offsets, lower_bound, output_final_state, keep
    )
    return out, final


class _OwnKda(torch.autograd.Function):
    """Keeps normed queries and keys, two products of 64 numbers a token, and what it was given; of
    decay, states and factors, which the backward pass computes again, all that it needs where they
    are to be kept, and then no values."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        z: Tensor,
        beta_logits: Tensor,
        slope: Tensor | None,
        bias: Tensor,
        state: Tensor | None,
        offsets: Tensor | None,
        lower_bound: float,
        output_final_state: bool,
        keep: bool,
    ) -> tuple[Tensor, Tensor | None]:
        from megatron_ext.ops.kda.own_kernels import unit_rows

        query, key, of_query, of_key = unit_rows(q, k)
        # The backward pass divides by it.
        strength = _fla("fused_beta_sigmoid_fwd")(beta_logits).clamp_(min=1e-30)
        chunks = None
        if offsets is not None:
            chunks = _fla("prepare_chunk_indices")(offsets, CHUNK)
        where = {"cu_seqlens": offsets, "chunk_indices": chunks}
        scale = q.shape[-1] ** -0.5
        decay = _decay(z, slope, bias, lower_bound, where)
        w, u, q_since, k_last, qk, inverse = _fla("chunk_kda_fwd_intra")(
            q=query,
            k=key,
            v=v,
            gk=decay,
            beta=strength,
            scale=scale,
            chunk_size=CHUNK,
            safe_gate=True,
            disable_recompute=keep,  # gives q_since too
            **where,
        )
        starts = _starts(k_last, w, u, decay, state, offsets)
        states, new, final = _sweep(
            k_last, w, u, decay, state, starts, where, output_final_state=output_final_state
        )
        out = _fla("chunk_gla_fwd_o_gk")(
            q=query, v=new, g=decay, A=qk, h=states, scale=scale, chunk_size=CHUNK, **where
        )
        ctx.set_materialize_grads(False)
        ctx.lower_bound = lower_bound
        made = (decay, w, q_since, k_last, states, new) if keep else (v, starts)
        ctx.save_for_backward(
            query, of_query, key, of_key, z, beta_logits, slope, bias, state, offsets, chunks,
            strength, qk, inverse, *made,
        )  # fmt: skip
        return out, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        from megatron_ext.ops.kda.own_backward import chunk_backward
        from megatron_ext.ops.kda.own_kernels import values_backward
        from megatron_ext.ops.kda.triton import kda_inputs_backward

        query, of_query, key, of_key, z, beta_logits, slope, bias, *rest = ctx.saved_tensors
        state, offsets, chunks, strength, qk, inverse, *made = rest
        d_final = None if grads[1] is None else grads[1].float().contiguous()
        scale = query.shape[-1] ** -0.5
        where = {"cu_seqlens": offsets, "chunk_indices": chunks}
        if len(made) == 2:
            v, starts = made
            decay = _decay(z, slope, bias, ctx.lower_bound, where)
            w, u, q_since, k_last = _fla("recompute_w_u_fwd")(
                q=query, k=key, v=v, beta=strength, A=inverse, gk=decay, **where
            )
            states, new, _ = _sweep(k_last, w, u, decay, state, starts, where)
            del u
        else:
            decay, w, q_since, k_last, states, new = made
        d_out = torch.zeros_like(new) if grads[0] is None else grads[0].to(new.dtype).contiguous()
        d_states, d_state, d_new = _fla("chunk_gated_delta_rule_bwd_dhu")(
            q=q_since,
            k=k_last,
            w=w,
            gk=decay,
            h0=state,
            dht=d_final,
            do=d_out,
            dv=values_backward(qk, d_out, **where),
            scale=scale,
            chunk_size=CHUNK,
            **where,
        )
        del w, q_since, k_last
        of_q, of_k, d_v, d_g, d_strength = chunk_backward(
            query, key, decay, strength, inverse, states, new, d_out, d_states, d_new,
            scale=scale, **where,
        )  # fmt: skip
        del decay, states, new, d_states, d_new
        d_q, d_k, d_z, d_beta, *of_gate = kda_inputs_backward(
            (query, key, z, beta_logits, slope, bias),
            (of_q, of_k, d_g, d_strength),
            ctx.lower_bound,
            inverses=(of_query, of_key),
        )
        return d_q, d_k, d_v, d_z, d_beta, *of_gate, d_state, None, None, None, None


def _decay(
    z: Tensor, slope: Tensor | None, bias: Tensor, lower_bound: float, where: dict[str, Any]
) -> Tensor:
    """Sum of the log-decay since a chunk's begin, base 2, float32 [B, T, H, K]."""
    found: Tensor = _fla("kda_gate_chunk_cumsum")(
        g=z,
        A_log=slope,
        dt_bias=bias.flatten(),
        scale=1 / math.log(2.0),
        chunk_size=CHUNK,
        lower_bound=lower_bound,
        **where,
    )
    return found


def _starts(
    k: Tensor, w: Tensor, u: Tensor, decay: Tensor, state: Tensor | None, offsets: Tensor | None
) -> Tensor | None:
    """States before the segments of `own_sweep`, where it cuts."""
    batch, tokens, heads, _ = k.shape
    cut = segments(batch=batch, tokens=tokens, heads=heads, device=k.device)
    if cut is None or offsets is not None:
        return None
    return segment_starts(_fla("chunk_gated_delta_rule_fwd_h"), cut, k, w, u, decay, state)


def _sweep(
    k: Tensor,
    w: Tensor,
    u: Tensor,
    decay: Tensor,
    state: Tensor | None,
    starts: Tensor | None,
    where: dict[str, Any],
    *,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """States before each chunk [B, X, H, K, V], new values [B, T, H, V], the last states."""
    if starts is not None:
        batch, tokens, heads, _ = k.shape
        cut = segments(batch=batch, tokens=tokens, heads=heads, device=k.device)
        assert cut is not None
        where = cut.arguments()
    states, new, final = _fla("chunk_gated_delta_rule_fwd_h")(
        k=k,
        w=w,
        u=u,
        gk=decay,
        initial_state=state if starts is None else starts,
        output_final_state=output_final_state,
        chunk_size=CHUNK,
        **where,
    )
    if starts is not None and final is not None:
        final = final[-1:].contiguous()
    return states, new, final


@cache
def _fla(name: str) -> Any:
    return getattr(importlib.import_module(FLA[name][0]), name)


def _nothing(
    v: Tensor, state: Tensor | None, documents: int | None
) -> tuple[Tensor, Tensor | None]:
    """Of no tokens: the state stays."""
    if documents is None:
        return v, None
    if state is not None:
        return v, state
    return v, v.new_zeros(documents, v.shape[2], HEAD_DIM, HEAD_DIM, dtype=torch.float32)
