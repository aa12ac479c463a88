"""Overloaded experts skip the tokens they are least confident about."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ext.config.schema import BalanceOptions
from megatron_ext.layers.balance.base import Balancer, Selection, TokenGroup
from megatron_ext.ops.counter_random import STEP, symmetric_uniform
from megatron_ext.ops.quantile import Bins, LayerLoad, select_top_k


class RejectRule(Balancer):
    """Rejection by the running quantile of each expert's scores; no bias.

    An expert is overloaded when its running demand exceeds `overload` times the mean. It then
    rejects, with `rejection_probability`, tokens below its threshold: the running 1 - k/E quantile
    of its scores, above which k/E of all tokens lie. (Scores are in the order of logits, so this is
    the quantile of the logits.) With `refill` a freed slot goes to the token's next-best expert
    that does not reject it, else it is left empty.

    Demand is what an expert would take, at the cut-offs of the step, if it alone rejected nothing.
    Counting what it did take would let it stop rejecting as soon as that works.

    Threshold and demand are those of earlier steps, so that a token's experts depend on no other
    token; evaluation rejects by the same state. Draws are a function of (step, position of the
    token, expert): recomputation and other layouts repeat them, and no generator is touched. Which
    ranks' statistics are summed is the choice of the group that `reduce` is given.

    Args: as `Balancer`.

    Attributes:
        threshold: float32 [E], running quantile.
        demand: float32 [E], running demand over the mean.
        steps: int64 [], steps with a valid token so far.
    """

    threshold: Tensor
    demand: Tensor
    steps: Tensor
    histogram: Tensor
    wanted: Tensor

    def __init__(
        self,
        options: BalanceOptions,
        *,
        num_experts: int,
        top_k: int,
        device: torch.device | int | str | None = None,
    ) -> None:
        super().__init__(options, num_experts=num_experts, top_k=top_k, device=device)
        self.exactly_top_k = options.refill
        self.bins = Bins(options.bins, options.placement)
        zeros = torch.zeros(num_experts, device=self.device)
        counts = torch.zeros(num_experts, dtype=torch.int64, device=self.device)
        self.register_buffer("threshold", zeros)
        self.register_buffer("demand", zeros.clone())
        self.register_buffer("steps", counts.new_zeros(()))
        histogram = self.bins.zeros(num_experts, device=self.device)
        self.register_buffer("histogram", histogram, persistent=False)
        self.register_buffer("wanted", counts, persistent=False)

    @torch.no_grad()
    def select(self, scores: Tensor, *, valid: Tensor | None, tokens: TokenGroup) -> Selection:
        """As `Balancer.select`."""
        rejected = (self.demand > self.options.overload) & (scores < self.threshold)
        if self.options.rejection_probability < 1:
            rejected &= self._draw(scores, tokens) < self.options.rejection_probability
        if not self.options.refill:
            map, cutoff = select_top_k(scores, self.top_k, positions=tokens.positions)
            return Selection(map & ~rejected, cutoff)
        # Where too few are left, those that reject it least: below all that do not reject it, in
        # the order of the distance to the threshold, so that a token always has k experts.
        ranked = torch.where(rejected, scores - self.threshold - 1, scores)
        return Selection(*select_top_k(ranked, self.top_k, positions=tokens.positions))

    def _draw(self, scores: Tensor, tokens: TokenGroup) -> Tensor:
        """Uniform on (0, 1), float32 [T, E]."""
        positions = tokens.positions
        if positions is None:
            positions = torch.arange(len(scores), device=scores.device)
        experts = torch.arange(self.num_experts, device=scores.device)
        # A sequence has fewer than 2^40 pairs of a token and an expert.
        index = (self.steps << 40) + positions.unsqueeze(1) * self.num_experts + experts
        return symmetric_uniform(index * STEP).add_(1).div_(2)

    @torch.no_grad()
    def observe(
        self, scores: Tensor, selection: Selection, *, valid: Tensor | None, tokens: TokenGroup
    ) -> None:
        """As `Balancer.observe`."""
        super().observe(scores, selection, valid=valid, tokens=tokens)
        wanted = selection.map | (scores > selection.cutoff.unsqueeze(1))
        if valid is not None:
            wanted &= valid.unsqueeze(1)
        self.wanted += wanted.sum(0)
        # Margins to a cut-off of zero are negative scores, and thresholds their negative bias.
        zero = torch.zeros_like(selection.cutoff)
        self.bins.add(self.histogram, scores, bias=-self.threshold, cutoff=zero, valid=valid)

    def statistics(self) -> list[Tensor]:
        """As `Balancer.statistics`."""
        return [self.counts, self.wanted, self.histogram]

    @torch.no_grad()
    def update(self, layer: int) -> LayerLoad:
        """As `Balancer.update`."""
        tokens = self.counts[-1]
        found = self.bins.quantile(self.histogram, bias=-self.threshold, top_k=self.top_k)
        mean = tokens.clamp(min=1).double() * self.top_k / self.num_experts
        # The first step has no past; a step without tokens has no present.
        past = torch.where(self.steps > 0, self.options.running_decay, 0.0)
        past = torch.where(tokens > 0, past, 1.0)
        for state, value in ((self.threshold, -found.value), (self.demand, self.wanted / mean)):
            state.copy_(torch.lerp(value, state.double(), past.double()))
        self.steps += tokens > 0
        self.histogram.zero_()
        self.wanted.zero_()
        return self._finish(
            layer,
            new_bias=self.bias,
            out_of_range=found.out_of_range,
            bin_width=found.width,
        )
