"""Kimi Delta Attention (KDA): linear attention with a decay for every channel and a delta rule.

``kda`` takes raw projections; ``chunk_kda`` (dense) and ``recurrent_kda`` (reference) take a
log-decay. The formula, shapes and range analysis stand in ``docs/kda.md``.
"""

# ruff: noqa: N803  (A_log is the name of the parameter in every checkpoint)
from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.config.schema import Gate, KdaBackend
from megatron_ext.ops.kda import cudnn, fla, own
from megatron_ext.ops.kda.choice import choose, require_keeping, resolve_backend
from megatron_ext.ops.kda.context import Core, any_context_kda, chunk_context_kda
from megatron_ext.ops.kda.conv import short_conv_dense, short_conv_reference
from megatron_ext.ops.kda.dense import chunk_kda
from megatron_ext.ops.kda.gate import log_decay, normalise
from megatron_ext.ops.kda.reference import recurrent_kda
from megatron_ext.ops.kda.tiles import max_inverse_decay

__all__ = [
    "chunk_kda",
    "context_kda",
    "kda",
    "log_decay",
    "max_inverse_decay",
    "normalise",
    "recurrent_kda",
    "require_keeping",
    "resolve_backend",
    "short_conv",
]


def kda(
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
    backend: KdaBackend = KdaBackend.auto,
    require: bool = False,
    recompute: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """KDA of raw projections: norm of q and k, scale, gate and write strength are inside.

    Args:
        q: queries [B, T, H, K], after the convolution.
        k: keys [B, T, H, K], after the convolution.
        v: values [B, T, H, V], after the convolution.
        z: gate input [B, T, H, K].
        beta_logits: write strength before its sigmoid [B, T, H].
        A_log: logarithm of the gate's slope [H]; None for ``bounded_plain``.
        dt_bias: gate offset [H, K].
        gate: form of the gate.
        lower_bound: smallest log-decay a token, in nats; K3 uses -5. Not used by ``softplus``.
        cu_seqlens: document offsets [N + 1], int32 or int64; then B must be 1.
        initial_state: [N or B, H, K, V] float32; zero when None.
        output_final_state: also return the state after each document.
        backend: which implementation.
        require: make a fallback of the backend an error.
        recompute: the backward pass computes decay, states and factors again instead of keeping
            them; only fla and triton have the choice.

    Returns:
        Output [B, T, H, V] in the dtype of ``v``; final state [N or B, H, K, V] in float32 (float64
        for float64 input), or None.

    Raises:
        ConfigError: ``require``, cudnn or triton, and the backend asked for cannot run here; not
            ``recompute``, and the backend has no such choice.
        ValueError: shapes, offsets, dtype or bound do not fit.
    """
    _check_shapes(q, k, v, z, beta_logits, A_log, dt_bias)
    chosen = choose(
        backend, q, k, v, gate=gate, lower_bound=lower_bound, require=require, recompute=recompute
    )
    fused: dict[KdaBackend, Core] = {
        KdaBackend.fla: partial(fla.fla_kda, recompute=recompute),
        KdaBackend.cudnn: cudnn.cudnn_kda,
        KdaBackend.triton: partial(own.own_kda, recompute=recompute),
    }
    if chosen in fused:
        return fused[chosen](
            q,
            k,
            v,
            z,
            beta_logits,
            A_log,
            dt_bias,
            gate=gate,
            lower_bound=lower_bound,
            cu_seqlens=cu_seqlens,
            initial_state=initial_state,
            output_final_state=output_final_state,
        )
    query, key, g, beta = _gated(
        q, k, z, beta_logits, A_log, dt_bias, gate=gate, lower_bound=lower_bound
    )
    if chosen is KdaBackend.reference:
        return recurrent_kda(
            query,
            key,
            v,
            g,
            beta,
            cu_seqlens=cu_seqlens,
            initial_state=initial_state,
            output_final_state=output_final_state,
        )
    return chunk_kda(
        query,
        key,
        v,
        g,
        beta,
        lower_bound=None if gate is Gate.softplus else lower_bound,
        cu_seqlens=cu_seqlens,
        initial_state=initial_state,
        output_final_state=output_final_state,
        check=False,  # bounded by construction
    )


def context_kda(
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
    group: dist.ProcessGroup,
    continued: bool,
    cu_seqlens: Tensor | None = None,
    backend: KdaBackend = KdaBackend.auto,
    require: bool = False,
    recompute: bool = True,
) -> tuple[Tensor, Tensor]:
    """``kda`` of a sequence whose consecutive parts lie on the ranks of a group.

    Collective, and so is its backward pass: states travel in one all-gather each (``exchange``).
    Every rank gives as many tokens. The gradients of ``A_log`` and ``dt_bias`` are this rank's
    share: sum them over the group.

    Args:
        q, k, v, z, beta_logits, A_log, dt_bias: of this rank's tokens, as for ``kda``.
        gate: form of the gate.
        lower_bound: as for ``kda``.
        group: ranks in the order of the sequence.
        continued: the first document on this rank began on an earlier one (without documents:
            this is not the first rank).
        cu_seqlens: bounds of documents within this rank's tokens, none of them empty; then B = 1.
        backend: which implementation of a rank's own part.
        require: make a fallback of the backend an error.
        recompute: as for ``kda``; what is kept instead is kept within the backward pass, since the
            backend is run again there.

    Returns:
        Output of this rank's tokens [B, T, H, V] in the dtype of ``v``; the state after each
        document of this rank [N or B, H, K, V], float32 or float64, for statistics: it has no
        gradient.

    Raises:
        ConfigError, ValueError: as ``kda``.
    """
    _check_shapes(q, k, v, z, beta_logits, A_log, dt_bias)
    chosen = choose(
        backend, q, k, v, gate=gate, lower_bound=lower_bound, require=require, recompute=recompute
    )
    if chosen is KdaBackend.dense:
        query, key, g, beta = _gated(
            q, k, z, beta_logits, A_log, dt_bias, gate=gate, lower_bound=lower_bound
        )
        return chunk_context_kda(
            query,
            key,
            v,
            g,
            beta,
            lower_bound=None if gate is Gate.softplus else lower_bound,
            cu_seqlens=cu_seqlens,
            continued=continued,
            group=group,
        )

    def core(*inputs: Tensor) -> tuple[Tensor, Tensor | None]:
        *raw, initial = inputs
        return kda(
            *raw,
            gate=gate,
            lower_bound=lower_bound,
            cu_seqlens=cu_seqlens,
            initial_state=initial,
            output_final_state=True,
            backend=chosen,
            recompute=recompute,
        )

    return any_context_kda(
        (q, k, v, z, beta_logits, A_log, dt_bias),
        core=core,
        documents=q.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1,
        continued=continued,
        group=group,
    )


def short_conv(
    x: Tensor,
    weight: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    backend: KdaBackend = KdaBackend.auto,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Causal convolution with one filter a channel, then SiLU; restarts at every document.

    Args:
        x: inputs [B, T, C].
        weight: filters [C, W]; the last tap meets the token itself.
        cu_seqlens: document offsets [N + 1], int32 or int64; then B must be 1.
        backend: which implementation; ``auto`` is fla where it can run, else dense, and so are
            cudnn and triton, which have none.
        initial_state: the W - 1 inputs before each document [N or B, C, W - 1], oldest first.
        output_final_state: also return the last W - 1 inputs of each document.

    Returns:
        y [B, T, C] in the dtype of ``x``; final state [N or B, C, W - 1], or None.

    Raises:
        ValueError: ``cu_seqlens`` or the dtype does not fit.
    """
    if backend is KdaBackend.reference:
        run = short_conv_reference
    elif backend is KdaBackend.dense or not fla.available(x.device):
        run = short_conv_dense
    else:
        run = fla.fla_short_conv
    return run(
        x,
        weight,
        cu_seqlens=cu_seqlens,
        initial_state=initial_state,
        output_final_state=output_final_state,
    )


def _gated(
    q: Tensor,
    k: Tensor,
    z: Tensor,
    beta_logits: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor,
    *,
    gate: Gate,
    lower_bound: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normalised and scaled queries, normalised keys, log-decay, write strength."""
    g = log_decay(z, A_log, dt_bias, gate=gate, lower_bound=lower_bound)
    beta = torch.sigmoid(beta_logits.to(g.dtype))
    return normalise(q, scale=q.shape[-1] ** -0.5), normalise(k), g, beta


def _check_shapes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    beta_logits: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor,
) -> None:
    wanted = {
        "k": (k, tuple(q.shape)),
        "z": (z, tuple(q.shape)),
        "v": (v, (*q.shape[:3], v.shape[-1])),
        "beta_logits": (beta_logits, tuple(q.shape[:3])),
        "dt_bias": (dt_bias, tuple(q.shape[2:])),
    }
    if A_log is not None:
        wanted["A_log"] = (A_log, (q.shape[2],))
    wrong = [
        f"{name}: given {tuple(x.shape)}, allowed {shape}"
        for name, (x, shape) in wanted.items()
        if tuple(x.shape) != shape
    ]
    if wrong:
        raise ValueError(f"with q {tuple(q.shape)}: " + "; ".join(wrong))
