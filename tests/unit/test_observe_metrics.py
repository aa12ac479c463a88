"""The run folder: metrics.jsonl, config.yaml, run.json, exit.json, and who writes them."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.config.schema import Device, LoggingOptions
from megatron_ext.errors import TrainingHalted
from megatron_ext.observe import run_files
from megatron_ext.observe.jsonl import cut_back, encode, lacks, read_rows
from megatron_ext.observe.metrics import Metrics
from megatron_ext.observe.redact import redact, redact_argument


def values(step: int) -> dict[str, float]:
    return {
        "memory_gib": 0.5,
        "mfu": math.nan,
        "lr": 1e-3,
        "grad_norm": 1 / step,
        "loss": 5.0 + 0.1 * step,
        "tokens": 8192 * step,
        "step_seconds": 0.1,
        "tokens_per_second": 81920.0,
        "loss/code": 1 / 3,
    }


def metrics(
    folder: Path, *, resume_step: int = 0, writer: bool = True, tensorboard: bool = False
) -> Metrics:
    return Metrics(
        folder,
        logging=LoggingOptions(tensorboard=tensorboard),
        run_id="small-1",
        config={"run": {"name": "small", "device": Device.auto}},
        resume_step=resume_step,
        writer=writer,
        total_steps=6,
        stream=io.StringIO(),
    )


def run(folder: Path, steps: range, *, resume_step: int = 0) -> None:
    with metrics(folder, resume_step=resume_step) as log:
        for step in steps:
            extra = log.evaluation(step, 8192 * step, {"eval/loss": 4.5}) if step % 3 == 0 else {}
            log.step(step, {**values(step), **extra})
        log.finish(0, "done")


def test_rows_are_in_registry_order_and_read_back_exactly(tmp_path: Path) -> None:
    run(tmp_path, range(1, 4))
    first, _, third = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert first == (
        '{"step": 1, "tokens": 8192, "loss": 5.1, "grad_norm": 1.0, "lr": 0.001, '
        '"step_seconds": 0.1, "tokens_per_second": 81920.0, "mfu": null, "memory_gib": 0.5, '
        '"loss/code": 0.3333333333333333}'
    )
    assert json.loads(third)["eval/loss"] == 4.5


def test_a_row_is_completed_as_if_it_had_been_written_whole(tmp_path: Path) -> None:
    run(tmp_path / "whole", range(1, 4))
    with metrics(tmp_path / "late") as log:
        for step in range(1, 4):
            log.step(step, values(step))
        assert lacks(tmp_path / "late" / "metrics.jsonl", 3, "eval/loss")
    with metrics(tmp_path / "late", resume_step=3) as log:  # the run ended in between
        log.complete(3, {"eval/loss": 4.5})
        log.complete(2, {"eval/loss": 9.9})  # not the last row: nothing to complete
        log.finish(0, "done")
    whole, late = (tmp_path / name / "metrics.jsonl" for name in ("whole", "late"))
    assert late.read_bytes() == whole.read_bytes()
    assert not lacks(late, 3, "eval/loss")
    assert not lacks(late, 4, "eval/loss"), "no row, nothing to make up for"


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_float_survives_the_file(value: float) -> None:
    assert json.loads(encode({"step": 1, "loss": value}))["loss"] == value


def test_killed_at_any_byte_and_resumed_gives_the_bytes_of_an_uninterrupted_run(
    tmp_path: Path,
) -> None:
    run(tmp_path / "whole", range(1, 7))
    whole = (tmp_path / "whole" / "metrics.jsonl").read_bytes()
    lines = whole.splitlines(keepends=True)
    folder = tmp_path / "killed"
    folder.mkdir()
    # Every cut inside the 5th row, and one past it, with a checkpoint of step 0 or 3.
    for cut in range(len(b"".join(lines[:4])), len(b"".join(lines[:5])) + 1, 7):
        for resume_step in (0, 3):
            (folder / "metrics.jsonl").write_bytes(whole[:cut])
            run(folder, range(resume_step + 1, 7), resume_step=resume_step)
            assert (folder / "metrics.jsonl").read_bytes() == whole


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(0, 10**6), resume_step=st.integers(0, 8))
def test_cutting_back_keeps_whole_rows_up_to_the_step_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, cut: int, resume_step: int
) -> None:
    lines = [(encode({"step": step, **values(step)}) + "\n").encode() for step in range(1, 7)]
    data = b"".join(lines)
    data = data[: cut % (len(data) + 1)]
    path = tmp_path_factory.mktemp("cut") / "metrics.jsonl"
    path.write_bytes(data)
    last = cut_back(path, resume_step=resume_step)
    assert last == min(resume_step, data.count(b"\n"))
    assert path.read_bytes() == b"".join(lines[:last])
    assert [row["step"] for row in read_rows(path)] == list(range(1, last + 1))
    assert list(path.parent.iterdir()) == [path]


def test_doubled_and_damaged_lines_of_an_old_file_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"st\xff\n{"step": 2}\n{"step": 1}\n[1]\n{"step": 3}\n')
    assert cut_back(path, resume_step=3) == 3
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n{"step": 3}\n'


def test_rows_missing_before_the_resumed_step_are_reported(tmp_path: Path) -> None:
    run(tmp_path, range(1, 3))
    stream = io.StringIO()
    log = Metrics(
        tmp_path,
        logging=LoggingOptions(),
        run_id="small-1",
        config={},
        resume_step=5,
        writer=True,
        total_steps=6,
        stream=stream,
    )
    log.finish(0, "done")
    assert "ends at step 2, training goes on after step 5" in stream.getvalue()


def test_wrong_rows_are_refused(tmp_path: Path) -> None:
    log = metrics(tmp_path)
    with pytest.raises(ValueError, match="metric los: not registered"):
        log.step(1, {**values(1), "los": 1.0})
    with pytest.raises(ValueError, match="step 1: loss missing"):
        log.step(1, {name: value for name, value in values(1).items() if name != "loss"})
    log.step(1, values(1))
    with pytest.raises(ValueError, match="step 1 was given after step 1"):
        log.step(1, values(1))
    with pytest.raises(ValueError, match=r"only eval/\.\.\. is allowed"):
        log.evaluation(1, 8192, {"loss": 1.0})
    log.finish(0, "done")
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1]


def test_a_row_is_on_disk_when_the_process_is_killed_right_after_it(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path;"
        "from megatron_ext.observe.jsonl import JsonlSink;"
        "sink = JsonlSink(Path(sys.argv[1]), resume_step=0);"
        "[sink.write({'step': step, 'loss': 0.1}) for step in (1, 2)];"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    path = tmp_path / "metrics.jsonl"
    subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    assert path.read_text() == '{"step": 1, "loss": 0.1}\n{"step": 2, "loss": 0.1}\n'


def test_only_the_writer_writes(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with metrics(folder, writer=False) as log:
        log.header(["hello"])
        log.step(1, values(1))
        assert log.evaluation(1, 8192, {"eval/loss": 2.0}) == {"eval/loss": 2.0}
        log.finish(0, "done")
    assert not folder.exists()


def leave_with(error: Exception, folder: Path) -> None:
    with metrics(folder) as log:
        log.step(1, values(1))
        raise error


def read_exit(folder: Path) -> Any:
    return run_files.read_exit(folder)


def test_exit_file_says_how_it_ended_and_is_missing_after_a_crash(tmp_path: Path) -> None:
    run(tmp_path, range(1, 7))
    assert read_exit(tmp_path) == {"code": 0, "reason": "done", "step": 6}

    log = metrics(tmp_path, resume_step=6)
    assert read_exit(tmp_path) is None  # while it runs, its end is unknown
    log.finish(10, "stopped on request")
    log.finish(0, "a second call")
    assert read_exit(tmp_path) == {"code": 10, "reason": "stopped on request", "step": 6}

    with pytest.raises(TrainingHalted):
        leave_with(TrainingHalted("loss is NaN"), tmp_path)
    assert read_exit(tmp_path) == {"code": 40, "reason": "loss is NaN", "step": 1}

    with pytest.raises(ZeroDivisionError):
        leave_with(ZeroDivisionError(), tmp_path)
    assert read_exit(tmp_path) is None
    assert len(read_rows(tmp_path / "metrics.jsonl")) == 1  # the row before the crash is there


def test_config_and_run_files_tell_the_story(tmp_path: Path) -> None:
    run(tmp_path, range(1, 2))
    config = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert config == {"run": {"name": "small", "device": "auto"}}
    record = run_files.write_run(
        tmp_path,
        run_id="small-1",
        layout="stage 0: KKM\nstage 1: KKM",
        world_size=2,
        command=["pretrain.py", "run.name=small", "hub.token=abc"],
    )
    assert json.loads((tmp_path / "run.json").read_text()) == record
    assert record["layout"] == ["stage 0: KKM", "stage 1: KKM"]
    assert record["command"] == ["pretrain.py", "run.name=small", "hub.token=<redacted>"]
    assert {"python", "torch", "megatron-core", "megatron-ext"} <= set(record["versions"])
    assert set(record["git"]) == {"sha", "dirty"}
    assert record["host"]


def test_git_state_outside_a_checkout_is_null(tmp_path: Path) -> None:
    assert run_files.git_state(tmp_path) == {"sha": None, "dirty": None}


def test_a_run_keeps_its_id(tmp_path: Path) -> None:
    fresh = run_files.choose_run_id(tmp_path, name="8k run/é", from_checkpoint=None)
    assert fresh.startswith("8k-run-")
    assert fresh.isascii()
    run_files.write_run(tmp_path, run_id=fresh, layout="", world_size=1, command=[])
    assert run_files.choose_run_id(tmp_path, name="other", from_checkpoint=None) == fresh
    assert run_files.choose_run_id(tmp_path, name="other", from_checkpoint="old-7") == "old-7"


def test_secrets_are_known_by_whole_words_of_their_key() -> None:
    config = {
        "batch_tokens": 8192,
        "tokenizer": "bytes",
        "keep": 3,
        "monkey": "see",
        "api_key": "abc",
        "token": None,
        "login": {"password": ["abc", "def"]},
        "secret": {"a": "abc"},
        "remote": ["s3://user:word@bucket/x"],
    }
    assert redact(config) == {
        **config,
        "api_key": "<redacted>",
        "login": {"password": ["<redacted>", "<redacted>"]},
        "secret": {"a": "<redacted>"},
        "remote": ["s3://<redacted>@bucket/x"],
    }
    assert redact_argument("train.batch_tokens=8192") == "train.batch_tokens=8192"
    assert redact_argument("+hub.api_key=a=b") == "+hub.api_key=<redacted>"


def test_tensorboard_hides_what_was_taken_back(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for resume_step, steps in ((0, (1, 2, 3)), (1, (2,))):
        log = metrics(tmp_path, resume_step=resume_step, tensorboard=True)
        for step in steps:
            log.step(step, {**values(step), "loss": 10.0 * resume_step + step})
        log.finish(0, "done")
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 1.0), (2, 12.0)]
    assert "mfu" not in events.Tags()["scalars"]  # NaN draws nothing
