"""One run folder, one run; and what a launch does with what it finds there."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron_ext.checkpoint.verify import Sound
from megatron_ext.config.schema import RunConfig
from megatron_ext.errors import CheckpointError, ConfigError
from megatron_ext.observe.lock import briefly, hold
from megatron_ext.observe.refusal import report
from megatron_ext.observe.run_files import leave_exit, read_exit, write_exit
from megatron_ext.parallel.environment import LAUNCH, Environment, read_environment
from megatron_ext.train.run_folder import Entered, Found, describe, enter, open_run_folder


def test_a_folder_is_held_by_one_process_until_that_ends(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    held, end = context.Event(), context.Event()

    def other() -> None:
        hold(tmp_path)
        held.set()
        end.wait(60)

    process = context.Process(target=other)
    process.start()
    try:
        assert held.wait(60)
        with pytest.raises(ConfigError, match="another process is training in it"):
            hold(tmp_path, wait_seconds=0.3)
        wrong = ConfigError("a: b")
        wrong.run_dir = str(tmp_path)
        report(wrong, Environment(rank=0, world_size=1, launched=True))
        assert read_exit(tmp_path) is None, "the run that goes on there has not ended"
    finally:
        process.kill()
        process.join()
    with briefly(tmp_path) as free:
        assert free
    report(wrong, Environment(rank=1, world_size=2, launched=True))
    assert read_exit(tmp_path) is None
    assert report(wrong, Environment(rank=0, world_size=1, launched=False)) == 20
    assert read_exit(tmp_path) == {"code": 20, "reason": str(wrong), "step": 0}
    hold(tmp_path, wait_seconds=0.0)
    hold(tmp_path, wait_seconds=0.0)  # again, by the same process


def test_a_refusal_makes_the_folder_for_a_launcher_only(tmp_path: Path) -> None:
    wrong = ConfigError("a: b")
    wrong.run_dir = str(tmp_path / "run")
    report(wrong, Environment(rank=0, world_size=1, launched=False))
    assert not (tmp_path / "run").exists()
    report(wrong, Environment(rank=0, world_size=2, launched=True))
    assert (read_exit(tmp_path / "run") or {})["code"] == 20


def test_what_the_ranks_of_a_host_have_met_alike_is_told_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    wrong = CheckpointError("lost")
    for shared, told in ((False, 4), (True, 2)):
        wrong.shared = shared
        for rank in range(4):
            report(wrong, Environment(rank=rank, local_rank=rank % 2, world_size=4, launched=True))
        assert len(capsys.readouterr().err.splitlines()) == told


def test_the_first_ending_stays_and_the_writers_replaces_it(tmp_path: Path) -> None:
    assert leave_exit(tmp_path, code=30, reason="rank 3", step=1)
    assert not leave_exit(tmp_path, code=20, reason="rank 4", step=1)
    assert (read_exit(tmp_path) or {})["reason"] == "rank 3"
    write_exit(tmp_path, code=40, reason="rank 0", step=2)
    assert (read_exit(tmp_path) or {})["code"] == 40
    assert [path.name for path in tmp_path.iterdir()] == ["exit.json"]


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def run_in(folder: Path, **run: Any) -> RunConfig:
    config = RunConfig()
    config.run.dir, config.run.name = str(folder), "x"
    for key, value in run.items():
        setattr(config.run, key, value)
    return config


def look(config: RunConfig, environment: Environment) -> Found:
    entered: Entered = enter(config, environment)
    return describe(config, entered, Sound(None))


def test_fresh_moves_aside_once_a_launch_and_takes_a_load_along(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    config = run_in(folder, fresh=True)
    config.checkpoint.load = str(folder / "checkpoints" / "step_00000001")
    moved = str(tmp_path / "run.1" / "checkpoints" / "step_00000001")
    first = look(config, Environment(launch="a"))
    assert (first.moved, first.load) == (tmp_path / "run.1", moved)
    again = look(config, Environment(launch="a"))
    assert (again.moved, again.load) == (None, moved)
    config.checkpoint.load = str(tmp_path / "elsewhere")
    other = look(config, Environment(launch="b"))
    assert (other.moved, other.load) == (tmp_path / "run.2", config.checkpoint.load)
    nameless = look(config, Environment())
    assert nameless.moved == tmp_path / "run.3"
    assert look(config, Environment()).moved == tmp_path / "run.4"


def test_an_ending_is_forgotten_when_a_run_starts_unless_torchrun_restarts_it(
    tmp_path: Path,
) -> None:
    config = run_in(tmp_path)
    enter(config, Environment(launch="a"))
    write_exit(tmp_path, code=40, reason="x", step=1)
    assert (enter(config, Environment(launch="a", restarts=1)).ended or {})["code"] == 40
    assert enter(config, Environment(launch="a", restarts=0)).ended is None
    assert read_exit(tmp_path) is None
    write_exit(tmp_path, code=50, reason="x", step=1)
    assert enter(config, Environment(launch="a", restarts=1)).ended is None, "a hang is restarted"


def test_a_damaged_pointer_is_on_record(tmp_path: Path, alone: None) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest").write_text("step_00000007\n")
    with pytest.raises(CheckpointError):
        open_run_folder(run_in(tmp_path), Environment())
    assert (read_exit(tmp_path) or {})["code"] == 30


def test_a_launch_is_named_by_our_launchers_or_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LAUNCH, raising=False)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert read_environment().launch == ""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    found = read_environment()
    assert (found.launch, found.restarts) == ("job", 2)
    assert found.process_code(40) == 40, "torchrun alone: its code is all there is"
    monkeypatch.setenv(LAUNCH, "ours")
    found = read_environment()
    assert found.launch == "ours"
    codes = {code: found.process_code(code) for code in (0, 1, 10, 20, 30, 40, 50)}
    assert codes == {0: 0, 1: 1, 10: 0, 20: 0, 30: 0, 40: 0, 50: 50}
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert read_environment().process_code(40) == 40, "srun: its code is seen"


def test_marks_are_plain(tmp_path: Path) -> None:
    enter(run_in(tmp_path), Environment(launch="a"))
    assert json.loads((tmp_path / ".launch.json").read_text()) == {"launch": "a", "moved": None}
