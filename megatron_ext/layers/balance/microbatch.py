"""Rules that look at one micro-batch at a time: megatron-core's quantiles, and score thresholds.

They depend on how the batch is cut into micro-batches, hence also on the data parallel size. Over
tensor and context parallel ranks, which share a micro-batch, they gather it: those layouts, and
padding, change nothing.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.config.schema import BalanceOptions
from megatron_ext.layers.balance.base import Balancer, Selection, TokenGroup
from megatron_ext.ops.quantile import LayerLoad, next_bias, quantile_exact, select_top_k

# Keeps the logit of a saturated score finite: 16 in size.
EPS = 1e-7


def gather_rows(rows: Tensor, group: ProcessGroup | None) -> Tensor:
    """[T, ...] of every rank of the group, one below the other; T is the same on all of them."""
    if group is None:
        return rows
    gathered = rows.new_empty(group.size() * len(rows), *rows.shape[1:])
    dist.all_gather_into_tensor(gathered, rows.contiguous(), group=group)
    return gathered


class _MicrobatchRule(Balancer):
    """Means, over the micro-batches of the step that have a valid token, of a value an expert.

    Args: as `Balancer`.
    """

    sums: Tensor

    def __init__(
        self,
        options: BalanceOptions,
        *,
        num_experts: int,
        top_k: int,
        device: torch.device | int | str | None = None,
    ) -> None:
        super().__init__(options, num_experts=num_experts, top_k=top_k, device=device)
        # Sums, then the number of micro-batches. Ranks that share a micro-batch all add it, which
        # cancels in the mean.
        sums = torch.zeros(num_experts + 1, dtype=torch.float64, device=self.device)
        self.register_buffer("sums", sums, persistent=False)

    def add(self, value: Tensor, *, rows: int, valid: Tensor | None) -> None:
        """Count a micro-batch's value [E], unless it has no valid token among its rows."""
        some = torch.full((), rows > 0, device=value.device) if valid is None else valid.any()
        # Not a product with zero: the value is infinite where there is no token.
        self.sums[:-1] += torch.where(some, value.double(), 0.0)
        self.sums[-1] += some

    def statistics(self) -> list[Tensor]:
        """As `Balancer.statistics`."""
        return [self.counts, self.sums]

    def mean(self) -> tuple[Tensor, Tensor]:
        """The mean [E] and the number of micro-batches, and forget them."""
        batches = self.sums[-1].clone()
        mean = self.sums[:-1] / batches.clamp(min=1)
        self.sums.zero_()
        return mean, batches


class MicrobatchMeanRule(_MicrobatchRule):
    """megatron-core's quantile balancing (0.19), for comparison.

    It selects by logit + bias; the margins are differences of logits; and the bias is the mean over
    micro-batches and ranks of each one's quantile, which is not the quantile of all tokens. Unlike
    megatron-core it takes any number of tokens, leaves out padding, and gets logits back from
    scores, so that they end at 16 in size.

    Args: as `Balancer`.
    """

    @torch.no_grad()
    def select(self, scores: Tensor, *, valid: Tensor | None, tokens: TokenGroup) -> Selection:
        """As `Balancer.select`."""
        biased = torch.logit(scores, eps=EPS) + self.bias
        return Selection(*select_top_k(biased, self.top_k, positions=tokens.positions))

    @torch.no_grad()
    def observe(
        self, scores: Tensor, selection: Selection, *, valid: Tensor | None, tokens: TokenGroup
    ) -> None:
        """As `Balancer.observe`."""
        super().observe(scores, selection, valid=valid, tokens=tokens)
        margins = selection.cutoff.unsqueeze(1) - torch.logit(scores, eps=EPS)
        margins = gather_rows(margins, tokens.group)
        if valid is not None:
            valid = gather_rows(valid, tokens.group)
        value = quantile_exact(margins, top_k=self.top_k, valid=valid)
        self.add(value, rows=len(margins), valid=valid)

    @torch.no_grad()
    def update(self, layer: int) -> LayerLoad:
        """As `Balancer.update`."""
        mean, batches = self.mean()
        new_bias = next_bias(mean, bias=self.bias, top_k=self.top_k, tokens=batches)
        return self._finish(layer, new_bias=new_bias)


class ThresholdRule(_MicrobatchRule):
    """In training every expert takes the tokens that score highest with it. It sees the future.

    An expert's threshold is the 1 - k/E quantile of its scores in the micro-batch, so that it takes
    k/E of the tokens: of those at or above it the highest `capacity_factor * k/E` of the tokens at
    most (more can only tie), earlier tokens first. A token gets any number of experts, also none;
    whether it gets one depends on tokens behind it, so a language model trained so cannot be used
    as it was trained.

    In evaluation each token takes the k experts whose scores exceed their thresholds most: those of
    the last step, averaged over its micro-batches, which is all that `bias` holds, negative and
    centred. This is causal, and for each token on its own.

    Args: as `Balancer`.
    """

    exactly_top_k = False

    @torch.no_grad()
    def select(self, scores: Tensor, *, valid: Tensor | None, tokens: TokenGroup) -> Selection:
        """As `Balancer.select`. In training padding takes no expert."""
        if not self.training:
            return super().select(scores, valid=valid, tokens=tokens)
        everyone = gather_rows(scores, tokens.group)
        count = torch.full((), len(everyone), device=scores.device)
        if valid is not None:
            valid = gather_rows(valid, tokens.group)
            count = valid.sum()
            everyone = everyone.masked_fill(~valid.unsqueeze(1), -torch.inf)
        # The k/E quantile from above is the negative one of the negatives.
        threshold = -quantile_exact(-everyone, top_k=self.top_k, valid=valid)
        share = self.options.capacity_factor * self.top_k / self.num_experts
        capacity = (count * share).ceil()
        rank = everyone.argsort(dim=0, descending=True, stable=True).argsort(dim=0)
        taken = (everyone >= threshold) & (rank < capacity)
        first = 0 if tokens.group is None else tokens.group.rank() * len(scores)
        return Selection(taken[first : first + len(scores)], threshold)

    @torch.no_grad()
    def observe(
        self, scores: Tensor, selection: Selection, *, valid: Tensor | None, tokens: TokenGroup
    ) -> None:
        """As `Balancer.observe`."""
        super().observe(scores, selection, valid=valid, tokens=tokens)
        if valid is not None:
            valid = gather_rows(valid, tokens.group)
        self.add(selection.cutoff, rows=len(scores), valid=valid)

    @torch.no_grad()
    def update(self, layer: int) -> LayerLoad:
        """As `Balancer.update`."""
        mean, batches = self.mean()
        new_bias = next_bias(-mean, bias=self.bias, top_k=self.top_k, tokens=batches)
        return self._finish(layer, new_bias=new_bias)
