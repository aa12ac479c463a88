"""Top-k selection: exactly k experts, the largest ones, and ties that favour nobody."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.ops.quantile import reference, select_top_k


@given(st.integers(0, 2**31), st.integers(1, 40), st.integers(1, 12), st.integers(1, 5))
@settings(deadline=None)
def test_equals_the_loop_over_tokens(seed: int, tokens: int, experts: int, levels: int) -> None:
    # Few levels: most rows have ties, at the cut-off and elsewhere.
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(levels, (tokens, experts), generator=generator).double()
    for k in range(1, experts + 1):
        chosen = select_top_k(scores, k)
        map, cutoff = reference.top_k(scores, k)
        assert torch.equal(chosen.map, map)
        assert torch.equal(chosen.cutoff, cutoff)
        assert (chosen.map.sum(1) == k).all()


@pytest.mark.parametrize(("experts", "k"), [(896, 16), (64, 6), (10, 4), (7, 7)])
def test_equal_scores_load_all_experts_alike(experts: int, k: int) -> None:
    load = select_top_k(torch.full((experts * 3, experts), 0.5), k).map.sum(0)
    assert (load == 3 * k).all()


def test_two_tied_experts_share_whatever_lies_between_them() -> None:
    scores = torch.zeros(1000, 16)
    scores[:, [3, 4]] = 1.0
    scores[:, 9] = 2.0
    load = select_top_k(scores, 2).map.sum(0)
    assert load[[3, 4, 9]].tolist() == [500, 500, 1000]


def test_a_token_keeps_its_choice_wherever_it_is_computed() -> None:
    scores = torch.randint(3, (64, 12), generator=torch.Generator().manual_seed(0)).float()
    places = torch.arange(64)
    whole = select_top_k(scores, 4).map
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    parts = [
        select_top_k(scores[part], 4, positions=places[part]).map
        for part in order.split([1, 40, 23])
    ]
    assert torch.equal(torch.cat(parts), whole[order])


def test_the_cutoff_of_all_experts_is_finite() -> None:
    scores = torch.rand(8, 5)
    chosen = select_top_k(scores, 5)
    assert chosen.map.all()
    assert torch.equal(chosen.cutoff, scores.min(1).values)


def test_nan_comes_after_all_numbers_and_every_row_has_its_experts() -> None:
    scores = torch.rand(8, 5)
    scores[:, 2] = torch.nan
    scores[3] = torch.nan
    taken = select_top_k(scores, 2).map
    assert (taken.sum(1) == 2).all()
    assert taken[:, 2].sum() == int(taken[3, 2])


def test_no_tokens() -> None:
    chosen = select_top_k(torch.empty(0, 5), 2)
    assert (chosen.map.shape, chosen.cutoff.shape) == ((0, 5), (0,))
