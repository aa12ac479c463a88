"""The short convolution between the projection of KDA and its heads, with the change of layout."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from megatron_ext.config.schema import KdaBackend, KernelBackend, KernelOptions
from megatron_ext.ops.backend import rejection, resolver
from megatron_ext.ops.kda import short_conv

Heads = tuple[Tensor, Tensor, Tensor]


def qkv_conv(
    qkv: Tensor,
    weight: Tensor,
    *,
    heads: int,
    halo: int = 0,
    cu_seqlens: Tensor | None = None,
    backend: KdaBackend = KdaBackend.auto,
    kernels: KernelOptions | None = None,
) -> Heads:
    """Queries, keys and values: `short_conv` of the projection, cut into heads.

    Args:
        qkv: [halo + s, b, 3 * H * K], any floating dtype.
        weight: [3, H * K, W], float32 in every model; the last tap meets the token itself.
        heads: H.
        halo: tokens in front that are only looked back at: they give no result.
        cu_seqlens: offsets of documents in the halo and the tokens [N + 1]; then b must be 1.
        backend: of KDA. `reference` and `dense` are taken at their word; else `kernels` decides.
        kernels: our Triton kernel, or what `backend` says; None takes the defaults.

    Returns:
        q, k, v, each [b, s, H, K], contiguous.

    Raises:
        ValueError: ``cu_seqlens`` does not fit.
        ConfigError: ``kernels.require``, and the backend asked for cannot run here.
    """
    options = kernels or KernelOptions()
    taps = weight.shape[-1]
    chosen = KernelBackend.dense
    if backend not in (KdaBackend.reference, KdaBackend.dense):
        chosen = resolve_backend(
            options.backend, qkv.device, qkv.dtype, taps, require=options.require
        )
    if chosen is KernelBackend.triton:
        from megatron_ext.ops.qkv_conv.triton import qkv_conv_triton

        return qkv_conv_triton(qkv, weight, heads=heads, halo=halo, cu_seqlens=cu_seqlens)
    return by_short_conv(
        qkv, weight, heads=heads, halo=halo, cu_seqlens=cu_seqlens, backend=backend
    )


def by_short_conv(
    qkv: Tensor,
    weight: Tensor,
    *,
    heads: int,
    halo: int = 0,
    cu_seqlens: Tensor | None = None,
    backend: KdaBackend,
) -> Heads:
    """`qkv_conv` by `short_conv` and copies."""
    mixed, _ = short_conv(
        qkv.transpose(0, 1), weight.flatten(0, 1), cu_seqlens=cu_seqlens, backend=backend
    )
    batch, tokens, channels = mixed.shape
    per_head = mixed.reshape(batch, tokens, 3, heads, channels // (3 * heads))
    q, k, v = per_head[:, halo:].unbind(2)
    return q.contiguous(), k.contiguous(), v.contiguous()


@cache
def _rejection(device: torch.device, dtype: torch.dtype, taps: int) -> str | None:
    from megatron_ext.ops.qkv_conv.triton import qkv_conv_triton

    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(40, 2, 3 * 2 * 24, generator=generator)
    weight = torch.randn(3, 2 * 24, taps, generator=generator)
    return rejection(
        "qkv_conv",
        fast=lambda x, w: torch.stack(qkv_conv_triton(x, w, heads=2, halo=taps - 1)),
        slow=lambda x, w: torch.stack(
            by_short_conv(x, w, heads=2, halo=taps - 1, backend=KdaBackend.dense)
        ),
        inputs=[qkv.to(device, dtype), weight.to(device)],
    )


resolve_backend = resolver("qkv_conv", _rejection)
