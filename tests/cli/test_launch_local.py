"""`launch/local.sh` with ranks that only pretend: words, restarts, signals, hosts. No torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch import local
from launch.command import count_gpus, is_this_host, rank_command, rank_environment
from megatron_ext.config.schema import RunConfig
from megatron_ext.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
# Stands for the Python of the ranks: notes its arguments, plays the next of the prepared endings.
RANKS = """#!{python}
import json, os, pathlib, signal, sys, time
folder = pathlib.Path({folder!r})
run = pathlib.Path({run!r})
run.mkdir(parents=True, exist_ok=True)
with (folder / "calls").open("a") as file:
    file.write(json.dumps({{"words": sys.argv[1:], "launch": os.environ["MEGATRON_EXT_LAUNCH"]}}))
    file.write("\\n")
number = len((folder / "calls").read_text().splitlines()) - 1
ending = json.loads((folder / "endings").read_text())[number]
if ending == "wait":
    def stop(*_):
        (run / "exit.json").write_text(json.dumps(
            {{"code": 10, "reason": "SIGUSR1", "step": 3}}))
        sys.exit(10)
    signal.signal(signal.SIGUSR1, stop)
    (folder / "ready").touch()
    time.sleep(60)
if ending is None:
    os.kill(os.getpid(), signal.SIGKILL)
(run / "exit.json").write_text(json.dumps({{"code": ending, "reason": "x", "step": 1}}))
sys.exit(ending)
"""


class Pretend:
    """A run folder, prepared endings, and the launcher's command line."""

    def __init__(self, folder: Path, endings: list[int | str | None], *, run: str = "run") -> None:
        self.folder, self.run = folder, folder / run
        (folder / "endings").write_text(json.dumps(endings))
        python = folder / "python"
        text = RANKS.format(python=sys.executable, folder=str(folder), run=str(self.run))
        python.write_text(text)
        python.chmod(0o755)
        self.words = ["run.device=cpu", f"launch.python={python}"]

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", str(ROOT / "launch" / "local.sh"), *self.words, *words],
            cwd=self.folder,
            env={**os.environ, "PYTHON": sys.executable},
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait(self, *words: str) -> tuple[int, str]:
        process = self.start(*words)
        _, errors = process.communicate(timeout=100)
        return process.returncode, errors

    def calls(self) -> list[dict[str, object]]:
        path = self.folder / "calls"
        return [json.loads(line) for line in path.read_text().splitlines()]


def test_words_reach_the_ranks_as_they_are(tmp_path: Path) -> None:
    pretend = Pretend(tmp_path, [0], run='a, b="$c" d')
    words = [
        f"run.dir='{pretend.run}'",
        "data.sources=[{name:a,path:'x y'},{name:b,path:z}]",
        r"generate.prompt='\${oops} $1 \'it is\' = \"2\"'",
    ]
    code, errors = pretend.wait(*words)
    assert (code, errors) == (0, "")
    (call,) = pretend.calls()
    assert call["words"] == ["-u", str(ROOT / "pretrain.py"), *pretend.words, *words]


def test_crashes_and_hangs_are_started_again_in_the_same_launch_and_halts_are_not(
    tmp_path: Path,
) -> None:
    pretend = Pretend(tmp_path, [None, 50, 40])
    code, errors = pretend.wait(f"run.dir={pretend.run}", "launch.stalled_restarts=5")
    assert code == 40, errors
    assert "crashed: it left no exit.json; restart 1 goes on after step 0" in errors
    assert "hung; restart 2" in errors
    assert len({str(call["launch"]) for call in pretend.calls()}) == 1
    assert len(pretend.calls()) == 3


def test_other_hosts_can_read_an_ending_until_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endings, found = iter([50, 40]), []

    class Ranks:
        """Those of all hosts, which end at once, and remove nothing."""

        def __init__(self, *_: object, **__: object) -> None:
            found.append((tmp_path / "exit.json").exists())

        def wait(self, *, stop_seconds: float) -> int:
            end = {"code": next(endings), "reason": "x", "step": 1}
            (tmp_path / "exit.json").write_text(json.dumps(end))
            return 1

    monkeypatch.setattr(local, "Child", Ranks)
    monkeypatch.setattr(local.signal, "signal", lambda *_: None)
    (tmp_path / "exit.json").write_text("of an earlier launch")
    made = config(nodes=2, host="localhost", ranks_per_node=1)
    made.run.dir, made.run.name = str(tmp_path), "run"
    assert local.Launcher(made, []).run() == 40
    assert found == [False, True]


def test_a_wrong_configuration_starts_nothing(tmp_path: Path) -> None:
    pretend = Pretend(tmp_path, [])
    code, errors = pretend.wait("train.stepz=1", "parallel.tensor=2")
    assert code == 20
    assert "train.stepz: no such key" in errors
    assert "ranks=1: must be a multiple of tensor 2" in errors
    assert not (tmp_path / "calls").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_request_to_stop_reaches_the_ranks_and_the_run_stays_stopped(
    number: signal.Signals, tmp_path: Path
) -> None:
    pretend = Pretend(tmp_path, ["wait"])
    process = pretend.start(f"run.dir={pretend.run}")
    while not (tmp_path / "ready").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 10, errors
    assert "SIGUSR1" in errors
    assert len(pretend.calls()) == 1


def config(**launch: object) -> RunConfig:
    made = RunConfig()
    for key, value in launch.items():
        setattr(made.launch, key, value)
    return made


def command(made: RunConfig, *, ranks: int) -> list[str]:
    return rank_command(made, ["a=b"], ranks=ranks, launch="job", folder=Path("logs"))


def test_several_ranks_are_torchruns_and_their_output_is_kept() -> None:
    words = command(config(), ranks=3)
    assert words[1:5] == ["-m", "torch.distributed.run", "--nproc-per-node", "3"]
    assert words[5:10] == ["--log-dir", "logs", "--redirects", "1:3,2:3", "--standalone"]
    assert words[-1] == "a=b"


def test_hosts_meet_at_the_first_one() -> None:
    words = command(config(nodes=2, host="10.0.0.1:7", address="10.0.0.1"), ranks=2)
    assert words[words.index("--rdzv-endpoint") + 1] == "10.0.0.1:7"
    assert words[words.index("--rdzv-conf") + 1].startswith("is_host=1,")
    assert words[words.index("--local-addr") + 1] == "10.0.0.1"
    assert words[words.index("--rdzv-id") + 1] == "job"
    around = rank_environment({}, launch="job")
    assert around["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1", "restarts share no store"
    words = command(config(nodes=2, host="10.0.0.1", address="10.0.0.2"), ranks=1)
    assert words[words.index("--rdzv-endpoint") + 1] == "10.0.0.1:29400"
    assert words[words.index("--rdzv-conf") + 1].startswith("is_host=0,")
    with pytest.raises(ConfigError, match=r"launch.host=null: must be given"):
        command(config(nodes=2), ranks=1)
    assert is_this_host("localhost", None)


def test_gpus_are_counted_without_torch(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert count_gpus({}, tmp_path) == 3
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "1,2"}, tmp_path) == 2
    assert count_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == 0
