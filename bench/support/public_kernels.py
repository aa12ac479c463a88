"""The rival's kernels: fla's, torch's, and what torch.compile makes of plain functions.

Shapes: b batch, s tokens, H heads, K their width, D model width, N rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.config.schema import Gate, KdaBackend
from megatron_ext.ops.attn_res import depth_mix_reference
from megatron_ext.ops.kda import kda, short_conv_reference


@dataclass(frozen=True)
class PublicKernels:
    """What the layers are made of beside torch.

    Attributes:
        name: for tables.
        conv: x [b, s, C], weight [C, taps] to SiLU of the causal convolution.
        kda: q, k, v, z [b, s, H, K], beta [b, s, H], A_log [H], dt_bias [H K] and the bound to
            [b, s, H, K].
        norm_gate: o, gate [b, s, H, K], weight [K], eps to RMSNorm(o) * sigmoid(gate).
        mix: sources [b, s, D], query, key weight, norm weight [D], eps to the normed mix.
        grouped: x [N, A], weight [E, B, A], ends int32 [E] to [N, B].
        compiled: makes the fast form of a plain function.
    """

    name: str
    conv: Callable[[Tensor, Tensor], Tensor]
    kda: Callable[..., Tensor]
    norm_gate: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    mix: Callable[[Sequence[Tensor], Tensor, Tensor, Tensor, float], Tensor]
    grouped: Callable[[Tensor, Tensor, Tensor], Tensor]
    compiled: Callable[[Callable[..., Any]], Callable[..., Any]]


def from_fla() -> PublicKernels:
    """On a GPU: kernels of fla, torch's grouped_mm, torch.compile. Needs the package fla-core."""
    from fla.modules.convolution import causal_conv1d
    from fla.modules.fused_norm_gate import rms_norm_gated
    from fla.ops.attnres import fused_attnres
    from fla.ops.kda import chunk_kda

    def conv(x: Tensor, weight: Tensor) -> Tensor:
        y, _ = causal_conv1d(x, weight=weight, activation="silu")
        return y

    def linear_attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        z: Tensor,
        beta: Tensor,
        log_rate: Tensor,
        bias: Tensor,
        bound: float,
    ) -> Tensor:
        o, _ = chunk_kda(
            q=q,
            k=k,
            v=v,
            g=z,
            beta=beta.float(),
            A_log=log_rate,
            dt_bias=bias,
            scale=q.shape[-1] ** -0.5,
            initial_state=None,
            output_final_state=False,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            safe_gate=True,
            lower_bound=bound,
        )
        return o

    def norm_gate(o: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm_gated(o, gate, weight, None, activation="sigmoid", eps=eps)

    def mix(
        sources: Sequence[Tensor], query: Tensor, key: Tensor, norm: Tensor, eps: float
    ) -> Tensor:
        return fused_attnres(query, list(sources), key, output_rms_weight=norm, rms_eps=eps)

    def grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        return F.grouped_mm(x, weight.transpose(-2, -1), offs=ends)

    # One compiled form for each shape: the shapes of a benchmark do not change.
    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function, dynamic=False)

    return PublicKernels(
        "fla, torch.compile", conv, linear_attention, norm_gate, mix, grouped, compiled
    )


def stand_ins() -> PublicKernels:
    """Formulas in their place, on any device: only to test what is around the kernels."""

    def conv(x: Tensor, weight: Tensor) -> Tensor:
        return short_conv_reference(x, weight)[0]

    def linear_attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        z: Tensor,
        beta: Tensor,
        log_rate: Tensor,
        bias: Tensor,
        bound: float,
    ) -> Tensor:
        o, _ = kda(
            *(q, k, v, z, beta, log_rate, bias.view(q.shape[-2:])),
            gate=Gate.bounded,
            lower_bound=bound,
            backend=KdaBackend.dense,
        )
        return o

    def norm_gate(o: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(o, weight.shape, weight, eps) * torch.sigmoid(gate)

    def mix(
        sources: Sequence[Tensor], query: Tensor, key: Tensor, norm: Tensor, eps: float
    ) -> Tensor:
        return depth_mix_reference(sources, query, key, eps=eps, norm_weight=norm)

    def grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        parts = x.tensor_split(ends[:-1].cpu().long())
        return torch.cat([part @ own.T for part, own in zip(parts, weight, strict=True)])

    return PublicKernels(
        "STAND-INS FOR FLA", conv, linear_attention, norm_gate, mix, grouped, lambda f: f
    )
