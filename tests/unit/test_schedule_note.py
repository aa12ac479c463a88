"""A resumed run says when another length of the run moves its learning rate."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from megatron_ext.config.schema import OptimOptions, Schedule
from megatron_ext.train.curriculum import WHOLE_RUN, Stage
from megatron_ext.train.main import schedule_note


def state(**optim: Any) -> Any:
    config = SimpleNamespace(optim=OptimOptions(lr=1e-3, **optim))
    return SimpleNamespace(
        config=config, tokens=100, total_tokens=200, schedule_tokens=200, stage=WHOLE_RUN
    )


def test_a_longer_run_says_what_happens_to_the_rate() -> None:
    note = schedule_note(state(), {"total_tokens": 100})
    assert "ends at 200 tokens instead of 100" in note
    assert "from 1.00e-04 to 5.50e-04" in note
    assert "optim.schedule_tokens=100" in note


def test_nothing_is_said_where_nothing_changes() -> None:
    assert schedule_note(state(), {"total_tokens": 200}) == ""
    assert schedule_note(state(), {}) == ""
    assert schedule_note(state(schedule_tokens=300), {"total_tokens": 100}) == ""
    assert schedule_note(state(schedule=Schedule.constant), {"total_tokens": 100}) == ""


def test_a_stage_counts_its_schedule_from_its_own_beginning() -> None:
    inside = state()
    inside.stage, inside.schedule_tokens = Stage("stage_b", 5, 60), 140
    assert schedule_note(inside, {"total_tokens": 60}).startswith("; stage_b begins")
    saved = {"total_tokens": 150, "stage": inside.stage.extra()}
    assert "ends at 140 tokens instead of 90" in schedule_note(inside, saved)
