"""The two classic rules: a constant step against the load, and a loss that punishes imbalance."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.layers.balance.base import Balancer, TokenGroup
from megatron_ext.ops.quantile import LayerLoad


class SignRule(Balancer):
    """DeepSeek-V3's bias: once a step, `sign_step` up where the load is below the mean, else down.

    Counts are of the global batch, so that no layout and no split changes the step.

    Args: as `Balancer`.
    """

    @torch.no_grad()
    def update(self, layer: int) -> LayerLoad:
        """As `Balancer.update`."""
        counts = self.counts[:-1].double()
        step = self.options.sign_step * torch.sign(counts.mean() - counts)
        return self._finish(layer, new_bias=self.bias + step.to(self.bias.dtype))


class AuxiliaryLossRule(Balancer):
    """The loss of Switch Transformer (section 2.2), for k experts and sigmoid scores.

        coefficient * E / k * sum_e f_e P_e

    f_e: share of the micro-batch's tokens that take expert e, a constant; P_e: mean over the tokens
    of score_e / (sum of the token's scores). It is `coefficient` when either is even. The selection
    has no bias.

    f is of the whole micro-batch, over tensor and context parallel ranks too, and the loss is a sum
    over tokens, to be divided by the number of tokens of the global batch as token losses are. So
    tensor, sequence, context, expert and pipeline parallelism and padding change nothing. Another
    split into micro-batches, hence another data parallel size, does: f is of fewer or more tokens.

    Args: as `Balancer`.
    """

    def auxiliary_loss(
        self, scores: Tensor, map: Tensor, *, valid: Tensor | None, tokens: TokenGroup
    ) -> Tensor | None:
        """As `Balancer.auxiliary_loss`."""
        if valid is None:
            valid = torch.ones(len(scores), dtype=torch.bool, device=scores.device)
        mask = valid.unsqueeze(1)
        counts = torch.cat([(map & mask).sum(0), valid.sum().reshape(1)])
        if tokens.group is not None:
            dist.all_reduce(counts, group=tokens.group)
        share = counts[:-1].to(scores.dtype) / counts[-1].clamp(min=1)
        # A score can underflow to zero, all of a row's too.
        probability = scores / scores.sum(1, keepdim=True).clamp(min=1e-20)
        factor = self.options.aux_coefficient * self.num_experts / self.top_k
        return factor * ((probability * mask) @ share).sum()
