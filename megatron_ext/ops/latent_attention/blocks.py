"""Attention of some queries to one block of keys, with the logarithm of its normaliser.

    o = softmax(scale q k^T) v          lse = log sum exp(scale q k^T)

From those two, results over several blocks merge exactly, and the gradients of each block follow
from the merged ones: exp(scale q k^T - lse) with the lse of all blocks is the final probability.
torch's fused kernels take and give that lse; ``tiled`` is plain torch for what they do not cover.

Shapes: b batch, H heads, m queries, n keys, D width of a key, V of a value. Tensors are [b, m, H,
D]; lse is [b, H, m] in float32 (float64 for float64 input). A causal block is square.
"""

from __future__ import annotations

from enum import Enum

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten
TILE = 256  # queries of a tile of the plain form
LARGEST_FLASH_HEAD = 256
EFFICIENT_LSE_MULTIPLE = 32  # the memory-efficient kernel pads its lse to this


class Kernel(Enum):
    """How a block is computed."""

    cpu = "cpu"  # torch's flash attention for CPUs, any floating dtype
    flash = "flash"  # CUDA, 16 bits
    efficient = "efficient"  # CUDA, float32
    tiled = "tiled"  # plain torch


def choose_kernel(q: Tensor) -> Kernel:
    """The kernel for queries like these."""
    if q.device.type == "cpu":
        return Kernel.cpu
    if q.device.type in ("cuda", "meta"):  # a plan is for GPUs
        if q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] <= LARGEST_FLASH_HEAD:
            return Kernel.flash
        if q.dtype is torch.float32:
            return Kernel.efficient
    return Kernel.tiled


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool, kernel: Kernel
) -> tuple[Tensor, Tensor]:
    """o [b, m, H, V] in the dtype of q, lse [b, H, m]. No gradient."""
    value_width = v.shape[-1]
    q, k, v = _prepared(q, k, v, kernel=kernel)
    if kernel is Kernel.tiled:
        o, lse = tiled(q, k, v, scale=scale, causal=causal)
    elif kernel is Kernel.cpu:
        o, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    elif kernel is Kernel.flash:
        o, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
    else:
        o, lse, *_ = aten._scaled_dot_product_efficient_attention(
            q, k, v, None, True, 0.0, causal, scale=scale
        )
    return o.transpose(1, 2)[..., :value_width], lse[..., : q.shape[2]]


def attend_backward(
    d_o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    *,
    scale: float,
    causal: bool,
    kernel: Kernel,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v through this block.

    Args:
        d_o, o, lse: of all blocks merged; o in the dtype of q.
        q, k, v, scale, causal, kernel: as for ``attend``.
    """
    key_width, value_width = k.shape[-1], v.shape[-1]
    q, k, v, o, d_o = _prepared(q, k, v, o, d_o, kernel=kernel)
    lse = lse.contiguous()
    if kernel is Kernel.tiled:
        d_q, d_k, d_v = tiled_backward(d_o, q, k, v, o, lse, scale=scale, causal=causal)
    elif kernel is Kernel.cpu:
        d_q, d_k, d_v = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            d_o, q, k, v, o, lse, 0.0, causal, scale=scale
        )
    elif kernel is Kernel.flash:
        # No dropout, so the two random states are not read.
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)
        d_q, d_k, d_v = aten._scaled_dot_product_flash_attention_backward(
            d_o, q, k, v, o, lse, None, None, q.shape[2], k.shape[2], 0.0, causal,
            state, state[0], scale=scale,
        )  # fmt: skip
    else:
        lse = F.pad(lse, (0, -lse.shape[-1] % EFFICIENT_LSE_MULTIPLE))
        state = torch.zeros((), dtype=torch.int64, device=q.device)
        d_q, d_k, d_v, _ = aten._scaled_dot_product_efficient_attention_backward(
            d_o, q, k, v, None, o, lse, state, state, 0.0, [True, True, True, False], causal,
            scale=scale,
        )  # fmt: skip
    d_q, d_k, d_v = (x.transpose(1, 2) for x in (d_q, d_k, d_v))
    return d_q[..., :key_width], d_k[..., :key_width], d_v[..., :value_width]


def _prepared(q: Tensor, k: Tensor, *values: Tensor, kernel: Kernel) -> list[Tensor]:
    """[b, H, m, width]. Fused kernels want one width for keys and values, on GPUs a multiple of 8;
    channels of zero change nothing."""
    tensors = [q, k, *values]
    if kernel is not Kernel.tiled:
        width = max(q.shape[-1], values[0].shape[-1])
        if kernel is not Kernel.cpu:
            width = -(-width // 8) * 8
        tensors = [
            x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in tensors
        ]
    return [x.transpose(1, 2) for x in tensors]


def tiled(q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """``attend`` in plain torch, some queries at a time; all tensors [b, H, m or n, width]."""
    wide = torch.promote_types(q.dtype, torch.float32)
    outputs, sums = [], []
    for start in range(0, q.shape[2], TILE):
        scores = _scores(q, k, start, scale=scale, causal=causal)
        sums.append(scores.logsumexp(-1))
        outputs.append((scores.softmax(-1) @ v[:, :, : scores.shape[-1]].to(wide)).to(q.dtype))
    return torch.cat(outputs, 2), torch.cat(sums, 2)


def tiled_backward(
    d_o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    *,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """``attend_backward`` in plain torch; all tensors [b, H, m or n, width]."""
    wide = torch.promote_types(q.dtype, torch.float32)
    d_q = torch.empty_like(q, dtype=wide)
    d_k, d_v = (torch.zeros_like(x, dtype=wide) for x in (k, v))
    for start in range(0, q.shape[2], TILE):
        part = slice(start, start + TILE)
        scores = _scores(q, k, start, scale=scale, causal=causal)
        weights = (scores - lse[:, :, part, None]).exp()
        seen = slice(0, weights.shape[-1])
        grad, output = d_o[:, :, part].to(wide), o[:, :, part].to(wide)
        d_v[:, :, seen] += weights.mT @ grad
        d_weights = grad @ v[:, :, seen].to(wide).mT
        d_scores = weights * (d_weights - (grad * output).sum(-1, keepdim=True)) * scale
        d_q[:, :, part] = d_scores @ k[:, :, seen].to(wide)
        d_k[:, :, seen] += d_scores.mT @ q[:, :, part].to(wide)
    return d_q.to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype)


def _scores(q: Tensor, k: Tensor, start: int, *, scale: float, causal: bool) -> Tensor:
    """Scores of a tile of queries from ``start`` on, masked above the diagonal if causal."""
    wide = torch.promote_types(q.dtype, torch.float32)
    rows = q[:, :, start : start + TILE].to(wide)
    stop = start + rows.shape[2] if causal else k.shape[2]
    scores = rows @ k[:, :, :stop].to(wide).mT * scale
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1 + start)
        scores.masked_fill_(later, -torch.inf)
    return scores
