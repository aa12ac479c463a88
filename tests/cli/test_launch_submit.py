"""The script of a SLURM job, read and run, with a SLURM that only pretends. No torch.

`tests/slurm` has the real one.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch import submit
from launch.submit import main, plan_jobs, render
from megatron_ext.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
BASE = ["run.device=cpu", "launch.snapshot=false"]
PYTHON = """#!{python}
import json, os, pathlib, signal, sys, time
if sys.argv[1:3] == ["-m", "launch.ending"]:
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
folder = pathlib.Path({folder!r})
keys = ("MASTER_ADDR", "MASTER_PORT", "MEGATRON_EXT_LAUNCH", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE")
call = {{"words": sys.argv[1:], **{{key: os.environ.get(key) for key in keys}}}}
with (folder / "calls").open("a") as file:
    file.write(json.dumps(call) + "\\n")
run = pathlib.Path([w for w in sys.argv if w.startswith("run.dir=")][-1][9:-1])
run.mkdir(parents=True, exist_ok=True)
ending = json.loads((folder / "endings").read_text())[
    len((folder / "calls").read_text().splitlines()) - 1]
if ending == "wait":
    def stop(*_):
        (run / "exit.json").write_text(json.dumps(
            {{"code": 10, "reason": "SIGUSR1", "step": 3}}))
        sys.exit(0)
    signal.signal(signal.SIGUSR1, stop)
    (folder / "ranks").write_text(str(os.getpid()))
    time.sleep(60)
if ending is not None:
    (run / "exit.json").write_text(json.dumps({{"code": ending, "reason": "x", "step": 1}}))
sys.exit(1)
"""
TOOLS = {
    "srun": 'while [[ $1 == --* ]]; do shift; done; exec "$@"',
    "scontrol": 'if [ "$1" = show ]; then printf "n7\\nn8\\n"; else echo "$@" >> {folder}/requeued;'
    " kill $PPID; fi",
    "scancel": "kill -USR1 $(cat {folder}/ranks)",
}


class Pretend:
    """Prepared endings, and a PATH with a SLURM that does what it is told."""

    def __init__(self, folder: Path, endings: list[int | str | None]) -> None:
        self.folder = folder
        (folder / "bin").mkdir()
        (folder / "endings").write_text(json.dumps(endings))
        texts = {name: f"#!/bin/bash\n{text}\n" for name, text in TOOLS.items()}
        texts = {name: text.replace("{folder}", str(folder)) for name, text in texts.items()}
        texts["python"] = PYTHON.format(python=sys.executable, folder=str(folder))
        for name, text in texts.items():
            (folder / "bin" / name).write_text(text)
            (folder / "bin" / name).chmod(0o755)
        self.words = [*BASE, f"launch.python={folder / 'bin' / 'python'}"]

    def start(self, *words: str, job: int = 4711, **env: str) -> subprocess.Popen[str]:
        sweep = "-m" in words
        given = [word for word in words if word != "-m"]
        (planned,) = plan_jobs([*self.words, *given], [], sweep=sweep)
        script = self.folder / "job.sbatch"
        script.write_text(render(planned))
        environment = {
            **os.environ,
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "SLURM_JOB_ID": str(job),
            "SLURM_JOB_NODELIST": "n[7-8]",
            **env,
        }
        return subprocess.Popen(
            ["bash", str(script)], env=environment, stdout=subprocess.PIPE, text=True
        )

    def wait(self, *words: str, job: int = 4711, **env: str) -> tuple[int, str]:
        process = self.start(*words, job=job, **env)
        text, _ = process.communicate(timeout=100)
        return process.returncode, text

    def calls(self) -> list[dict[str, str]]:
        return [json.loads(line) for line in (self.folder / "calls").read_text().splitlines()]


def test_ranks_meet_at_the_first_host_and_words_arrive_as_they_are(tmp_path: Path) -> None:
    pretend = Pretend(tmp_path, [0, 0])
    run = tmp_path / "a b"
    words = [f"run.dir='{run}'", "launch.nodes=2", r"generate.prompt='\${x} \"$1\" \'it\', a=b'"]
    assert pretend.wait(*words)[0] == 0
    assert pretend.wait(*words, job=4712)[0] == 0
    first, second = pretend.calls()
    assert (first["MASTER_ADDR"], first["MASTER_PORT"]) == ("n7", "14711")
    assert second["MASTER_PORT"] == "14712", "two jobs on one host do not meet"
    assert first["MEGATRON_EXT_LAUNCH"] == "slurm-4711"
    line = first["words"]
    assert line[line.index("--rdzv-endpoint") + 1] == "n7:14711"
    assert line[line.index("--rdzv-id") + 1] == "4711-0"
    assert first["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1", "restarts share no store"
    assert words[2] in line
    assert line[-1] == f"run.dir='{run}'"


def test_a_crash_is_started_again_in_the_same_slice_and_a_halt_ends_the_job(tmp_path: Path) -> None:
    pretend = Pretend(tmp_path, [None, 50, 40])
    code, text = pretend.wait(f"run.dir={tmp_path / 'run'}", "launch.stalled_restarts=9")
    assert code == 40, text
    assert len(pretend.calls()) == 3
    assert not (tmp_path / "requeued").exists()


def test_a_signal_to_the_script_reaches_the_ranks_and_puts_the_job_back(tmp_path: Path) -> None:
    pretend = Pretend(tmp_path, ["wait"])
    process = pretend.start(f"run.dir={tmp_path / 'run'}")
    while not (tmp_path / "ranks").exists():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGUSR1)
    text, _ = process.communicate(timeout=60)
    assert (tmp_path / "requeued").read_text() == "requeue 4711\n", text
    assert "stopped on request (SIGUSR1); restart 1" in text


def test_an_array_takes_the_line_of_its_task(tmp_path: Path) -> None:
    pretend = Pretend(tmp_path, [0])
    code, text = pretend.wait("-m", "optim.lr=1e-3,2e-3", SLURM_ARRAY_TASK_ID="1")
    assert code == 0, text
    (call,) = pretend.calls()
    assert "optim.lr=0.002" in call["words"]
    assert call["words"][-1].endswith("multirun/optim.lr=0.002'")


def options(*words: str, sweep: bool = False) -> dict[str, str]:
    (job,) = plan_jobs([*BASE, *words], [], sweep=sweep)
    pairs = [line.partition("=") for line in submit.options(job)]
    return {key: value for key, _, value in pairs}


def test_options_follow_the_configuration() -> None:
    words = ["launch=h200x8", "launch.nodes=16", "launch.partition=big", "launch.exclude='n1,n2'"]
    given = options(*words, "launch.sbatch=['--comment=x']", "train.batch_tokens=65536")
    assert given["--nodes"] == "16"
    assert given["--ntasks-per-node"] == "1"
    assert given["--gpus-per-node"] == "8"
    assert given["--exclude"] == "n1,n2"
    assert given["--comment"] == "x"
    assert given["--signal"] == "B:USR1@300"
    assert {"--requeue", "--exclusive", "--wait-all-nodes"} <= given.keys()
    assert "--array" not in given
    assert options("run.seed=1,2", sweep=True)["--array"] == "0-1"
    assert options("launch.torchrun=false", "launch.ranks_per_node=4")["--ntasks-per-node"] == "4"


def test_the_lead_time_follows_the_slowest_save_and_step(tmp_path: Path) -> None:
    rows = [
        {"step": 1, "step_seconds": 20.0},
        {"step": 2, "step_seconds": 7.0, "checkpoint/save_seconds": 80.0},
        {"step": 3, "step_seconds": None},
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n{torn")
    assert options(f"run.dir={tmp_path}")["--signal"] == "B:USR1@230"
    assert options(f"run.dir={tmp_path}", "launch.lead_seconds=77")["--signal"] == "B:USR1@77"


def test_printing_is_the_default_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*BASE, f"run.dir={tmp_path / 'run'}", "--then", "train.steps=40 optim.lr=1e-4"]
    assert main(words) == 0
    shown = capsys.readouterr()
    assert shown.out.count("#!/usr/bin/env bash") == 2
    assert "train.steps=40" in shown.out
    assert "nothing was submitted" in shown.err
    assert not re.search(r"@[A-Z_]+@", shown.out)
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_a_job_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, message in (
        (["launch.time=soon", "train.stepz=1"], "launch.time=soon: must be minutes"),
        (["launch.nodes=3", "parallel.tensor=2"], "ranks=3: must be a multiple of tensor 2"),
        (["run.mode=generate"], "run.mode=generate: jobs train"),
        (["launch.sbatch=['a b']"], "'a b' is no option of sbatch"),
    ):
        assert main(["--go", *BASE, *words]) == 20
        assert message in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"values of launch\.\* were swept"):
        plan_jobs([*BASE, "launch.nodes=1,2"], [], sweep=True)


def test_a_snapshot_is_the_tracked_files_as_they_are_now(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    for name in ("kept.py", "gone.py"):
        (source / name).write_text("1\n")
    git = ["git", "-C", str(source), "-c", "user.name=x", "-c", "user.email=x@y"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*git, *words], check=True)
    (source / "kept.py").write_text("2\n")
    (source / "gone.py").unlink()
    (source / "untracked.py").write_text("3\n")
    (source / "configs" / "local").mkdir(parents=True)
    (source / "configs" / "local" / "default.yaml").write_text("{}\n")
    submit.snapshot(source, target)
    assert (target / "kept.py").read_text() == "2\n"
    assert (target / "configs" / "local" / "default.yaml").exists()
    assert not (target / "gone.py").exists()
    assert not (target / "untracked.py").exists()
    assert "-1\n+2" in (target / "git.txt").read_text()
    with pytest.raises(ConfigError, match="is no git checkout"):
        submit.snapshot(tmp_path, target)
