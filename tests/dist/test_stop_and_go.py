"""Signals, bad steps, hangs and dead ranks: how a run ends, what it leaves, how it goes on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.dist.test_resume import TINY, reproducible_rows, row_count, rows
from tests.support.runs import Launcher, Run

STEPS = 12
COMMAND = [*TINY, f"train.steps={STEPS}", "checkpoint.interval=5"]
SLOW = "tests.support.incidents:slow:0.05"


@pytest.fixture(scope="module")
def uninterrupted(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    run = launch(launcher, folder)
    assert run.wait() == 0, run.text
    return folder


def launch(launcher: Launcher, folder: Path, *words: str, before: str = "", **env: str) -> Run:
    words = (*COMMAND, f"run.dir={folder}", *words)
    return launcher.start(words, output=folder.with_suffix(".out"), before=before, env=env)


def ending(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "exit.json").read_text()))


def latest(folder: Path) -> str:
    return (folder / "checkpoints" / "latest").read_text().strip()


@pytest.mark.parametrize("way", ["SIGTERM", "SIGINT", "stop file"])
def test_a_run_that_is_asked_to_stop_saves_and_goes_on_as_if_it_had_not(
    way: str, launcher: Launcher, uninterrupted: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    run = launch(launcher, folder, before=SLOW)
    if way == "stop file":
        while row_count(folder) < 2:
            assert not (folder / "exit.json").exists(), run.text
        (folder / "stop").touch()
    else:
        run.signal_when(lambda: row_count(folder) >= 2, getattr(signal, way))
        if way == "SIGTERM":  # SLURM and torchrun both send one
            os.kill(run.pid, signal.SIGTERM)
    assert run.wait() == 10, run.text
    end = ending(folder)
    assert (end["code"], end["reason"]) == (10, way)
    assert 2 <= end["step"] < STEPS
    assert latest(folder) == f"step_{end['step']:08d}"
    assert f"step {end['step']} of {STEPS} is saved" in run.text
    assert not (folder / "stop").exists()
    again = launch(launcher, folder)
    assert again.wait() == 0, again.text
    assert ending(folder)["code"] == 0
    assert reproducible_rows(folder) == reproducible_rows(uninterrupted)


def test_a_last_evaluation_that_fails_costs_no_step_and_is_made_up_for(
    launcher: Launcher, uninterrupted: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    run = launch(launcher, folder, before="tests.support.incidents:fail_last_evaluation:x")
    assert run.wait() == 1, run.text
    assert "no evaluation today" in run.text
    assert not (folder / "exit.json").exists(), "a crash"
    assert latest(folder) == f"step_{STEPS:08d}"
    assert "eval/loss" not in rows(folder)[-1]
    again = launch(launcher, folder)
    assert again.wait() == 0, again.text
    assert f"resumes after step {STEPS}" in again.text
    assert reproducible_rows(folder) == reproducible_rows(uninterrupted)
    once_more = launch(launcher, folder)
    assert once_more.wait() == 0
    assert "this run is finished" in once_more.text


def test_a_save_file_saves_and_training_goes_on(launcher: Launcher, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    secret = {"WANDB_API_KEY": "0123456789abcdef", "HF_TOKEN": "hf_0123456789abcdef"}
    run = launch(launcher, folder, "checkpoint.interval=0", before=SLOW, **secret)
    while row_count(folder) < 1:
        pass
    (folder / "save").touch()
    assert run.wait() == 0, run.text
    saved = sorted(path.name for path in (folder / "checkpoints").glob("step_*"))
    assert len(saved) == 2
    assert not (folder / "save").exists()
    # What the environment keeps to itself stands nowhere.
    written = [run.output, *(path for path in folder.rglob("*") if path.is_file())]
    assert len(written) > 10
    assert not [path for path in written if b"0123456789abcdef" in path.read_bytes()]


def test_a_second_interrupt_ends_at_once_and_leaves_no_ending(
    launcher: Launcher, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    run = launch(launcher, folder, before="tests.support.incidents:slow:30")
    run.signal_when(lambda: (folder / "metrics.jsonl").exists(), signal.SIGINT)
    time.sleep(0.5)  # two that wait at once are one
    run.signal_when(lambda: True, signal.SIGINT)
    assert run.wait() != 0
    assert "KeyboardInterrupt" in run.text
    assert not (folder / "exit.json").exists()


def test_all_ranks_stop_when_one_is_asked_and_none_saves_when_one_is_dead(
    launcher: Launcher, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    words = [*COMMAND, "checkpoint.interval=0", f"run.dir={folder}"]

    def start() -> list[Run]:
        out = folder.with_suffix(".out")
        return launcher.start_ranks(words, ranks=2, output=out, before=SLOW)

    ranks = start()
    ranks[1].signal_when(lambda: row_count(folder) >= 2, signal.SIGUSR1)
    assert [rank.wait() for rank in ranks] == [10, 10], ranks[0].text
    end = ending(folder)
    assert (end["code"], end["reason"]) == (10, "SIGUSR1")
    saved = latest(folder)
    assert saved == f"step_{end['step']:08d}"

    begun = row_count(folder)
    ranks = start()
    ranks[1].signal_when(lambda: row_count(folder) > begun, signal.SIGKILL)
    os.kill(ranks[0].pid, signal.SIGTERM)  # as torchrun does when a rank has failed
    codes = [rank.wait() for rank in ranks]
    assert codes[1] == -9
    assert codes[0] not in (0, 10)
    assert not (folder / "exit.json").exists(), "a crash"
    assert latest(folder) == saved


def test_the_watchdog_says_which_rank_never_arrived(launcher: Launcher, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = [*COMMAND, f"run.dir={folder}", "resilience.hang_seconds=3"]
    ranks = launcher.start_ranks(
        words, ranks=2, output=folder.with_suffix(".out"), before="tests.support.incidents:hang:1"
    )
    assert [rank.wait() for rank in ranks] == [50, 50], ranks[0].text
    end = ending(folder)
    assert (end["code"], end["step"]) == (50, 2)
    assert "rank 1 on" in end["reason"]
    assert "not in a collective: tests/support/incidents.py" in end["reason"]
    assert "rank 1 never arrived where the others wait" in end["reason"]
    assert "rank 0 on" in end["reason"]
    assert "collectives of rank" in end["reason"]
    assert end["reason"] in ranks[0].text
    stack = json.loads((folder / "hang" / "rank_00001.json").read_text())["stack"]
    assert "sleeping" in "".join(stack)


def test_a_stopped_rank_is_named_by_the_others(launcher: Launcher, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = [*COMMAND, f"run.dir={folder}", "resilience.hang_seconds=3"]
    ranks = launcher.start_ranks(words, ranks=2, output=folder.with_suffix(".out"), before=SLOW)
    ranks[0].signal_when(lambda: row_count(folder) >= 2, signal.SIGSTOP)
    assert ranks[1].wait() == 50, ranks[1].text
    assert "rank 0: no report; stopped, dead" in ending(folder)["reason"]
    os.kill(ranks[0].pid, signal.SIGKILL)
    ranks[0].wait()


BAD = 6 * 256 + 200  # a token of step 7
NAN = f"tests.support.incidents:bad_data:{BAD}"


def test_a_halt_names_layer_rank_and_documents(launcher: Launcher, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = launch(launcher, folder, before=NAN)
    assert run.wait() == 40, run.text
    end = ending(folder)
    assert (end["code"], end["step"]) == (40, 6)
    # 200 tokens on: micro-batch 3 of two sequences of 32.
    for part in ("step 7: the loss is nan", "data tokens 1536 to 1791", "micro-batch 3: documents"):
        assert part in end["reason"]
    assert "decoder.layers.1.self_attention on rank 0" in end["reason"]
    assert latest(folder) == "step_00000005"


def test_a_skipped_step_changes_no_weight_and_counts(
    launcher: Launcher, uninterrupted: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    run = launch(launcher, folder, "resilience=skip", before=NAN)
    assert run.wait() == 0, run.text
    assert "warning: step 7: the loss is nan; its update is skipped" in run.text
    found, expected = rows(folder), rows(uninterrupted)
    assert found[6]["loss"] is None
    assert [row.get("health/skipped", 0) for row in found] == [0] * 6 + [1] * 6
    assert [row["tokens"] for row in found] == [row["tokens"] for row in expected]
    assert found[5]["loss"] == expected[5]["loss"]
    assert found[7]["loss"] != expected[7]["loss"]
    assert found[-1]["eval/loss"] == pytest.approx(expected[-1]["eval/loss"], rel=0.05)
    folder = tmp_path / "limit"
    run = launch(launcher, folder, "resilience=skip", "optim.lr=1e30", "resilience.max_skips=2")
    assert run.wait() == 40, run.text
    assert "2 steps in a row were skipped before" in ending(folder)["reason"]


def test_a_rewind_goes_round_the_data_and_a_resume_keeps_to_it(
    launcher: Launcher, uninterrupted: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    words = ["resilience=rewind", "resilience.rewind_steps=1"]
    run = launch(launcher, folder, *words, before=NAN)
    assert run.wait() == 0, run.text
    assert "went back to step 5 and leaves out (1536, 1792)" in run.text
    found, expected = rows(folder), rows(uninterrupted)
    assert [row["step"] for row in found] == list(range(1, STEPS + 1))
    assert [row.get("health/left_out_tokens", 0) for row in found] == [0] * 6 + [256] * 6
    # Step 6 again, the same; step 7 reads what would have been step 8's data.
    assert [row["loss"] for row in found[:6]] == [row["loss"] for row in expected[:6]]
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (copy / "checkpoints" / "latest").write_text("step_00000010\n")
    again = launch(launcher, copy, *words)
    assert again.wait() == 0, again.text
    assert reproducible_rows(copy) == reproducible_rows(folder)


def test_a_rewind_without_a_checkpoint_halts_and_says_so(
    launcher: Launcher, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    run = launch(launcher, folder, "resilience=rewind", "checkpoint.interval=10", before=NAN)
    assert run.wait() == 40, run.text
    assert "no checkpoint before it to go back to" in ending(folder)["reason"]


def test_a_restarted_launch_moves_the_old_run_aside_once(
    launcher: Launcher, uninterrupted: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(uninterrupted, folder)
    load = f"checkpoint.load={folder / 'checkpoints' / latest(folder)}"
    first = launch(launcher, folder, "run.fresh=true", load, before=SLOW, MEGATRON_EXT_LAUNCH="a")
    first.signal_when(
        lambda: row_count(folder) >= 2 and latest_step(folder) < STEPS, signal.SIGUSR1
    )
    assert first.wait() == 10, first.text
    assert f"starts with the weights of {tmp_path / 'run.1' / 'checkpoints'}" in first.text
    again = launch(launcher, folder, "run.fresh=true", load, MEGATRON_EXT_LAUNCH="a")
    assert again.wait() == 0, again.text
    assert "resumes after step" in again.text
    assert sorted(path.name for path in tmp_path.glob("run*") if path.is_dir()) == ["run", "run.1"]


def latest_step(folder: Path) -> int:
    return row_count(folder)


def test_torchrun_does_not_restart_what_has_ended(launcher: Launcher, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    env = {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_MAX_RESTARTS": "3"}
    run = launch(launcher, folder, before=NAN, **env)
    assert run.wait() == 40
    again = launch(launcher, folder, **env, TORCHELASTIC_RESTART_COUNT="1")
    assert again.wait() == 40
    assert "not restarted, since this launch ended by itself: step 7" in again.text
    assert ending(folder)["code"] == 40
    # Another launch is another matter.
    other = launch(launcher, folder, TORCHELASTIC_RUN_ID="next")
    assert other.wait() == 0, other.text
