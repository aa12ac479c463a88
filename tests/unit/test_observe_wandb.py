"""wandb: what it is given, read back from its offline file, and that it never stops training."""

from __future__ import annotations

import io
import time
from pathlib import Path

import pytest

from megatron_ext.config.schema import LoggingOptions, Wandb
from megatron_ext.errors import TrainingHalted
from megatron_ext.observe import registry
from megatron_ext.observe.metrics import Metrics
from megatron_ext.observe.wandb_sink import WandbSink
from tests.support import wandb_offline

CONFIG = {
    "run": {"name": "small", "mode": "train"},
    "train": {"batch_tokens": 8192},
    "hub": {"api_key": "abc123", "url": "https://me:word@example.org/x"},
}


@pytest.fixture(autouse=True)
def no_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the key nor the settings of who runs the tests."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_RUN_ID", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "no-config"))


def open_sink(
    folder: Path,
    warnings: list[str],
    mode: Wandb,
    *,
    resume_step: int = 0,
    init_seconds: float = 30,
) -> WandbSink:
    return WandbSink(
        folder,
        logging=LoggingOptions(wandb=mode),
        run_id="small-1234",
        name="small",
        config=CONFIG,
        resume_step=resume_step,
        warn=warnings.append,
        init_seconds=init_seconds,
    )


def test_offline_file_holds_run_id_steps_values_and_no_secret(tmp_path: Path) -> None:
    warnings: list[str] = []
    sink = open_sink(tmp_path, warnings, Wandb.offline)
    sink.write(1, {"loss": 5.5, "loss/code": 5.25, "tokens": 8192.0})
    sink.write(2, {"loss": 5.125, "tokens": 16384.0})
    sink.close(40)
    # A relaunch from step 1 with the id of the checkpoint. wandb names folders by the second.
    time.sleep(1.1)
    sink = open_sink(tmp_path, warnings, Wandb.offline, resume_step=1)
    sink.write(2, {"loss": 5.125, "tokens": 16384.0})
    sink.close(0)

    assert warnings == []
    folders = sorted((tmp_path / "wandb").glob("offline-run-*"))
    launches = [wandb_offline.read(folder) for folder in folders]
    assert [launch["run_id"] for launch in launches] == ["small-1234", "small-1234"]
    assert [launch["exit_code"] for launch in launches] == [40, 0]
    first, second = (launch["history"] for launch in launches)
    assert [(row["_step"], row["loss"]) for row in first] == [(1, 5.5), (2, 5.125)]
    assert first[0]["loss/code"] == 5.25
    assert [(row["_step"], row["tokens"]) for row in second] == [(2, 16384.0)]
    assert launches[0]["config"]["train"] == {"batch_tokens": 8192}
    assert launches[0]["config"]["hub"]["api_key"] == "<redacted>"
    everything = b"".join(
        path.read_bytes() for path in (tmp_path / "wandb").rglob("*") if path.is_file()
    )
    assert b"abc123" not in everything
    assert b"me:word" not in everything


def test_without_a_key_it_goes_offline_with_one_warning(tmp_path: Path) -> None:
    warnings: list[str] = []
    sink = open_sink(tmp_path, warnings, Wandb.auto)
    sink.write(1, {"loss": 1.0})
    sink.close(0)
    (warning,) = warnings
    assert "no API key" in warning
    assert "wandb sync" in warning
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    assert wandb_offline.read(folder)["history"][0]["_step"] == 1


def test_an_unreachable_server_is_one_warning_and_an_offline_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    import wandb

    wandb.teardown()  # its service read the address of the server when an earlier test started it
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    warnings: list[str] = []
    sink = open_sink(tmp_path, warnings, Wandb.auto, init_seconds=2)
    sink.write(1, {"loss": 1.0})
    sink.close(0)
    wandb.teardown()
    (warning,) = warnings
    assert "cannot go online" in warning
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    launch = wandb_offline.read(folder)
    assert launch["run_id"] == "small-1234"
    assert launch["history"][0]["_step"] == 1
    assert capfd.readouterr() == ("", "")  # the console is ours


class BrokenRun:
    """A run whose every call fails, as when wandb's own process was killed."""

    step = 0
    url = None

    def define_metric(self, *_: object, **__: object) -> None: ...

    def log(self, *_: object, **__: object) -> None:
        raise BrokenPipeError("service is gone")

    def finish(self, **_: object) -> None:
        raise BrokenPipeError("service is gone")


def test_a_failure_while_logging_or_at_the_end_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    monkeypatch.setattr(wandb, "init", lambda **_: BrokenRun())
    warnings: list[str] = []
    sink = open_sink(tmp_path, warnings, Wandb.offline)
    for step in (1, 2, 3):
        sink.write(step, {"loss": 1.0})
    sink.close(0)
    assert len(warnings) == 1

    sink = open_sink(tmp_path, warnings, Wandb.offline)
    sink.close(1)
    assert len(warnings) == 2


def test_the_last_row_is_flushed_when_training_fails(tmp_path: Path) -> None:
    row = {name: 1.0 for name in registry.required_names() if name != "step"}

    def train() -> None:
        with Metrics(
            tmp_path,
            logging=LoggingOptions(wandb=Wandb.offline),
            run_id="small-1234",
            config=CONFIG,
            resume_step=0,
            writer=True,
            total_steps=9,
            stream=io.StringIO(),
        ) as log:
            log.step(1, row)
            raise TrainingHalted("loss is NaN")

    with pytest.raises(TrainingHalted):
        train()
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    launch = wandb_offline.read(folder)
    assert launch["exit_code"] == 40
    assert launch["history"][0]["_step"] == 1
    assert launch["history"][0]["grad_norm"] == 1.0


def test_disabled_touches_nothing(tmp_path: Path) -> None:
    sink = open_sink(tmp_path, [], Wandb.disabled)
    sink.write(1, {"loss": 1.0})
    sink.close(0)
    assert list(tmp_path.iterdir()) == []
