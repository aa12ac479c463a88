"""A curriculum that is killed anywhere, or walked a stage at a time, is the uninterrupted walk.

Its stages differ in length, packing and schedule, with two ranks in their layout too.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_ext.observe.report import plots
from megatron_ext.observe.report.run_data import read_run
from tests.dist.test_resume import TINY, reproducible_rows, row_count, rows, tensors_of
from tests.support.runs import QUIET, ROOT, Launcher, Run

STAGES = ("stage_64", "stage_256", "stage_1k", "stage_4k")
BATCH, STEPS = 1024, 2  # of each stage; shorter than the experiment's, to take seconds
OWN = ("data.sequence_length", "train.batch_tokens", "train.micro_batch", "checkpoint", "optim")
COMMAND = [
    "experiment=nano_curriculum",
    *(word for word in TINY if not word.startswith(OWN)),
    f"train.batch_tokens={BATCH}",
    "evaluate.interval_tokens=0",
    "evaluate.length_factors=[]",  # a test of its own has them
    "data.held_out=0.05",
    "checkpoint.interval=1",
    "optim.warmup_tokens=0",
    f"optim.decay_tokens={BATCH}",
    f"curriculum.stages.stage_64.train.steps={STEPS}",
    "curriculum.stages.stage_256.data.sequence_length=128",
    "curriculum.stages.stage_1k.data.sequence_length=256",
    "curriculum.stages.stage_4k.data.sequence_length=1024",
]
LAYOUTS = [
    "curriculum.stages.stage_256.parallel.tensor=2",
    "curriculum.stages.stage_4k.parallel.context=2",
    "~curriculum.stages.stage_1k",
]


@pytest.fixture(scope="module")
def uninterrupted(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    run = launch(launcher, folder)
    assert run.wait() == 0, run.text
    return folder


def launch(launcher: Launcher, folder: Path, *more: str) -> Run:
    return launcher.start([*COMMAND, f"run.dir={folder}", *more], output=folder.with_suffix(".out"))


def ending(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "exit.json").read_text())
    return found


def assert_same_walk(folder: Path, reference: Path, *, last: int = 8) -> None:
    assert reproducible_rows(folder) == reproducible_rows(reference)
    assert (folder / "checkpoints" / "latest").read_text() == f"step_{last:08d}\n"
    ours, theirs = tensors_of(folder), tensors_of(reference)
    assert ours.keys() == theirs.keys()
    assert sum("exp_avg_sq" in name for name in ours) > 10
    assert [name for name in ours if not ours[name].equal(theirs[name])] == []


def test_one_process_walks_all_stages(uninterrupted: Path) -> None:
    found = rows(uninterrupted)
    assert [row["stage"] for row in found] == [name for name in STAGES for _ in range(STEPS)]
    assert [row["step"] for row in found] == list(range(1, 9))
    assert [row["tokens"] for row in found] == [BATCH * step for step in range(1, 9)]
    # Each schedule from its first step: the peak, then the end of its decay.
    peaks = (3e-3, 1e-3, 5e-4, 2e-4)
    expected = [rate for peak in peaks for rate in (peak, peak * 0.1)]
    assert [row["lr"] for row in found] == pytest.approx(expected)
    assert found[-1]["loss"] < found[0]["loss"]
    assert ending(uninterrupted) == {"code": 0, "reason": "all steps are done", "step": 8}
    # The held-out loss before each stage, also with every document alone, and after it.
    before = [row["step"] for row in found if "eval/before/loss" in row]
    assert (
        before == [row["step"] for row in found if "eval/before/apart/loss" in row] == [1, 3, 5, 7]
    )
    assert [row["step"] for row in found if "eval/apart/loss" in row] == [2, 4, 6, 8]
    assert found[-1]["eval/apart/loss"] != found[-1]["eval/loss"]
    text = uninterrupted.with_suffix(".out").read_text()
    assert text.count("with its own schedule") == 3
    # Of the whole walk, not of the stage that came last.
    saved = yaml.safe_load((uninterrupted / "config.yaml").read_text())
    assert saved["curriculum"]["stage"] is None
    assert tuple(saved["curriculum"]["stages"]) == STAGES
    assert saved["data"]["sequence_length"] != 1024


def test_a_walk_killed_at_random_is_the_uninterrupted_one(
    launcher: Launcher, uninterrupted: Path, tmp_path: Path
) -> None:
    chance, folder = random.Random(0), tmp_path / "run"
    for _ in range(3):
        run, wanted = launch(launcher, folder), row_count(folder) + chance.randint(0, 3)
        code = run.kill_when(
            _grown(folder, wanted - 1), after=chance.uniform(0, 0.3), whole_group=True
        )
        assert code in (-9, 0), run.text
        # A kill between two stages finds what a launcher needs, any other one nothing.
        if code and (folder / "exit.json").exists():
            assert ending(folder)["reason"] == "next_stage"
    last = launch(launcher, folder)
    assert last.wait() == 0, last.text
    assert_same_walk(folder, uninterrupted)


def test_a_stop_at_the_end_of_a_stage_is_obeyed(
    launcher: Launcher, uninterrupted: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    stopped = launcher.start(
        [*COMMAND, f"run.dir={folder}"],
        output=tmp_path / "stopped.out",
        before=f"tests.support.incidents:stop_after_saving:{STEPS}",
    )
    assert stopped.wait() == 10, stopped.text
    assert ending(folder) == {"code": 10, "reason": "stop file", "step": STEPS}
    assert not (folder / "stop").exists()
    rest = launch(launcher, folder)
    assert rest.wait() == 0, rest.text
    assert_same_walk(folder, uninterrupted)


def test_stages_one_by_one_are_the_walk(
    launcher: Launcher, uninterrupted: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    early = launch(launcher, folder, "stage=256")
    assert early.wait() == 20
    assert "goes on from a stage before it" in early.text
    for name in ("64", "256"):
        run = launch(launcher, folder, f"stage={name}")
        assert run.wait() == 0, run.text
        assert rows(folder)[-1]["stage"] == f"stage_{name}"
    back = launch(launcher, folder, "stage=64")
    assert back.wait() == 20
    assert "is at stage_256 already" in back.text
    again = launch(launcher, folder, "stage=256")
    assert again.wait() == 0
    assert "curriculum.stages.stage_256.train.steps=3" in again.text
    rest = launch(launcher, folder)
    assert rest.wait() == 0, rest.text
    assert_same_walk(folder, uninterrupted)
    other = launcher.start([*TINY, f"run.dir={folder}"], output=tmp_path / "other.out")
    assert other.wait() == 20
    assert "is of stage_4k; give the experiment" in other.text
    check_evaluation_by_length(launcher, folder)


def check_evaluation_by_length(launcher: Launcher, folder: Path) -> None:
    """The same numbers on one rank and on two that share each sequence."""
    words = ["stage=4k", "run.mode=evaluate", "evaluate.lengths=[128,256]"]
    long = launch(launcher, folder, *words[:2], "evaluate.lengths=[99999999]")
    assert long.wait() == 20
    assert "would be seen twice" in long.text
    plain = launch(launcher, folder, *words)
    assert plain.wait() == 0, plain.text
    assert f"loss {rows(folder)[-1]['eval/loss']:.4f}" in plain.text
    ranks = launcher.start_ranks(
        [*COMMAND, f"run.dir={folder}", *words, "curriculum.stages.stage_4k.parallel.context=2"],
        ranks=2,
        output=folder.with_suffix(".two"),
    )
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].text
    one, two = (
        [line.split() for line in text.splitlines() if re.match("(retrieval|context) at", line)]
        for text in (plain.text, ranks[0].text)
    )
    assert [" ".join(line[:4]) for line in one] == [
        f"{kind} at {length} tokens:" for length in (128, 256) for kind in ("retrieval", "context")
    ]
    assert one[0][4::2] == ["0", "25", "50", "75", "100", "absent"]
    assert one[1][4::2] == ["whole", "half", "quarter"]
    for mine, theirs in zip(one, two, strict=True):
        expected = [float(value) for value in mine[5::2]]
        assert [float(value) for value in theirs[5::2]] == pytest.approx(expected, abs=2e-4)


def test_keys_are_looked_for_at_the_length_of_each_stage_and_four_times_that(
    launcher: Launcher, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    words = [
        "evaluate.length_factors=[1,4]",
        "evaluate.probes=1",
        "curriculum.stages.stage_256.data.sequence_length=256",
    ]
    words += ["~curriculum.stages.stage_4k", "~curriculum.stages.stage_1k"]
    # A length that the data has not is refused before the first step, not when its stage comes.
    early = launch(launcher, folder, *words, "curriculum.stages.stage_256.evaluate.lengths=[99999]")
    assert early.wait() == 20
    assert "stage_256: evaluate.lengths: 99999: in a text of more than" in early.text
    assert row_count(folder) == 0
    run = launch(launcher, folder, *words)
    assert run.wait() == 0, run.text
    found = rows(folder)
    prefix = "eval/retrieval/"
    measured = [{name for name in row if name.startswith(prefix)} for row in found]
    depths = ("0", "25", "50", "75", "100", "absent")
    # At 256 before the switch to it and after.
    assert measured == [
        set(),
        {f"{prefix}{length}/{depth}" for length in (64, 256) for depth in depths},
        set(),
        {f"{prefix}{length}/{depth}" for length in (256, 1024) for depth in depths},
    ]
    key = f"{prefix}256/50"
    assert found[1][key] != found[3][key], "two steps lie between"
    (plot,) = [p for p in plots.sections(read_run(folder))[0][1] if p.key == "retrieval"]
    assert plot.points == 2 * 2 * 4, "two lengths a switch, at three depths and absent"


def walk(launcher: Launcher, folder: Path, *, kill_in: int = 0) -> list[str]:
    """Repeat the command of two ranks until it is done; reasons of the endings on the way.

    Both ranks are killed after the first row of launch `kill_in`.
    """
    reasons = []
    for number in range(1, 8):
        begun = row_count(folder)
        ranks = launcher.start_ranks(
            [*COMMAND, *LAYOUTS, f"run.dir={folder}"], ranks=2, output=folder.with_suffix(".out")
        )
        if number == kill_in:
            ranks[0].kill_when(_grown(folder, begun), after=0.02, whole_group=True)
            ranks[1].kill_when(lambda: True, after=0, whole_group=True)
            assert not (folder / "exit.json").exists()
            continue
        codes = {rank.wait() for rank in ranks}
        assert codes <= {0, 10}, ranks[0].text
        reasons.append(ending(folder)["reason"])
        if codes == {0}:
            return reasons
        assert "else repeat\n             torchrun --standalone" in ranks[0].text
    raise AssertionError(reasons)


def _grown(folder: Path, rows_before: int) -> Callable[[], bool]:
    return lambda: row_count(folder) > rows_before


def test_two_ranks_change_their_layout_at_every_stage(
    launcher: Launcher, uninterrupted: Path, tmp_path: Path
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    expected = ["next_stage", "next_stage", "all steps are done"]
    assert walk(launcher, whole / "run") == expected
    assert walk(launcher, killed / "run", kill_in=2) == expected
    assert_same_walk(killed / "run", whole / "run", last=6)
    # The same model as on one rank: the layout changes sums only.
    for mine, theirs in zip(rows(whole / "run")[:4], rows(uninterrupted)[:4], strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        assert mine["tokens"] == theirs["tokens"]


def test_a_launcher_starts_the_next_stage(uninterrupted: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = [*COMMAND, f"run.dir={folder}", "launch.ranks_per_node=1", "run.fresh=true"]
    words += ["curriculum.stages.stage_256.parallel.distributed_optimizer=false"]
    words += ["~curriculum.stages.stage_4k", "~curriculum.stages.stage_1k"]
    result = subprocess.run(
        [sys.executable, "-m", "launch.local", *words],
        cwd=ROOT,
        env={**os.environ, **QUIET},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "launch: next stage; restart 1 goes on after step 2" in result.stderr
    assert ending(folder)["code"] == 0
    found, expected = rows(folder), rows(uninterrupted)[:4]
    assert [row["stage"] for row in found] == [row["stage"] for row in expected]
    # An optimizer that is not sharded sums the norm in another order.
    losses = [row["loss"] for row in found]
    assert losses == pytest.approx([row["loss"] for row in expected], rel=1e-5)


def test_a_stage_may_blend_otherwise_and_resumes(launcher: Launcher, tmp_path: Path) -> None:
    def sources(**weights: float) -> str:
        each = (f"{{name:{n},path:data/sample/{n},weight:{w}}}" for n, w in weights.items())
        return f"[{','.join(each)}]"

    words = [
        "~curriculum.stages.stage_4k",
        "~curriculum.stages.stage_1k",
        f"curriculum.stages.stage_64.data.sources={sources(prose=1)}",
        f"curriculum.stages.stage_256.data.sources={sources(code=3, prose=1)}",
    ]
    folder, copy = tmp_path / "run", tmp_path / "copy"
    whole = launch(launcher, folder, *words)
    assert whole.wait() == 0, whole.text
    assert ["loss/code" in row for row in rows(folder)] == [False, False, True, True]
    shutil.copytree(folder, copy)
    (copy / "checkpoints" / "latest").write_text("step_00000003\n")
    again = launch(launcher, copy, *words)
    assert again.wait() == 0, again.text
    assert_same_walk(copy, folder, last=4)
    extras = [
        json.loads((folder / "checkpoints" / f"step_{step:08d}" / "extra.json").read_text())
        for step in (2, 3, 4)
    ]
    kept = [extra["data"] for extra in extras]
    assert [data["begin"] for data in kept] == [0, 2 * BATCH, 2 * BATCH]
    assert kept[1]["begun"] == kept[0]["places"]
    # Losses of other data are no measure for spikes.
    assert [len(extra["health"]["losses"]) for extra in extras] == [2, 1, 2]
