"""From logits to experts and weights in plain torch: what the kernel is compared with.

Shapes: T tokens, E experts, k experts a token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_ext.ops.quantile import select_top_k

# Keeps the weights of a token finite whose scores are all zero.
EPS = 1e-20


class Routing(NamedTuple):
    """Which experts a token takes, and how much each counts.

    Attributes:
        weights: [T, E], as the scores, 0 where not taken; with the gradient of the logits.
        map: bool [T, E].
        scores: [T, E], sigmoids of the logits: the numbers that everything else here is made of.
        cutoff: [T], the (k+1)-th largest biased score; see `select_top_k`.
    """

    weights: Tensor
    map: Tensor
    scores: Tensor
    cutoff: Tensor


def weights_of(scores: Tensor, map: Tensor, *, scaling: float) -> Tensor:
    """Scores [T, E] where the map bool [T, E] is True, summing to `scaling` for each token."""
    taken = scores * map
    return taken / (taken.sum(-1, keepdim=True) + EPS) * scaling


def route_tokens_dense(
    logits: Tensor,
    bias: Tensor,
    *,
    top_k: int,
    scaling: float,
    valid: Tensor | None,
    positions: Tensor | None,
) -> Routing:
    """See `ops.router.route_tokens`."""
    scores = torch.sigmoid(logits)
    chosen, cutoff = select_top_k(scores.detach() + bias, top_k, positions=positions)
    if valid is not None:
        chosen = chosen & valid.unsqueeze(-1)
    return Routing(weights_of(scores, chosen, scaling=scaling), chosen, scores, cutoff)
