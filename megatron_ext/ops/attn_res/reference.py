"""The mix over depth as the formula reads; every intermediate is stored. What tests compare with.

Source: Attention Residuals, arXiv:2603.15031; Kimi K3 report, section 2.2.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def depth_weights_reference(
    sources: Sequence[Tensor], query: Tensor, key_weight: Tensor, *, eps: float
) -> Tensor:
    """a = softmax over the sources v_j of query . (key_weight * v_j / rms(v_j)). [N, ...]."""
    dtype = torch.promote_types(sources[0].dtype, torch.float32)
    values = torch.stack([v.to(dtype) for v in sources])
    keys = F.rms_norm(values, key_weight.shape, key_weight.to(dtype), eps)
    return torch.softmax((keys * query.to(dtype)).sum(-1), dim=0)


def depth_mix_reference(
    sources: Sequence[Tensor],
    query: Tensor,
    key_weight: Tensor,
    *,
    eps: float,
    norm_weight: Tensor | None = None,
) -> Tensor:
    """h = sum_j a_j v_j of the raw values; with `norm_weight` then RMSNorm(h). See `depth_mix`."""
    weights = depth_weights_reference(sources, query, key_weight, eps=eps)
    values = torch.stack([v.to(weights.dtype) for v in sources])
    mixed = (weights.unsqueeze(-1) * values).sum(0)
    if norm_weight is not None:
        mixed = F.rms_norm(mixed, norm_weight.shape, norm_weight.to(mixed.dtype), eps)
    return mixed.to(sources[0].dtype)
