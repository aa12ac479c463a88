"""Sampling of text from logits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_ext.inference.generate import choose, sample


def counting(tokens: list[int]) -> Tensor:
    """Logits that like the successor of the last token best, its double second."""
    logits = torch.zeros(16)
    logits[(2 * tokens[-1]) % 16] = 5.0
    logits[(tokens[-1] + 1) % 16] = 6.0
    return logits


def draw(**changes: object) -> list[int]:
    arguments = {"max_new_tokens": 8, "temperature": 1.0, "top_k": 0, "seed": 1, "eod": None}
    return sample(counting, [3], **{**arguments, **changes})  # type: ignore[arg-type]


def test_greedy_takes_the_likeliest_and_ends_before_eod() -> None:
    assert draw(temperature=0.0) == [4, 5, 6, 7, 8, 9, 10, 11]
    assert draw(temperature=0.0, eod=7) == [4, 5, 6]
    assert draw(temperature=0.0, max_new_tokens=0) == []
    tied = torch.tensor([1.0, 2.0, 2.0])
    assert choose(tied, temperature=0.0, top_k=0, generator=None) == 1


def test_the_same_seed_gives_the_same_text_and_another_seed_another() -> None:
    before = torch.get_rng_state()
    assert draw(temperature=3.0) == draw(temperature=3.0)
    assert len({tuple(draw(temperature=3.0, seed=seed)) for seed in range(8)}) > 4
    # Generation leaves the global random state alone.
    assert torch.equal(before, torch.get_rng_state())


def test_top_k_keeps_exactly_the_k_likeliest() -> None:
    assert draw(top_k=1) == draw(temperature=0.0)
    generator = torch.Generator().manual_seed(0)
    logits = torch.tensor([0.0, 3.0, 1.0, 3.0, -1.0])
    seen = {choose(logits, temperature=9.0, top_k=2, generator=generator) for _ in range(200)}
    assert seen == {1, 3}
    wide = {choose(logits, temperature=9.0, top_k=99, generator=generator) for _ in range(400)}
    assert wide == {0, 1, 2, 3, 4}


def test_frequencies_follow_the_softmax_at_the_temperature() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.tensor([1.0, 0.0, -float("inf"), 2.0], dtype=torch.bfloat16)
    count = 4000
    drawn = [choose(logits, temperature=0.7, top_k=0, generator=generator) for _ in range(count)]
    expected = torch.softmax(logits.double() / 0.7, dim=0)
    observed = torch.bincount(torch.tensor(drawn), minlength=4) / count
    # Four standard deviations of a binomial share: sqrt(p (1 - p) / n) is at most 0.0079.
    assert (observed - expected).abs().max() < 0.032
    assert observed[2] == 0


def test_wrong_arguments_and_broken_logits_are_refused() -> None:
    with pytest.raises(ValueError, match="prompt_tokens: empty"):
        sample(counting, [], max_new_tokens=1, temperature=1.0, top_k=0, seed=0, eod=None)
    for changes in ({"temperature": -1.0}, {"top_k": -1}, {"max_new_tokens": -1}):
        with pytest.raises(ValueError, match="may be below 0"):
            draw(**changes)
    for logits in (torch.tensor([1.0, float("nan")]), torch.full((3,), -float("inf"))):
        with pytest.raises(ValueError, match="logits: NaN or nothing finite"):
            choose(logits, temperature=0.0, top_k=0, generator=None)
