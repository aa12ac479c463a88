"""The interface of every balancing rule: select, observe, reduce, update.

Shapes: T tokens of a micro-batch on this rank, E experts, k experts a token.

    map = balancer.select(scores, ...)      forward, also in evaluation; reads the bias
    balancer.observe(scores, map, ...)      forward of training, once a token
    reduce(balancers, group)                once a step, all layers in one collective
    load = balancer.update(layer)           once a step; the new bias is used from the next one
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_ext.config.schema import BalanceOptions
from megatron_ext.ops.quantile.load import LayerLoad


@dataclass(frozen=True)
class TokenGroup:
    """Who else holds tokens of the same micro-batch: for rules that look at all of it.

    Attributes:
        group: ranks that hold other tokens of this micro-batch (context parallel ranks, and tensor
            parallel ones when they shard the sequence); None when this rank holds all of them.
    """

    group: ProcessGroup | None = None


class Balancer(nn.Module):
    """State and rule of one layer. `bias` is float32 whatever the model's dtype, and is saved.

    Args:
        options: of the rule.
        num_experts: E.
        top_k: k.
    """

    bias: Tensor
    counts: Tensor

    def __init__(self, options: BalanceOptions, *, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.options = options
        self.num_experts = num_experts
        self.top_k = top_k
        device = torch.cuda.current_device()
        self.register_buffer("bias", torch.zeros(num_experts, device=device))
        # Of the step under way, hence zero whenever a checkpoint is written.
        counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=device)
        self.register_buffer("counts", counts, persistent=False)

    def select(self, scores: Tensor, *, valid: Tensor | None, tokens: TokenGroup) -> Tensor:
        """Which expert takes which token.

        Args:
            scores: float32 [T, E] in (0, 1), unbiased; detached.
            valid: bool [T], False for padding; None: all are valid.
            tokens: for rules that look at the whole micro-batch.

        Returns:
            bool [T, E].
        """
        raise NotImplementedError

    def observe(
        self, scores: Tensor, map: Tensor, *, valid: Tensor | None, tokens: TokenGroup
    ) -> None:
        """Add the statistics of a micro-batch. The caller calls it once a token: in training with
        gradients enabled, not in evaluation, not twice under recomputation."""
        raise NotImplementedError

    def statistics(self) -> list[Tensor]:
        """Tensors to be summed, in place, over all ranks that hold other tokens of the step."""
        return [self.counts]

    def gather(self, group: ProcessGroup) -> None:
        """For rules whose statistics cannot be summed: collect them over the same ranks."""

    def auxiliary_loss(
        self, scores: Tensor, map: Tensor, *, valid: Tensor | None, tokens: TokenGroup
    ) -> Tensor | None:
        """A loss, as a sum over the valid tokens, to be added to the token losses; or None."""
        return None

    def update(self, layer: int) -> LayerLoad:
        """Set the bias for the next step from the reduced statistics, and clear these."""
        raise NotImplementedError
