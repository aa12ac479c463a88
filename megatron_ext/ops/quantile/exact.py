"""The quantile of margins by sorting: what the histogram approximates."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ext.ops.quantile.histogram import order_statistics


def quantile_exact(margins: Tensor, *, top_k: int, valid: Tensor | None = None) -> Tensor:
    """The k/E quantile of each column, between order statistics interpolated as `torch.quantile`.

    Unlike that it takes any number of tokens, and some of them may be padding.

    Args:
        margins: floating [T, E].
        top_k: k.
        valid: bool [T]; rows where it is False are left out. Default: none is.

    Returns:
        float64 [E]; +inf where no row is valid.
    """
    experts = margins.shape[1]
    columns = margins.t()
    count = torch.full((1,), len(margins), device=margins.device)
    if valid is not None:
        columns = columns.masked_fill(~valid, torch.inf)
        count = valid.sum().reshape(1)
    # One row more, so that there is one to read when there is no token.
    columns = torch.nn.functional.pad(columns, (0, 1), value=torch.inf).sort(1).values
    rank, fraction = order_statistics(count, experts=experts, top_k=top_k)
    lower = columns.index_select(1, rank).squeeze(1).double()
    upper = columns.index_select(1, (rank + 1).minimum((count - 1).clamp(min=0)))
    return torch.lerp(lower, upper.squeeze(1).double(), fraction)


def next_bias(value: Tensor, *, bias: Tensor, top_k: int, tokens: Tensor) -> Tensor:
    """The bias for the next step: the quantiles less their mean.

    It stays as it is in a step without a valid token, and where every token takes every expert.

    Args:
        value: float64 [E], quantile of the margins of each expert.
        bias: float32 [E], in use.
        top_k: k.
        tokens: int64 [], valid tokens of the step.

    Returns:
        float32 [E].
    """
    if top_k == len(bias):
        return bias.clone()
    centred = (value - value.mean()).to(bias.dtype)
    return torch.where(tokens > 0, centred, bias)
