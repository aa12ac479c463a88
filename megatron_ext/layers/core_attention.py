"""Softmax attention over local heads: torch's, or Transformer Engine's as a local kernel.

Shapes: q, k [b, s, H, D], v [b, s, H, V] with D != V allowed, result [b, s, H, V]. Causal. With
`cu_seqlens` [N+1] the batch is 1 and position i sees only its own document. The softmax is in
float32 or wider (the fused kernels' own rule, and the promotion of torch's plain one).

No dense [s, s] mask is ever made: plain causal attention passes `is_causal`, and documents go
through a kernel for ragged sequences, or one after the other.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import itertools
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_ext.config.schema import AttentionBackend
from megatron_ext.errors import ConfigError


class SdpaAttention(nn.Module):
    """torch's scaled_dot_product_attention; documents through `varlen_attn` on GPUs in 16 bits.

    Args:
        num_heads, k_channels, v_channels: local heads and widths; taken from the tensors here.
        softmax_scale: factor on q k^T.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        num_heads: int,
        k_channels: int,
        v_channels: int,
        softmax_scale: float,
    ) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:
        """Attention as in the head of this file. `max_seqlen`: the longest document, if known."""
        if cu_seqlens is None:
            return self._causal(q, k, v)
        if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and _has_varlen():
            return self._varlen(q, k, v, cu_seqlens, max_seqlen or q.shape[1])
        bounds = cu_seqlens.tolist()
        return torch.cat(
            [
                self._causal(q[:, start:end], k[:, start:end], v[:, start:end])
                for start, end in itertools.pairwise(bounds)
                if end > start
            ],
            dim=1,
        )

    def _causal(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        value_width = v.shape[-1]
        if q.device.type == "cpu":
            # torch's fused kernel for CPUs wants one width; without it there are [s, s] scores.
            width = max(q.shape[-1], value_width)
            q, k, v = (F.pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
        o = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            is_causal=True,
            scale=self.softmax_scale,
        )
        return o.transpose(1, 2)[..., :value_width]

    def _varlen(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        # The kernel wants one width, a multiple of 8, for q, k and v. Zero channels add nothing.
        width = -(-max(q.shape[-1], v.shape[-1]) // 8) * 8
        value_width = v.shape[-1]
        q, k, v = (F.pad(x.squeeze(0), (0, width - x.shape[-1])) for x in (q, k, v))
        bounds = cu_seqlens.to(torch.int32)
        o: Any = varlen_attn(
            q,
            k,
            v,
            bounds,
            bounds,
            longest,
            longest,
            scale=self.softmax_scale,
            window_size=(-1, 0),
        )
        return o[..., :value_width].unsqueeze(0)


def _has_varlen() -> bool:
    """Whether this torch has ragged attention that takes a scale and a causal window."""
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return False
    module = importlib.import_module("torch.nn.attention.varlen")
    return {"scale", "window_size"} <= set(inspect.signature(module.varlen_attn).parameters)


class TransformerEngineAttention(nn.Module):
    """Transformer Engine's DotProductAttention on local heads; it sees no process group.

    Raises:
        ConfigError: Transformer Engine is not installed.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        num_heads: int,
        k_channels: int,
        v_channels: int,
        softmax_scale: float,
    ) -> None:
        super().__init__()
        if importlib.util.find_spec("transformer_engine") is None:
            raise ConfigError(
                "model.mla.backend: transformer_engine given, but it is not installed; "
                "install the gpu extra or use sdpa"
            )
        engine = importlib.import_module("transformer_engine.pytorch")
        # In a tuple, so that it is no submodule: it has no weights, and its extra state would make
        # checkpoints differ between kernels.
        self._kernel = (
            engine.DotProductAttention(
                num_attention_heads=num_heads,
                kv_channels=(k_channels, v_channels),
                attention_dropout=0.0,
                qkv_format="bshd",
                attn_mask_type="causal",
                softmax_scale=softmax_scale,
            ),
        )

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:
        """Attention as in the head of this file."""
        heads = q.shape[-2]
        (kernel,) = self._kernel
        if cu_seqlens is None:
            q, k, v = (x.contiguous() for x in (q, k, v))
            return kernel(q, k, v).unflatten(-1, (heads, -1))
        bounds = cu_seqlens.to(torch.int32)
        longest = max_seqlen or q.shape[1]
        o = kernel(
            *(x.squeeze(0).contiguous() for x in (q, k, v)),
            qkv_format="thd",
            attn_mask_type="padding_causal",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )
        return o.unflatten(-1, (heads, -1)).unsqueeze(0)


def attention_class(backend: AttentionBackend, *, require: bool = False) -> type[nn.Module]:
    """The class for a backend. `auto` is torch's, which every installation has.

    Raises:
        ConfigError: Transformer Engine is asked for, and missing or without a GPU. `auto` is no
            fallback, so `require` changes nothing.
    """
    if backend is not AttentionBackend.transformer_engine:
        return SdpaAttention
    if not torch.cuda.is_available():
        raise ConfigError(
            "model.mla.backend: transformer_engine given, it needs a GPU and none is visible; "
            "use sdpa"
        )
    return TransformerEngineAttention
