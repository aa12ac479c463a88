"""Histograms of margins: integers that add exactly over micro-batches and ranks.

Shapes: T tokens, E experts, k experts a token, B bins.

    margin_te = cutoff_t - score_te        the bias that would put expert e at token t's cut-off

An expert is taken where its bias exceeds the margin, so a bias at the k/E quantile of an expert's
margins gives it k/E of the tokens (Kimi K3, section 2.3.3). With scores in an interval of length
`span` every margin lies in [min bias - span, max bias + span]: the cut-off is the biased score of
some expert.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ext.config.schema import BinPlacement

# Elements that are counted at once: bounds the memory of indices, and on a CPU stays in its cache.
BLOCK = {"cpu": 1 << 17}
BLOCK_ELSEWHERE = 1 << 24

MANTISSA_BITS = 23
EXPONENT_BIAS = 127

# Doublings of the distance that centred bins cover at least: to 2^-15 of the range.
OCTAVES = 16


@dataclass(frozen=True)
class Bins:
    """Where the bins lie.

    - `uniform`: equally wide over the whole range of margins, the same for all experts (K3).
    - `centred`: around the bias in use, an expert's own. Each half has `number / 2` bins, 2^m
      equally wide ones for each doubling of the distance, with the largest m for 16 doublings or
      more; the innermost bin reaches to the bias. So a bin's width is a share of the distance
      between old and new bias. At a steady state, where this is the noise of a batch, the bins are
      finest, whatever the scale of the scores.

    Both have one more bin at either end for what is outside the range, hence `number + 2` counts.

    Attributes:
        number: B, at least 2; for `centred` even.
        placement: of the bins.
        span: highest minus lowest possible score; 1 for sigmoid scores.

    Raises:
        ValueError: `number` is odd or too small.
    """

    number: int
    placement: BinPlacement
    span: float = 1.0

    def __post_init__(self) -> None:
        if self.number < 2 or (self.placement is BinPlacement.centred and self.number % 2):
            raise ValueError(f"number={self.number}: at least 2, and even for centred bins")

    @property
    def wide_span(self) -> float:
        """A little more than the span, so that rounding puts nothing outside."""
        return self.span * (1 + 1e-5)

    @property
    def shift(self) -> int:
        """`centred`: bits of a float32 below those that number its bin."""
        per_octave = max(1, self.number // 2 // OCTAVES)
        return MANTISSA_BITS - min(MANTISSA_BITS, per_octave.bit_length() - 1)

    def zeros(self, experts: int, *, device: torch.device | int | str | None = None) -> Tensor:
        """An empty histogram, int32 [E, B + 2]: good for 2^31 - 1 tokens a step."""
        return torch.zeros(experts, self.number + 2, dtype=torch.int32, device=device)

    def add(
        self,
        histogram: Tensor,
        scores: Tensor,
        *,
        bias: Tensor,
        cutoff: Tensor,
        valid: Tensor | None = None,
    ) -> None:
        """Count the margins of some tokens.

        Args:
            histogram: int32 [E, B + 2], added to in place.
            scores: float32 or float64 [T, E].
            bias: float32 [E], in use.
            cutoff: [T], as scores, of the biased scores: see `select_top_k`.
            valid: bool [T]; tokens where it is False are not counted. Default: all are.
        """
        experts, stride = histogram.shape
        rows = torch.arange(experts, dtype=torch.int32, device=scores.device) * stride
        weights = torch.ones(1, dtype=torch.int32, device=scores.device)
        flat = histogram.view(-1)
        for block in _blocks(scores):
            if valid is not None:
                weights = valid[block].to(torch.int32).unsqueeze(1)
            index = self._bin(scores[block], bias=bias, cutoff=cutoff[block]).add_(rows)
            flat.scatter_add_(0, index.reshape(-1).long(), weights.expand(index.shape).reshape(-1))

    def _bin(self, scores: Tensor, *, bias: Tensor, cutoff: Tensor) -> Tensor:
        """The place of every margin, int32 [T, E] in [0, B + 1]."""
        if self.placement is BinPlacement.uniform:
            low, width = self._uniform(bias)
            place = ((cutoff.unsqueeze(1) - scores - low) / width).floor_().to(torch.int32)
            return place.add_(1).clamp_(0, self.number + 1)
        # The bits of a positive float are in the order of its value, and their leading ones are
        # its octave and the bin in it.
        offset = (cutoff.unsqueeze(1) - (scores + bias)).to(torch.float32)
        half = self.number // 2
        place = offset.abs().view(torch.int32) >> self.shift
        place.sub_(self._first(bias)).clamp_(0, half)
        return torch.where(offset < 0, half - place, half + 1 + place)

    def _uniform(self, bias: Tensor) -> tuple[Tensor, Tensor]:
        """Lower end and width of the bins, float32 []."""
        low, high = bias.min() - self.wide_span, bias.max() + self.wide_span
        return low, (high - low) / self.number

    def _first(self, bias: Tensor) -> Tensor:
        """`centred`: leading bits of the largest offset in the innermost bin, int32 []."""
        # An offset is a difference of biased scores: below 2^octave in size, with rounding.
        octave = torch.frexp(self.wide_span + bias.max() - bias.min()).exponent
        top = (octave + EXPONENT_BIAS) << (MANTISSA_BITS - self.shift)
        return top - self.number // 2

    def edges(self, bias: Tensor) -> Tensor:
        """Ends of the bins as float64 [B + 1]: `uniform` of margins, `centred` of margin - bias."""
        steps = torch.arange(self.number + 1, device=bias.device)
        if self.placement is BinPlacement.uniform:
            low, width = self._uniform(bias)
            return low.double() + width.double() * steps
        half = self.number // 2
        bits = self._first(bias) + torch.arange(1, half + 1, dtype=torch.int32, device=bias.device)
        upper = (bits << self.shift).view(torch.float32).double()
        return torch.cat([-upper.flip(0), upper.new_zeros(1), upper])

    def quantile(self, histogram: Tensor, *, bias: Tensor, top_k: int) -> HistogramQuantile:
        """The k/E quantile of every expert's margins; its bias would level the load.

        The order statistics around it are placed inside their bins as if these were filled evenly,
        so that it is less than the wider of their bins from `quantile_exact`, whatever lies between
        them. Waits for nothing on a GPU.

        Args:
            histogram: int32 [E, B + 2], over all tokens of the step.
            bias: float32 [E], in use when they were counted.
            top_k: k.
        """
        experts = len(histogram)
        # int64: sums over experts or products with k pass 2^31.
        below = torch.cat(
            [torch.zeros_like(histogram[:, :1], dtype=torch.int64), histogram.long().cumsum(1)], 1
        )
        tokens = below[:, -1:]
        rank, fraction = order_statistics(tokens, experts=experts, top_k=top_k)
        ranks = torch.cat([rank, (rank + 1).minimum((tokens - 1).clamp(min=0))], 1)
        place = torch.searchsorted(below, ranks, right=True).sub_(1).clamp_(0, self.number + 1)
        edges = self.edges(bias)
        edges = torch.cat([edges[:1], edges, edges[-1:]])
        low, width = edges[place], edges[place + 1] - edges[place]
        mass = histogram.gather(1, place).clamp(min=1)
        share = (ranks - below.gather(1, place) + 0.5) / mass
        lower, upper = (low + width * share).unbind(1)
        value = torch.lerp(lower, upper, fraction.squeeze(1))
        if self.placement is BinPlacement.centred:
            value = value + bias
        # Two slices: a list of indices would be copied to the GPU, and waited for.
        outside = (histogram[:, 0].long() + histogram[:, -1]).sum()
        return HistogramQuantile(value, tokens.squeeze(1), width.max(), outside)


@dataclass(frozen=True)
class HistogramQuantile:
    """What `Bins.quantile` found.

    Attributes:
        value: float64 [E]; without meaning where nothing was counted.
        tokens: int64 [E], margins counted for each expert.
        width: float64 [], widest bin that was read.
        out_of_range: int64 [], margins outside the bins.
    """

    value: Tensor
    tokens: Tensor
    width: Tensor
    out_of_range: Tensor


def order_statistics(tokens: Tensor, *, experts: int, top_k: int) -> tuple[Tensor, Tensor]:
    """The quantile k/E of n values lies at the 0-based rank k (n - 1) / E of the sorted ones.

    Between two ranks it is interpolated, as `torch.quantile` does. In integers, since n is large.

    Args:
        tokens: int64, n; any shape.
        experts: E.
        top_k: k.

    Returns:
        The rank below, int64, and the share of the way to the next one, float64 in [0, 1).
    """
    product = (tokens - 1).clamp(min=0) * top_k
    return product // experts, (product % experts).double() / experts


def _blocks(scores: Tensor) -> Iterator[slice]:
    tokens, experts = scores.shape
    step = max(1, BLOCK.get(scores.device.type, BLOCK_ELSEWHERE) // experts)
    for start in range(0, tokens, step):
        yield slice(start, start + step)
