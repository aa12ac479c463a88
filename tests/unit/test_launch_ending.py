"""When a launcher starts a run again, and when it leaves it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch.ending import Verdict, judge, saved_step


def end(folder: Path, code: int | None, reason: str = "x", *, step: int = 0) -> None:
    """What ranks leave behind."""
    if code is None:
        (folder / "exit.json").unlink(missing_ok=True)
    else:
        record = {"code": code, "reason": reason, "step": step}
        (folder / "exit.json").write_text(json.dumps(record))
    if step:
        (folder / "checkpoints").mkdir(exist_ok=True)
        (folder / "checkpoints" / "latest").write_text(f"step_{step:08d}\n")


def look(
    folder: Path,
    *,
    asked: bool = False,
    resume: bool = False,
    launch: str = "a",
    host: str = "",
) -> Verdict:
    return judge(folder, launch=launch, asked=asked, resume=resume, limit=2, host=host)


@pytest.mark.parametrize(
    ("code", "reason", "again", "again_on_slurm"),
    [
        (0, "all steps are done", False, False),
        (10, "SIGTERM", False, True),
        (10, "stop file", False, False),
        (10, "next_stage", True, True),
        (20, "wrong", False, False),
        (30, "damaged", False, False),
        (40, "nan", False, False),
        (50, "nothing was finished", True, True),
        (None, "", True, True),
    ],
)
def test_each_ending_has_its_answer(
    code: int | None, reason: str, again: bool, again_on_slurm: bool, tmp_path: Path
) -> None:
    end(tmp_path, code, reason)
    verdict = look(tmp_path)
    assert verdict.again is again
    assert verdict.code == (1 if code is None else code)
    assert look(tmp_path, resume=True, launch="b").again is again_on_slurm


def test_a_launcher_that_was_told_to_stop_starts_nothing(tmp_path: Path) -> None:
    end(tmp_path, None)
    verdict = look(tmp_path, asked=True)
    assert (verdict.again, verdict.code) == (False, 1)
    assert "told to stop" in verdict.why


def test_nor_does_it_start_a_next_stage_then(tmp_path: Path) -> None:
    end(tmp_path, 10, "next_stage", step=5)
    assert not look(tmp_path, asked=True).again
    assert look(tmp_path, asked=True, resume=True).again, "a job goes on in its next slice of time"


def test_launchers_of_many_hosts_do_not_count_each_other(tmp_path: Path) -> None:
    for step in (5, 10):
        end(tmp_path, 10, "next_stage", step=step)
        assert all(look(tmp_path, host=f"host{number}").again for number in range(5))


def test_two_restarts_without_a_checkpoint_end_it_and_progress_starts_anew(tmp_path: Path) -> None:
    end(tmp_path, None)
    assert look(tmp_path).again
    assert look(tmp_path).again
    end(tmp_path, None, step=5)
    assert "restart 3 goes on after step 5" in look(tmp_path).why
    assert look(tmp_path).again
    verdict = look(tmp_path)
    assert not verdict.again
    assert verdict.code == 1
    assert "2 restarts brought no checkpoint after step 5" in verdict.why
    assert look(tmp_path, launch="b").again, "another launch counts for itself"
    # Stopping in time each time and never getting anywhere is no progress either.
    end(tmp_path, 10, "SIGUSR1", step=5)
    answers = [look(tmp_path, resume=True, launch="c").again for _ in range(3)]
    assert answers == [True, True, False]


def test_a_pointer_that_says_nothing_is_step_0(tmp_path: Path) -> None:
    assert saved_step(tmp_path) == 0
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest").write_text("something\n")
    assert saved_step(tmp_path) == 0
