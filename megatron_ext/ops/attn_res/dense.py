"""The mix over depth in plain torch, with a backward pass that stores the sources and nothing else.

Written with autograd operators, every sublayer would keep its keys and values in float32, so the
memory of a layer would grow with its depth. Here the sources themselves are kept, which the other
sublayers keep too, and keys, weights and the mixture are computed again.

Shapes: N sources, each [..., D]; scores and weights [N, ...].

    s_j = (w . v_j) / rms(v_j),  w = query * key_weight;   a = softmax(s);   h = sum_j a_j v_j
    y = norm_weight * h / rms(h), if there is a norm
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def depth_mix_dense(
    sources: Sequence[Tensor],
    query: Tensor,
    key_weight: Tensor,
    *,
    eps: float,
    norm_weight: Tensor | None = None,
) -> Tensor:
    """See `ops.attn_res.depth_mix`. First derivatives only."""
    out: Tensor = _DepthMix.apply(  # type: ignore[no-untyped-call]
        query, key_weight, norm_weight, eps, *sources
    )
    return out


def depth_weights(
    sources: Sequence[Tensor], query: Tensor, key_weight: Tensor, *, eps: float
) -> Tensor:
    """The weights a [N, ...], float32 or wider; they add up to 1 over the sources."""
    dtype = _wide_type(sources[0])
    w = _wide_query(query, key_weight, dtype)
    return torch.softmax(torch.stack([_score(v.to(dtype), w, eps)[0] for v in sources]), dim=0)


def _wide_type(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _wide_query(query: Tensor, key_weight: Tensor, dtype: torch.dtype) -> Tensor:
    return query.to(dtype) * key_weight.to(dtype)


def _score(v: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """s [...] and 1/rms [...] of one source [..., D]."""
    inverse = torch.rsqrt(v.square().mean(-1) + eps)
    return (v @ w) * inverse, inverse


def _sum(sources: Sequence[Tensor], weights: Tensor) -> Tensor:
    """sum_j a_j v_j in the type of the weights, one source at a time."""
    mixed = weights[0].unsqueeze(-1) * sources[0]
    for v, a in zip(sources[1:], weights[1:], strict=True):
        mixed.addcmul_(a.unsqueeze(-1), v.to(mixed.dtype))
    return mixed


class _DepthMix(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key_weight: Tensor,
        norm_weight: Tensor | None,
        eps: float,
        *sources: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(query, key_weight, norm_weight, *sources)
        ctx.eps = eps
        mixed = _sum(sources, depth_weights(sources, query, key_weight, eps=eps))
        if norm_weight is not None:
            inverse = torch.rsqrt(mixed.square().mean(-1, keepdim=True) + eps)
            mixed.mul_(inverse).mul_(norm_weight.to(mixed.dtype))
        return mixed.to(sources[0].dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key_weight, norm_weight, *sources = ctx.saved_tensors
        dtype, eps = _wide_type(sources[0]), ctx.eps
        w, width = _wide_query(query, key_weight, dtype), sources[0].shape[-1]
        scores, inverses = zip(*(_score(v.to(dtype), w, eps) for v in sources), strict=True)
        weights = torch.softmax(torch.stack(scores), dim=0)
        grad, grad_norm = grads[0].to(dtype), None
        if norm_weight is not None:
            grad, grad_norm = _norm_backward(grad, _sum(sources, weights), norm_weight, eps)
        # Through the softmax: ds = a (da - sum a da), where da_j = grad . v_j.
        along = torch.stack([(v.to(dtype) * grad).sum(-1) for v in sources])
        slopes = weights * (along - (weights * along).sum(0))
        grad_w = torch.zeros_like(w)
        grad_sources = []
        for v, a, s, inverse, slope in zip(sources, weights, scores, inverses, slopes, strict=True):
            scaled = slope * inverse
            grad_w += scaled.reshape(-1) @ v.to(dtype).reshape(-1, width)
            # The key's norm takes out the part of the gradient that would only rescale v.
            grad_v = a.unsqueeze(-1) * grad
            grad_v.addcmul_(scaled.unsqueeze(-1), w)
            grad_v.addcmul_((scaled * s * inverse / -width).unsqueeze(-1), v.to(dtype))
            grad_sources.append(grad_v.to(v.dtype))
        return (
            (grad_w * key_weight.to(dtype)).to(query.dtype),
            (grad_w * query.to(dtype)).to(key_weight.dtype),
            grad_norm,
            None,
            *grad_sources,
        )


def _norm_backward(
    grad: Tensor, mixed: Tensor, norm_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Gradients of `mixed` and of `norm_weight` from that of norm_weight * mixed / rms(mixed)."""
    inverse = torch.rsqrt(mixed.square().mean(-1, keepdim=True) + eps)
    normed = mixed * inverse
    grad_weight = (grad * normed).flatten(0, -2).sum(0).to(norm_weight.dtype)
    through = grad * norm_weight.to(grad.dtype)
    through -= normed * (through * normed).mean(-1, keepdim=True)
    return through.mul_(inverse), grad_weight
