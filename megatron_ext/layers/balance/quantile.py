"""Quantile balancing (Kimi K3, section 2.3.3): from histograms, or exactly from sorted margins.

The bias of an expert becomes the k/E quantile of its margins over all valid tokens of the global
batch, less the mean over experts, and is used from the next step on: routing sees no token of its
own batch.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.config.schema import BalanceOptions
from megatron_ext.layers.balance.base import Balancer, Selection, TokenGroup
from megatron_ext.ops.quantile import (
    Bins,
    LayerLoad,
    add_statistics,
    level,
    next_bias,
    quantile_exact,
)


class QuantileRule(Balancer):
    """From integer histograms: the same bits however tokens are split over micro-batches and ranks.

    Args: as `Balancer`.
    """

    histogram: Tensor

    def __init__(
        self,
        options: BalanceOptions,
        *,
        num_experts: int,
        top_k: int,
        device: torch.device | int | str | None = None,
    ) -> None:
        super().__init__(options, num_experts=num_experts, top_k=top_k, device=device)
        self.bins = Bins(options.bins, options.placement)
        histogram = self.bins.zeros(num_experts, device=self.device)
        self.register_buffer("histogram", histogram, persistent=False)

    @torch.no_grad()
    def observe(
        self, scores: Tensor, selection: Selection, *, valid: Tensor | None, tokens: TokenGroup
    ) -> None:
        """As `Balancer.observe`."""
        add_statistics(
            self.counts,
            self.histogram,
            scores,
            bins=self.bins,
            map=selection.map,
            cutoff=selection.cutoff,
            bias=self.bias,
            valid=valid,
            kernels=self.kernels,
        )

    def statistics(self) -> list[Tensor]:
        """As `Balancer.statistics`."""
        return [self.counts, self.histogram]

    @torch.no_grad()
    def update(self, layer: int) -> LayerLoad:
        """As `Balancer.update`."""
        return level(
            self.counts,
            self.histogram,
            self.bias,
            bins=self.bins,
            top_k=self.top_k,
            layer=layer,
            kernels=self.kernels,
        )


class ExactQuantileRule(Balancer):
    """From all margins of the step, gathered and sorted: for tests and small runs.

    Holds T x E floats for all tokens of the global batch, on every rank.

    Args: as `Balancer`.
    """

    def __init__(
        self,
        options: BalanceOptions,
        *,
        num_experts: int,
        top_k: int,
        device: torch.device | int | str | None = None,
    ) -> None:
        super().__init__(options, num_experts=num_experts, top_k=top_k, device=device)
        self._margins: list[Tensor] = []

    @torch.no_grad()
    def observe(
        self, scores: Tensor, selection: Selection, *, valid: Tensor | None, tokens: TokenGroup
    ) -> None:
        """As `Balancer.observe`."""
        super().observe(scores, selection, valid=valid, tokens=tokens)
        margins = selection.cutoff.unsqueeze(1) - scores
        self._margins.append(margins if valid is None else margins[valid])

    @torch.no_grad()
    def gather(self, group: ProcessGroup) -> None:
        """As `Balancer.gather`. Ranks may hold different numbers of valid tokens."""
        mine = self._all()
        lengths = torch.zeros(group.size(), dtype=torch.int64, device=mine.device)
        length = torch.tensor([len(mine)], device=mine.device)
        dist.all_gather_into_tensor(lengths, length, group=group)
        longest = int(lengths.max())
        padded = F.pad(mine, (0, 0, 0, longest - len(mine)))
        everything = padded.new_empty(group.size() * longest, self.num_experts)
        dist.all_gather_into_tensor(everything, padded, group=group)
        parts = everything.split(longest) if longest else []
        self._margins = [part[: int(n)] for part, n in zip(parts, lengths, strict=False)]

    def discard(self) -> None:
        """As `Balancer.discard`."""
        super().discard()
        self._margins = []

    def _all(self) -> Tensor:
        if not self._margins:
            return torch.empty(0, self.num_experts, device=self.bias.device)
        return torch.cat(self._margins)

    @torch.no_grad()
    def update(self, layer: int) -> LayerLoad:
        """As `Balancer.update`."""
        margins = self._all()
        self._margins = []
        value = quantile_exact(margins, top_k=self.top_k)
        return self._finish(
            layer,
            new_bias=next_bias(value, bias=self.bias, top_k=self.top_k, tokens=self.counts[-1]),
            predicted=(margins < value).sum(0).double(),
        )
