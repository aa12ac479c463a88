"""The formula, with all logits at once and the whole vocabulary on one rank."""

from __future__ import annotations

import torch
from torch import Tensor

IGNORED = -100  # torch's own mark of a label that does not count


def cross_entropy_reference(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """``-log softmax(hidden weight^T)[label]`` a token, in nats; 0 where the label is below 0.

    Args:
        hidden: [T, D].
        weight: of the head [V, D].
        labels: int64 [T], in [0, V) or negative.

    Returns:
        [T] in float32, or float64 for float64 input.
    """
    logits = hidden @ weight.t()
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    chosen = logits.log_softmax(-1).gather(1, labels.clamp(min=0)[:, None])[:, 0]
    return torch.where(labels >= 0, -chosen, torch.zeros_like(chosen))
