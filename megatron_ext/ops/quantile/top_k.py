"""Top-k of a score matrix with ties that favour nobody.

Shapes: T tokens (items), E experts (targets), k experts a token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class TopK(NamedTuple):
    """Which experts a token takes, and what an expert needs to be among them.

    Attributes:
        map: bool [T, E], exactly k a row.
        cutoff: [T], the (k+1)-th largest score of the row; with k = E the smallest one.
    """

    map: Tensor
    cutoff: Tensor


def select_top_k(scores: Tensor, k: int, *, positions: Tensor | None = None) -> TopK:
    """The k largest scores of each row.

    Where n experts tie for the last m places, these are dealt out in turn: the token at position p
    takes the tied experts number p m, p m + 1, ..., p m + m - 1 (modulo n). So each is taken as
    often as the others, by the score and the position alone: not by what `torch.topk` returns for
    equal values, which is left open and differs between devices. A router whose weights are zero
    loads all experts alike.

    Args:
        scores: [T, E] floating. NaN comes after all numbers, so that such a row has k experts too:
            how many places are taken is known beforehand.
        k: 1 to E.
        positions: int64 [T], the same for a token in every layout and when computed again;
            default: 0, 1, ..., T - 1.
    """
    tokens, experts = scores.shape
    scores = scores.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    values = scores.topk(min(k + 1, experts), dim=1).values
    last = values[:, k - 1 : k]
    places = k - (values[:, :k] > last).sum(1, keepdim=True, dtype=torch.int32)
    tied = scores == last
    rank = tied.cumsum(1, dtype=torch.int32) - 1
    total = rank[:, -1:] + 1
    if positions is None:
        positions = torch.arange(tokens, device=scores.device)
    start = (positions.unsqueeze(1) * places).remainder(total.clamp(min=1)).to(torch.int32)
    # Ranks start, start + 1, ... modulo total, without a division for each element.
    end = start + places
    dealt = ((rank >= start) & (rank < end)) | (rank < end - total)
    return TopK((scores > last) | (tied & dealt), values[:, -1])
