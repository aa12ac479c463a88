"""The mix over depth as the formula reads; every intermediate is stored. What tests compare with.

Source: Attention Residuals, arXiv:2603.15031; Kimi K3 report, section 2.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class BankMix(NamedTuple):
    """The mix of finished sources alone, the bank: what `two_phase` hands to the second phase."""

    mixed: Tensor  # sum_j a_j v_j [..., D], dtype of the sources
    log_sum: Tensor  # log sum_j exp(score_j) [...], float32 or wider
    # Of our kernel: float32 [..., D] without memory or values. The gradient of `mixed` comes as the
    # gradient of this, unrounded.
    slot: Tensor | None = None


def depth_weights_reference(
    sources: Sequence[Tensor], query: Tensor, key_weight: Tensor, *, eps: float
) -> Tensor:
    """a = softmax over the sources v_j of query . (key_weight * v_j / rms(v_j)). [N, ...]."""
    return torch.softmax(_scores(sources, query, key_weight, eps=eps), dim=0)


def _scores(sources: Sequence[Tensor], query: Tensor, key_weight: Tensor, *, eps: float) -> Tensor:
    dtype = torch.promote_types(sources[0].dtype, torch.float32)
    values = torch.stack([v.to(dtype) for v in sources])
    keys = F.rms_norm(values, key_weight.shape, key_weight.to(dtype), eps)
    return (keys * query.to(dtype)).sum(-1)


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
    return _mix(sources, weights, eps=eps, norm_weight=norm_weight)


def _mix(
    sources: Sequence[Tensor], weights: Tensor, *, eps: float, norm_weight: Tensor | None
) -> Tensor:
    values = torch.stack([v.to(weights.dtype) for v in sources])
    mixed = (weights.unsqueeze(-1) * values).sum(0)
    if norm_weight is not None:
        mixed = F.rms_norm(mixed, norm_weight.shape, norm_weight.to(mixed.dtype), eps)
    return mixed.to(sources[0].dtype)


def first_phase_reference(
    sources: Sequence[Tensor],
    query: Tensor,
    key_weight: Tensor,
    *,
    bank_query: Tensor,
    bank_key_weight: Tensor,
    bank_sources: int,
    eps: float,
    norm_weight: Tensor | None = None,
) -> tuple[Tensor, BankMix]:
    """The mix, and that of the first sources alone by another query: `two_phase.first_phase`."""
    bank = sources[:bank_sources]
    scores = _scores(bank, bank_query, bank_key_weight, eps=eps)
    mixed = depth_mix_reference(sources, query, key_weight, eps=eps, norm_weight=norm_weight)
    of_bank = _mix(bank, torch.softmax(scores, dim=0), eps=eps, norm_weight=None)
    return mixed, BankMix(of_bank, torch.logsumexp(scores, dim=0))


def second_phase_reference(
    bank: BankMix,
    running: Tensor,
    query: Tensor,
    key_weight: Tensor,
    *,
    eps: float,
    norm_weight: Tensor | None = None,
) -> Tensor:
    """The mix of the bank and of one source more, by their scores. See `two_phase.second_phase`."""
    (score,) = _scores([running], query, key_weight, eps=eps)
    weights = torch.softmax(torch.stack([bank.log_sum, score]), dim=0)
    return _mix([bank.mixed, running], weights, eps=eps, norm_weight=norm_weight)
