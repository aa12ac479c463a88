"""What counts as a bad step, and what is done about it."""

from __future__ import annotations

import json
import math

import pytest

from megatron_ext.config.operations import HealthAction, ResilienceOptions
from megatron_ext.resilience.health import Health, Verdict


def health(**options: object) -> Health:
    return Health(ResilienceOptions(window_steps=8, **options))  # type: ignore[arg-type]


def feed(judge: Health, losses: list[float], *, norm: float = 1.0) -> None:
    for loss in losses:
        judge.note(judge.judge(loss=loss, grad_norm=norm), loss=loss, grad_norm=norm)


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (math.inf, 1.0), (2.0, -math.inf)])
def test_what_is_not_finite_follows_its_policy(loss: float, norm: float) -> None:
    for action in (HealthAction.skip, HealthAction.rewind, HealthAction.halt):
        verdict = health(nonfinite=action).judge(loss=loss, grad_norm=norm)
        assert (verdict.action, verdict.nonfinite) == (action, True)


def test_a_spike_is_far_above_the_recent_losses_and_scatter_is_none() -> None:
    judge = health(loss_spike=HealthAction.skip)
    assert judge.judge(loss=1e9, grad_norm=1.0).action is HealthAction.ignore, "no past yet"
    feed(judge, [3.0, 3.1, 2.9, 3.05, 2.95])
    assert judge.judge(loss=3.4, grad_norm=1.0).action is HealthAction.ignore
    verdict = judge.judge(loss=5.0, grad_norm=1.0)
    assert verdict.action is HealthAction.skip
    assert "the loss 5.0000 is above 3." in verdict.why
    flat = health(loss_spike=HealthAction.skip)
    feed(flat, [3.0] * 8)
    assert flat.judge(loss=3.1, grad_norm=1.0).action is HealthAction.ignore, "a converged model"


def test_an_exploding_norm_has_a_policy_of_its_own() -> None:
    judge = health(norm_spike=HealthAction.rewind)
    feed(judge, [3.0] * 8)
    assert judge.judge(loss=3.0, grad_norm=9.0).action is HealthAction.ignore
    verdict = judge.judge(loss=3.0, grad_norm=11.0)
    assert verdict.action is HealthAction.rewind
    assert "11 is above 10 x 1" in verdict.why


def test_the_gravest_finding_counts() -> None:
    judge = health(loss_spike=HealthAction.halt, norm_spike=HealthAction.skip)
    feed(judge, [3.0] * 8)
    assert judge.judge(loss=9.0, grad_norm=99.0).action is HealthAction.halt


def test_skipped_steps_leave_the_past_as_it_is_and_too_many_halt() -> None:
    judge = health(loss_spike=HealthAction.skip, max_skips=2)
    feed(judge, [3.0] * 8)
    before = judge.state()
    for _ in range(2):
        verdict = judge.limited(judge.judge(loss=9.0, grad_norm=1.0))
        assert verdict.action is HealthAction.skip
        judge.note(verdict, loss=9.0, grad_norm=1.0)
    assert judge.state()["losses"] == before["losses"]
    assert judge.skipped == 2
    assert judge.limited(Verdict(HealthAction.skip, "x")).action is HealthAction.halt
    feed(judge, [3.0])
    assert judge.limited(Verdict(HealthAction.skip, "x")).action is HealthAction.skip


def test_a_resumed_run_judges_as_the_uninterrupted_one() -> None:
    judge = health(loss_spike=HealthAction.warn)
    feed(judge, [3.0, 3.2, 2.8, 3.1, 2.9, 3.0, 9.0])
    again = health(loss_spike=HealthAction.warn)
    again.restore(json.loads(json.dumps(judge.state())))
    assert again.state() == judge.state()
    assert judge.spikes == 1
    assert again.judge(loss=4.0, grad_norm=1.0) == judge.judge(loss=4.0, grad_norm=1.0)
    again.restore({})
    assert again.state() == health().state()
