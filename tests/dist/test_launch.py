"""Real ranks under `launch/local.sh`: killed, hosts lost, stopped - and the run goes on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.dist.test_resume import TINY, row_count, rows
from tests.support import hosts
from tests.support.runs import QUIET, ROOT, kill_tree

SCRIPT = ["bash", str(ROOT / "launch" / "local.sh")]
WORDS = [*TINY, "checkpoint.interval=4", "evaluate.interval_tokens=0", "logging.interval=100"]


def until(moment: Callable[[], bool], process: subprocess.Popen[bytes], output: Path) -> None:
    while not moment():
        assert process.poll() is None, output.read_text()
        time.sleep(0.02)


def last_rank(launcher: subprocess.Popen[bytes]) -> psutil.Process:
    """The process of the highest rank that a launcher has started."""
    found = {}
    for process in psutil.Process(launcher.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            # Helpers inherit the variables; ranks are children of torchrun.
            if "torch.distributed.run" in process.parent().cmdline():
                found[int(process.environ()["RANK"])] = process
    return found[max(found)]


def ending(folder: Path) -> dict[str, object]:
    return dict(json.loads((folder / "exit.json").read_text()))


def test_a_killed_rank_is_started_again_and_a_stopped_run_is_not(tmp_path: Path) -> None:
    folder, output = tmp_path / "run", tmp_path / "out"
    words = [*WORDS, f"run.dir={folder}", "launch.ranks_per_node=2", "run.fresh=true"]
    with output.open("wb") as file:
        process = subprocess.Popen(
            [*SCRIPT, *words, "train.steps=100000"],
            env={**os.environ, **QUIET, "PYTHON": sys.executable},
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        until(lambda: (folder / "checkpoints" / "latest").exists(), process, output)
        last_rank(process).kill()
        until(lambda: "resumes after step" in output.read_text(), process, output)
        before = row_count(folder)
        until(lambda: row_count(folder) > before, process, output)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=500) == 10, output.read_text()
    finally:
        kill_tree(process)
    text = output.read_text()
    assert "launch: crashed: it left no exit.json; restart 1 goes on after step" in text
    assert "ChildFailedError" not in text[text.index("resumes after step") :]
    end = ending(folder)
    assert (end["code"], end["reason"]) == (10, "SIGUSR1")
    found = rows(folder)
    assert [row["step"] for row in found] == list(range(1, int(str(end["step"])) + 1))
    assert list(tmp_path.glob("run.jobs/*/**/1/stderr.log")), (
        "the output of the silent rank is kept"
    )
    assert not (tmp_path / "run.1").exists(), "run.fresh=true held for the first start only"


@pytest.mark.skipif(hosts.missing() != "", reason=hosts.missing())
def test_two_hosts_outlive_a_rank_and_a_host(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    outputs = [tmp_path / "out1", tmp_path / "out2"]
    first = hosts.ADDRESSES[0]

    def start(number: int, name: str, steps: int) -> subprocess.Popen[bytes]:
        words = [*WORDS, f"run.dir={folder}", f"train.steps={steps}", "launch.nodes=2"]
        words += [f"launch.host={first}:29411", f"launch.address={hosts.ADDRESSES[number]}"]
        os.environ["PYTHON"] = sys.executable
        return hosts.start_on(name, [*SCRIPT, *words], output=outputs[number])

    def resumed() -> int:
        return outputs[0].read_text().count("resumes after step") + outputs[1].read_text().count(
            "resumes after step"
        )

    with hosts.two_hosts() as names:
        launchers = [start(number, name, 100000) for number, name in enumerate(names)]
        try:
            until(lambda: (folder / "checkpoints" / "latest").exists(), launchers[0], outputs[0])
            last_rank(launchers[1]).kill()
            until(lambda: resumed() >= 1, launchers[0], outputs[0])
            before = row_count(folder)
            until(lambda: row_count(folder) > before, launchers[0], outputs[0])
            kill_tree(launchers[1])  # the host is gone, with its launcher
            launchers[1] = start(1, names[1], 100000)  # and is there again
            until(lambda: resumed() >= 2, launchers[0], outputs[0])
            before = row_count(folder)
            until(lambda: row_count(folder) > before, launchers[0], outputs[0])
            psutil.Process(launchers[1].pid).send_signal(signal.SIGTERM)
            codes = [launcher.wait(timeout=500) for launcher in launchers]
        finally:
            for launcher in launchers:
                if launcher.poll() is None:
                    kill_tree(launcher)
    assert codes == [10, 10], outputs[0].read_text() + outputs[1].read_text()
    found = rows(folder)
    assert [row["step"] for row in found] == list(range(1, int(str(ending(folder)["step"])) + 1))
