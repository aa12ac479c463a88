"""A real SLURM on this machine: submitted, signalled, out of time, put back - and the run goes on.

Skipped, with the reason, where SLURM is not installed or the user is not root.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.dist.test_curriculum import BATCH, COMMAND
from tests.dist.test_resume import TINY, reproducible_rows, row_count, rows, wait_for
from tests.support import wandb_offline
from tests.support.runs import QUIET, ROOT, torchrun
from tests.support.slurm_cluster import Cluster, missing, slurm

pytestmark = pytest.mark.skipif(missing() != "", reason=missing())
LAUNCH = ["launch.exclusive=false", "launch.ranks_per_node=2", "launch.snapshot=false"]
WORDS = [*TINY, "evaluate.interval_tokens=0", "checkpoint.interval=1000", *LAUNCH]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with slurm(tmp_path_factory.mktemp("slurm") / "cluster") as running:
        running.environment |= QUIET
        yield running


def submit(cluster: Cluster, *words: str) -> list[str]:
    """`launch.submit --go` as a person calls it; numbers of the jobs."""
    done = subprocess.run(
        [sys.executable, "-m", "launch.submit", "--go", *words],
        cwd=ROOT,
        env=cluster.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return re.findall(r"^job (\d+): ", done.stdout, re.MULTILINE)


def output(folder: Path) -> str:
    return "\n".join(p.read_text() for p in folder.parent.glob(f"{folder.name}.jobs/*/logs/*.out"))


def until(moment: Callable[[], bool], folder: Path, *, seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not moment():
        assert time.monotonic() < end, output(folder)
        time.sleep(0.1)


def ending(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "exit.json").read_text()))


def starts(folder: Path) -> int:
    return output(folder).count("ranks meet at")


def test_a_signal_saves_requeues_and_the_run_goes_on_as_one(
    cluster: Cluster, tmp_path: Path
) -> None:
    """torchrun on the host; a number of steps that ends by itself after the requeue."""
    folder, whole = tmp_path / "run", tmp_path / "whole"
    words = [*WORDS, "train.steps=120", "logging.wandb=offline", "logging.interval=100"]
    (job,) = submit(cluster, *words, f"run.dir={folder}")
    until(lambda: row_count(folder) >= 20, folder)
    begin = time.monotonic()
    cluster("scancel", "--signal=USR1", "--batch", job)
    until(lambda: (folder / "checkpoints" / "latest").exists(), folder)
    saved = time.monotonic() - begin
    until(lambda: starts(folder) == 2, folder)
    cluster.wait(job, "COMPLETED")
    assert saved < 60, "the lead time that a job asks for at least"
    text = output(folder)
    assert "launch: stopped on request (SIGUSR1); restart 1 goes on after step" in text
    assert "resumes after step" in text
    assert cluster.job(job)["Restarts"] == "1"
    found = rows(folder)
    assert [row["step"] for row in found] == list(range(1, 121))
    assert ending(folder)["code"] == 0
    names = {wandb_offline.read(path)["run_id"] for path in folder.glob("wandb/offline-run-*")}
    assert names == {json.loads((folder / "run.json").read_text())["run_id"]}
    assert len(list(folder.glob("wandb/offline-run-*"))) == 2
    output_file = tmp_path / "out"
    wait_for(torchrun([*words, f"run.dir={whole}"], ranks=2, output=output_file), output_file)
    assert reproducible_rows(folder) == reproducible_rows(whole), "nobody interrupted this one"


def test_time_limit_requeue_and_stop_file_with_one_task_a_rank(
    cluster: Cluster, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    words = [*WORDS, "train.steps=1000000", "logging.interval=1000", "launch.torchrun=false"]
    words += ["launch.time=2", "launch.lead_seconds=60", f"run.dir={folder}"]
    (job,) = submit(cluster, *words)
    # SLURM itself signals, some 60 seconds after the start.
    until(lambda: starts(folder) == 2, folder)
    text = output(folder)
    assert "launch: stopped on request (SIGUSR1); restart 1 goes on after step" in text
    saved = row_count(folder)
    until(lambda: row_count(folder) > saved, folder)
    # Somebody puts the running job back: SIGTERM, and half a minute.
    cluster("scontrol", "requeue", job)
    until(lambda: starts(folder) == 3, folder)
    until(lambda: output(folder).count("resumes after step") == 2, folder)
    again = row_count(folder)
    until(lambda: row_count(folder) > again, folder)
    (folder / "stop").touch()
    state = cluster.wait(job, "FAILED", "COMPLETED", "CANCELLED")
    assert (state["JobState"], state["ExitCode"]) == ("FAILED", "10:0")
    end = ending(folder)
    assert (end["code"], end["reason"]) == (10, "stop file")
    found = rows(folder)
    assert [row["step"] for row in found] == list(range(1, end["step"] + 1))
    after = re.findall(r"resumes after step (\d+)", output(folder))
    assert len(after) == 2
    assert 0 < int(after[0]) < int(after[1]), "each stop kept what was trained"


def test_a_stage_in_another_layout_is_started_by_the_same_job(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Its ranks leave with code 10; two tasks that were data parallel come back as tensor ones."""
    folder = tmp_path / "run"
    walk = [*COMMAND, "curriculum.stages.stage_256.parallel.tensor=2"]
    walk += ["~curriculum.stages.stage_4k", "~curriculum.stages.stage_1k"]
    (job,) = submit(cluster, *LAUNCH, *walk, "launch.torchrun=false", f"run.dir={folder}")
    state = cluster.wait(job, "COMPLETED", "FAILED")
    text = output(folder)
    assert (state["JobState"], state["Restarts"]) == ("COMPLETED", "0"), text
    codes = re.findall(r"^srun returned (\d+)$|^launch: (.*)$", text, re.MULTILINE)
    assert codes == [
        ("10", ""),
        ("", "next stage; restart 1 goes on after step 2"),
        ("0", ""),
        ("", "all steps are done"),
    ]
    assert starts(folder) == 1, "in the same slice of time, not put back into the queue"
    layouts = re.findall(r"^layout +2 ranks = (.*)$", text, re.MULTILINE)
    assert [re.findall(r"(?:data|tensor) (\d)", layout) for layout in layouts] == [
        ["2", "1"],
        ["1", "2"],
    ]
    assert ending(folder) == {"code": 0, "reason": "all steps are done", "step": 4}
    found = rows(folder)
    assert [(row["stage"], row["step"], row["tokens"]) for row in found] == [
        ("stage_64", 1, BATCH),
        ("stage_64", 2, 2 * BATCH),
        ("stage_256", 3, 3 * BATCH),
        ("stage_256", 4, 4 * BATCH),
    ]
    # What was trained goes on: the loss of the same text, before and after the change of layout.
    assert found[2]["eval/before/loss"] == pytest.approx(found[1]["eval/loss"], rel=0.05)
    assert found[2]["eval/before/loss"] < found[0]["eval/before/loss"]


def test_a_halt_is_not_requeued(cluster: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (job,) = submit(cluster, *WORDS, "train.steps=9", "optim.lr=1e30", f"run.dir={folder}")
    state = cluster.wait(job, "FAILED", "COMPLETED")
    assert (state["JobState"], state["ExitCode"], state["Restarts"]) == ("FAILED", "40:0", "0")
    assert "the loss is nan" in output(folder) or "norm is nan" in output(folder)


def test_an_array_and_a_job_that_follows_it(cluster: Cluster, tmp_path: Path) -> None:
    words = [*WORDS, "train.steps=3", "launch.ranks_per_node=1"]
    for number in (0, 1):
        (tmp_path / str(number)).mkdir()
    # An array in one launch, with folders named after the values; then a job of its own.
    done = subprocess.run(
        [sys.executable, "-m", "launch.submit", "--go", "-m", *words, "optim.lr=1e-3,2e-3"],
        cwd=tmp_path,
        env={**cluster.environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (array,) = re.findall(r"^job (\d+): ", done.stdout, re.MULTILINE)
    last = tmp_path / "last"
    following = [*words, f"run.dir={last}", "run.name=last"]
    jobs = submit(cluster, f"--after={array}", "--then", "train.steps=5", *following)
    assert cluster.job(jobs[0])["Dependency"].startswith(f"afterok:{array}")
    cluster.wait(jobs[1], "COMPLETED")
    for value in ("0.001", "0.002"):
        (folder,) = tmp_path.glob(f"multirun/*lr={value}")
        assert ending(folder)["code"] == 0
    assert ending(last) == {"code": 0, "reason": "all steps are done", "step": 5}
    assert "resumes after step 3" in output(last)
