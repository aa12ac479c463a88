"""A damaged checkpoint is never used: a resuming run says so and goes on from the newest sound one,
and whoever names it gets an error with the file, what was expected, found, and what to do."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

from tests.dist.test_resume import COMMAND, STEPS, reproducible_rows
from tests.support.damage import KINDS
from tests.support.runs import Launcher, Run

SHARD = "__0_0.distcp"


@pytest.fixture(scope="module")
def whole(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, with the checkpoints of steps 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    run = launch(launcher, folder)
    assert run.wait() == 0, run.text
    return folder


def launch(launcher: Launcher, folder: Path, *words: str) -> Run:
    return launcher.start(
        [*COMMAND, f"run.dir={folder}", *words], output=folder.with_suffix(".out")
    )


def step(folder: Path, number: int) -> Path:
    return folder / "checkpoints" / f"step_{number:08d}"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_a_resume_goes_back_to_the_newest_sound_one_and_says_so(
    launcher: Launcher, whole: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    KINDS["flip"](step(folder, STEPS) / SHARD, random.Random(0))
    run = launch(launcher, folder)
    assert run.wait() == 0, run.text
    assert "warning: damaged checkpoints, so the run goes back to step 4" in run.text
    assert f"{step(folder, STEPS) / SHARD}: expected " in run.text
    assert "put their files back from a copy" in run.text
    assert "resumes after step 4" in run.text
    assert reproducible_rows(folder) == reproducible_rows(whole)
    assert names(folder) == [
        "latest",
        *(
            f"step_{number:08d}{end}"
            for number, end in ((2, ""), (4, ""), (6, ""), (6, ".damaged"))
        ),
    ]


def test_with_no_sound_one_left_the_run_does_not_start_anew(
    launcher: Launcher, whole: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    for number in (2, 4, 6):
        KINDS["flip"](step(folder, number) / SHARD, random.Random(number))
    before = (folder / "metrics.jsonl").read_bytes(), names(folder)
    run = launch(launcher, folder)
    assert run.wait() == 30, run.text
    reason = json.loads((folder / "exit.json").read_text())["reason"]
    for part in ("no checkpoint there is sound", "from a copy", "run.fresh=true", "CRC-32"):
        assert part in run.text
        assert part in reason
    assert ((folder / "metrics.jsonl").read_bytes(), names(folder)) == before


def test_a_named_checkpoint_that_is_damaged_is_an_error(
    launcher: Launcher, whole: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    KINDS["flip"](step(folder, 6) / SHARD, random.Random(1))
    # Its weights alone, for another run.
    run = launch(launcher, tmp_path / "other", f"checkpoint.load={step(folder, 6)}")
    assert run.wait() == 30, run.text
    assert f"{step(folder, 6) / SHARD}: expected" in run.text
    assert "step_00000002, step_00000004" in run.text
    assert not (folder / "checkpoints" / "step_00000006.damaged").exists()
