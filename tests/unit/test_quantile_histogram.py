"""Histograms of margins: sums are exact, the range holds all, quantiles are right to a bin."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_ext.config.schema import BinPlacement
from megatron_ext.ops.quantile import (
    Bins,
    next_bias,
    quantile_exact,
    reference,
    select_top_k,
)

BOTH = [Bins(1000, BinPlacement.uniform), Bins(128, BinPlacement.centred)]
each_placement = pytest.mark.parametrize("bins", BOTH, ids=lambda bins: bins.placement.name)
# Margins are made of float32 scores near 1, and once subtract the bias and once do not.
ROUNDING = 1e-6


def stream(
    seed: int, *, tokens: int, experts: int, spread: float = 1.0, bias: float = 0.1
) -> tuple[Tensor, Tensor]:
    """Scores [T, E] of experts that differ, and a bias."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, experts, generator=generator)
    logits = spread * (logits + torch.randn(experts, generator=generator))
    return torch.sigmoid(logits), bias * torch.randn(experts, generator=generator)


def count(bins: Bins, scores: Tensor, bias: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The histogram, and the margins that were counted."""
    cutoff = select_top_k(scores + bias, k).cutoff
    histogram = bins.zeros(len(bias))
    bins.add(histogram, scores, bias=bias, cutoff=cutoff)
    return histogram, cutoff.unsqueeze(1) - scores


@each_placement
@given(
    seed=st.integers(0, 2**31),
    tokens=st.integers(1, 60),
    experts=st.integers(1, 12),
    spread=st.sampled_from([1e-4, 0.01, 1.0, 30.0]),
    bias=st.sampled_from([0.0, 1e-3, 0.3, 5.0]),
)
@settings(max_examples=40, deadline=None)
def test_every_margin_is_in_range_and_in_its_bin(
    bins: Bins, seed: int, tokens: int, experts: int, spread: float, bias: float
) -> None:
    scores, b = stream(seed, tokens=tokens, experts=experts, spread=spread, bias=bias)
    k = 1 + seed % experts
    histogram, margins = count(bins, scores, b, k)
    assert histogram[:, [0, -1]].sum() == 0
    assert (histogram.sum(1) == tokens).all()
    edges = bins.edges(b)
    assert torch.equal(edges, edges.sort().values)
    shift = b if bins.placement is BinPlacement.centred else torch.zeros_like(b)
    offsets = (margins.double() - shift.double()).t().contiguous().sort(1).values
    # Where a margin is within rounding of an edge, either side is right: count up to both.
    tolerance = ROUNDING * (1 + float(b.abs().max()))
    below = histogram.cumsum(1)[:, :-1]
    rows = edges.expand(experts, -1).contiguous()
    assert (torch.searchsorted(offsets, rows - tolerance) <= below).all()
    assert (below <= torch.searchsorted(offsets, rows + tolerance)).all()


def test_centred_bins_are_where_the_reference_puts_them() -> None:
    bins = BOTH[1]
    scores, b = stream(0, tokens=50, experts=6)
    cutoff = select_top_k(scores + b, 2).cutoff
    histogram = bins.zeros(6)
    bins.add(histogram, scores, bias=b, cutoff=cutoff)
    expected = torch.zeros_like(histogram)
    edges = bins.edges(b).tolist()
    for t in range(50):
        for e in range(6):
            offset = float(cutoff[t] - (scores[t, e] + b[e]))
            # A mirrored bin includes its outer end, not its inner one.
            expected[e, reference.place(offset, edges)] += 1
    # No offset but exact zeros lies on an edge here, and zero belongs to the upper bin in both.
    assert torch.equal(histogram, expected)


@each_placement
@given(
    seed=st.integers(0, 2**31),
    tokens=st.integers(1, 200),
    experts=st.integers(2, 12),
    spread=st.sampled_from([0.01, 1.0, 30.0]),
)
@settings(max_examples=40, deadline=None)
def test_less_than_a_bin_from_the_exact_quantile(
    bins: Bins, seed: int, tokens: int, experts: int, spread: float
) -> None:
    scores, b = stream(seed, tokens=tokens, experts=experts, spread=spread)
    k = 1 + seed % experts
    histogram, margins = count(bins, scores, b, k)
    found = bins.quantile(histogram, bias=b, top_k=k)
    exact = quantile_exact(margins, top_k=k)
    assert (found.value - exact).abs().max() < found.width + ROUNDING
    assert (found.tokens == tokens).all()


@each_placement
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_the_same_bits_however_tokens_are_split_padded_and_ordered(
    bins: Bins, data: st.DataObject
) -> None:
    tokens = data.draw(st.integers(1, 80))
    experts, k = 9, 2
    scores, b = stream(tokens, tokens=tokens, experts=experts)
    cutoff = select_top_k(scores + b, k).cutoff
    whole = bins.zeros(experts)
    bins.add(whole, scores, bias=b, cutoff=cutoff)
    order = torch.tensor(data.draw(st.permutations(range(tokens))))
    cuts = sorted(data.draw(st.lists(st.integers(0, tokens), max_size=4)))
    split = bins.zeros(experts)
    for part in order.tensor_split(cuts):
        padding = data.draw(st.integers(0, 5))
        padded = torch.cat([scores[part], torch.rand(padding, experts)])
        valid = torch.arange(len(padded)) < len(part)
        some = bins.zeros(experts)
        shuffle = torch.randperm(len(padded))
        bins.add(
            some,
            padded[shuffle],
            bias=b,
            cutoff=torch.cat([cutoff[part], torch.rand(padding)])[shuffle],
            valid=valid[shuffle],
        )
        split += some
    assert torch.equal(split, whole)


@each_placement
def test_re_routing_the_batch_with_cutoffs_held_levels_the_load(bins: Bins) -> None:
    """Every expert takes k/E of the tokens, up to the mass of the bin where its quantile lies."""
    experts, k, tokens = 64, 6, 5000  # tokens * k / E is no whole number
    scores, b = stream(1, tokens=tokens, experts=experts)
    histogram, margins = count(bins, scores, b, k)
    found = bins.quantile(histogram, bias=b, top_k=k)
    load = (margins < found.value).sum(0)
    offset = found.value - (b if bins.placement is BinPlacement.centred else 0)
    inside = torch.searchsorted(bins.edges(b), offset.contiguous(), right=True)
    mass = histogram.gather(1, inside.unsqueeze(1)).squeeze(1).clamp(min=1)
    before = (scores + b > (margins + scores)).sum(0)
    assert (before - tokens * k / experts).abs().max() > 1000
    assert ((load - tokens * k / experts).abs() <= mass).all()


@each_placement
def test_what_is_out_of_range_is_counted(bins: Bins) -> None:
    histogram = bins.zeros(2)
    scores = torch.tensor([[9.0, 0.5], [-9.0, 0.5], [0.5, 0.5]])  # not in [0, 1]
    bins.add(histogram, scores, bias=torch.zeros(2), cutoff=torch.full((3,), 0.5))
    assert histogram.sum(1).tolist() == [3, 3]
    found = bins.quantile(histogram, bias=torch.zeros(2), top_k=1)
    assert found.out_of_range == 2
    assert found.value.isfinite().all()


@each_placement
def test_a_wider_span_holds_other_scores(bins: Bins) -> None:
    wide = Bins(bins.number, bins.placement, span=20.0)
    scores = torch.rand(100, 8) * 20 - 10
    b = torch.randn(8)
    histogram, margins = count(wide, scores, b, 2)
    found = wide.quantile(histogram, bias=b, top_k=2)
    assert found.out_of_range == 0
    assert (found.value - quantile_exact(margins, top_k=2)).abs().max() < found.width


def test_the_exact_quantile_is_torchs_and_leaves_padding_out() -> None:
    margins = torch.randn(37, 5)
    expected = torch.quantile(margins.double(), 2 / 5, dim=0)
    torch.testing.assert_close(quantile_exact(margins, top_k=2), expected, rtol=0, atol=1e-12)
    padded = torch.cat([margins, torch.randn(9, 5)])
    valid = torch.arange(46) < 37
    assert torch.equal(
        quantile_exact(padded, top_k=2, valid=valid), quantile_exact(margins, top_k=2)
    )


def test_the_next_bias_is_the_formula() -> None:
    scores, b = stream(3, tokens=60, experts=8)
    margins = select_top_k(scores.double() + b, 3).cutoff.unsqueeze(1) - scores
    value = quantile_exact(margins, top_k=3)
    new = next_bias(value, bias=b, top_k=3, tokens=torch.tensor(60))
    torch.testing.assert_close(new.double(), reference.next_bias(scores, b, 3), rtol=0, atol=1e-7)
    assert new.dtype is torch.float32
    assert torch.equal(next_bias(value, bias=b, top_k=3, tokens=torch.tensor(0)), b)


@pytest.mark.parametrize("number", [1, 127])
def test_centred_bins_come_in_pairs(number: int) -> None:
    with pytest.raises(ValueError, match=f"number={number}"):
        Bins(number, BinPlacement.centred)


@pytest.mark.parametrize("number", [2, 16, 30, 64, 256, 1000, 4096])
def test_any_even_number_of_centred_bins(number: int) -> None:
    bins = Bins(number, BinPlacement.centred)
    scores, b = stream(5, tokens=300, experts=10)
    histogram, margins = count(bins, scores, b, 2)
    found = bins.quantile(histogram, bias=b, top_k=2)
    assert found.out_of_range == 0
    assert (found.value - quantile_exact(margins, top_k=2)).abs().max() < found.width + ROUNDING
