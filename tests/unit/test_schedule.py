"""Properties of the learning-rate schedule."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest

from megatron_ext.config.schema import OptimOptions, Schedule
from megatron_ext.errors import ConfigError
from megatron_ext.optim.schedule import learning_rate

BASE = OptimOptions(lr=2.0, min_lr_ratio=0.25, warmup_tokens=100, decay_tokens=200)


def rate(schedule: Schedule, tokens: int, **changes: object) -> float:
    return learning_rate(replace(BASE, schedule=schedule, **changes), tokens, total_tokens=1000)


@pytest.mark.parametrize("schedule", list(Schedule))
def test_warm_up_is_linear_from_zero_and_ends_at_the_peak(schedule: Schedule) -> None:
    assert rate(schedule, 0) == 0.0
    assert rate(schedule, 25) == 0.5
    assert rate(schedule, 99) == pytest.approx(1.98)
    assert rate(schedule, 100) == 2.0


@pytest.mark.parametrize("schedule", list(Schedule))
def test_without_warm_up_the_first_step_has_the_peak(schedule: Schedule) -> None:
    assert rate(schedule, 0, warmup_tokens=0) == 2.0


def test_constant_stays_for_ever() -> None:
    assert {rate(Schedule.constant, t) for t in (100, 500, 1000, 10**12)} == {2.0}


def test_cosine_is_half_way_in_the_middle_and_ends_at_the_minimum() -> None:
    assert rate(Schedule.cosine, 550) == pytest.approx(0.5 * (2.0 + 0.5))
    assert rate(Schedule.cosine, 1000) == 0.5
    assert rate(Schedule.cosine, 5000) == 0.5


def test_wsd_is_stable_then_linear_then_at_the_minimum() -> None:
    assert rate(Schedule.wsd, 800) == 2.0
    assert rate(Schedule.wsd, 900) == pytest.approx(1.25)
    assert rate(Schedule.wsd, 1000) == 0.5
    assert rate(Schedule.wsd, 1001) == 0.5


def test_wsd_without_decay_is_constant() -> None:
    assert rate(Schedule.wsd, 1000, decay_tokens=0) == 2.0


@pytest.mark.parametrize("schedule", [Schedule.cosine, Schedule.wsd])
def test_never_rises_after_warm_up_and_stays_in_range(schedule: Schedule) -> None:
    rates = [rate(schedule, t) for t in range(100, 1200)]
    assert all(a >= b for a, b in pairwise(rates))
    assert all(0.5 <= r <= 2.0 for r in rates)


def test_schedule_tokens_make_it_independent_of_the_length_of_the_run() -> None:
    options = replace(BASE, schedule=Schedule.cosine, schedule_tokens=1000)
    assert learning_rate(options, 400, total_tokens=7) == rate(Schedule.cosine, 400)


def test_warm_up_as_long_as_the_schedule_is_allowed() -> None:
    for schedule in Schedule:
        value = rate(schedule, 1000, warmup_tokens=1000, decay_tokens=0)
        assert math.isfinite(value)
        assert value in (2.0, 0.5)


@pytest.mark.parametrize(
    ("schedule", "changes", "key"),
    [
        (Schedule.cosine, {"warmup_tokens": 1001}, "optim.warmup_tokens"),
        (Schedule.wsd, {"decay_tokens": 901}, "optim.decay_tokens"),
        (Schedule.wsd, {"decay_tokens": -1}, "optim.decay_tokens"),
        (Schedule.constant, {"warmup_tokens": -1}, "optim.warmup_tokens"),
        (Schedule.cosine, {"schedule_tokens": 0}, "optim.schedule_tokens"),
        (Schedule.cosine, {"min_lr_ratio": 1.5}, "optim.min_lr_ratio"),
        (Schedule.cosine, {"lr": math.nan}, "optim.lr"),
    ],
)
def test_impossible_schedules_are_named(
    schedule: Schedule, changes: dict[str, object], key: str
) -> None:
    with pytest.raises(ConfigError, match=key):
        rate(schedule, 0, **changes)
