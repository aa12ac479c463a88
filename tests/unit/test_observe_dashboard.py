"""wandb's view of layers and experts: the media of a run, and the dashboard made from code."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from megatron_ext.config.schema import LoggingOptions, Wandb
from megatron_ext.errors import ConfigError
from megatron_ext.observe import dashboard, registry, wandb_layers, wandb_sink
from megatron_ext.observe.expert_load import ExpertLoad, LoadTable
from megatron_ext.observe.metrics import Metrics
from megatron_ext.observe.wandb_sink import WandbSink
from tests.support import wandb_offline
from tests.support.loads import draw_depth, draw_loads

ROW = {name: 1.0 for name in registry.required_names() if name != "step"}


@pytest.fixture(autouse=True)
def no_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the key nor the settings of who runs the tests."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_RUN_ID", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "no-config"))


def test_media_of_a_run_are_in_the_offline_file_and_agree_with_its_rows(tmp_path: Path) -> None:
    with Metrics(
        tmp_path,
        logging=LoggingOptions(wandb=Wandb.offline, expert_interval=3),
        run_id="small-1",
        config={},
        resume_step=0,
        writer=True,
        total_steps=4,
        stream=io.StringIO(),
    ) as log:
        for step in range(1, 5):
            log.step(step, ROW, loads=draw_loads(step))
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    history = wandb_offline.read(folder)["history"]
    assert [row["_step"] for row in history] == [1, 2, 3, 4]  # media share the row of their step
    keys = {f"{key}/_type" for key in (wandb_layers.TABLE, wandb_layers.HISTOGRAM)}
    keys.add(f"{wandb_layers.LOAD_MAP}/_type")
    assert [keys <= row.keys() for row in history] == [True, False, True, True]
    row = history[2]
    table = json.loads((folder / "files" / row[f"{wandb_layers.TABLE}/path"]).read_text())
    assert table["columns"][0] == "layer"
    assert [values[0] for values in table["data"]] == [1, 2, 3]
    violation = table["columns"].index("moe/max_violation")
    assert max(values[violation] for values in table["data"]) == row["moe/max_violation"]
    assert sum(row[f"{wandb_layers.HISTOGRAM}/values"]) == 3 * 16
    picture = {name: row[f"{wandb_layers.LOAD_MAP}/{name}"] for name in ("path", "width", "height")}
    with Image.open(folder / "files" / picture["path"]) as image:
        assert image.size == (picture["width"], picture["height"])
        assert len(np.unique(np.asarray(image).reshape(-1, 3), axis=0)) > 20  # not a blank page


@pytest.mark.parametrize("total_steps", [1, 10, 1999, 2000, 2001, 10**6])
@pytest.mark.parametrize("expert_interval", [1, 10, 100])
def test_media_are_sent_a_bounded_number_of_times(expert_interval: int, total_steps: int) -> None:
    every = wandb_layers.interval(expert_interval, total_steps=total_steps)
    assert every % expert_interval == 0
    assert total_steps // every <= wandb_layers.MOST
    assert every == expert_interval or total_steps / (every - expert_interval) > wandb_layers.MOST
    assert wandb_layers.interval(0, total_steps=total_steps) == 0


def test_media_of_92_layers_of_896_experts_are_small() -> None:
    table = LoadTable.gather(draw_loads(2, layers=92, experts=896, tokens=2048))
    media = wandb_layers.layer_media(table, ExpertLoad().statistics(table))
    assert len(media) == 3
    assert len(media[wandb_layers.TABLE].data) == 92
    assert len(media[wandb_layers.HISTOGRAM].histogram) == 64
    assert Path(media[wandb_layers.LOAD_MAP]._path).stat().st_size < 300_000


def test_weights_over_depth_are_a_picture_in_the_row_of_their_step(tmp_path: Path) -> None:
    with Metrics(
        tmp_path,
        logging=LoggingOptions(wandb=Wandb.offline, health_interval=2),
        run_id="small-1",
        config={},
        resume_step=0,
        writer=True,
        total_steps=3,
        stream=io.StringIO(),
    ) as log:
        for step in range(1, 4):
            log.step(step, ROW, depth=draw_depth(step) if step > 1 else ())
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    history = wandb_offline.read(folder)["history"]
    assert [f"{wandb_layers.DEPTH_MAP}/_type" in row for row in history] == [False, True, True]
    assert ["residual/entropy" in row for row in history] == [False, True, True]
    with Image.open(folder / "files" / history[2][f"{wandb_layers.DEPTH_MAP}/path"]) as image:
        assert len(np.unique(np.asarray(image).reshape(-1, 3), axis=0)) > 20  # not a blank page


def test_a_picture_that_fails_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no fonts")

    monkeypatch.setattr(wandb_sink, "layer_media", fail)
    warnings: list[str] = []
    sink = WandbSink(
        tmp_path,
        logging=LoggingOptions(wandb=Wandb.offline),
        run_id="small-1",
        name="small",
        config={},
        resume_step=0,
        warn=warnings.append,
    )
    table = LoadTable.gather(draw_loads(1))
    for step in (1, 2):
        sink.write_layers(step, table, {})
        sink.write(step, {"loss": 1.0})
    sink.close(0)
    (warning,) = warnings
    assert "no fonts" in warning
    assert "layers.jsonl goes on" in warning
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    assert [row["_step"] for row in wandb_offline.read(folder)["history"]] == [1, 2]


def panels_of(specification: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    sections = specification["spec"]["section"]["panelBankConfig"]["sections"]
    return {section["name"]: section["panels"] for section in sections if section["panels"]}


def test_the_dashboard_is_made_without_a_login_from_registered_metrics(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "dashboard.json"
    assert dashboard.main(["--entity", "team", "--project", "nano", "--json", str(file)]) == 0
    assert capsys.readouterr().out == f"{file}\n"
    specification = json.loads(file.read_text())
    assert (specification["entity"], specification["project"]) == ("team", "nano")
    sections = panels_of(specification)
    names = [name for name, _ in dashboard.SECTIONS]
    assert list(sections) == [*names, "Layers and experts"]
    shown: set[str] = set()
    for name in names:
        for panel in sections[name]:
            config = panel["config"]
            assert panel["viewType"] == "Run History Line Plot"
            assert config["xAxis"] == "tokens"
            metrics, pattern = config.get("metrics", []), config.get("metricRegex", "")
            assert metrics or pattern, config
            for metric in metrics:
                assert registry.find(metric)
            if pattern:
                assert registry.find(pattern.removeprefix("^") + "code").is_family
            shown.update(metrics)
    assert {"loss", "moe/max_violation", "moe/violation_floor", "balance/bias_range"} <= shown
    media = [panel["config"] for panel in sections["Layers and experts"]]
    assert [config["mediaKeys"] for config in media[:2]] == [
        [wandb_layers.LOAD_MAP],
        [wandb_layers.HISTOGRAM],
    ]
    assert wandb_layers.TABLE in json.dumps(media[2])
    assert media[3]["mediaKeys"] == [wandb_layers.DEPTH_MAP]


def test_its_curves_are_drawn_from_a_run_without_wandb(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb_workspaces.workspaces", None)
    names = ("grad_norm", "lr", "step_seconds", "memory_gib", "tokens_per_second", "loss/code")
    values = dict.fromkeys(names, 3.0) | {"tokens": 64, "moe/max_violation": 1e-7, "mfu": None}
    rows = [values | {"step": step, "loss": 3.0 / step} for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert dashboard.main(["--preview", str(tmp_path)]) == 0
    file = tmp_path / "dashboard.html"
    assert capsys.readouterr().out == f"{file}\n"
    page = ElementTree.fromstring(file.read_text().removeprefix("<!DOCTYPE html>"))
    titles = [figure.findtext("h3") for figure in page.iter("figure")]
    drawn = ["Loss", "Max violation and its floor", "Training, by source", "Max violation"]
    assert [title for title in titles if title in drawn] == drawn
    sections = [heading.text for heading in page.iter("h2")]
    assert sections == [name for name, _ in dashboard.SECTIONS]
    text = "".join(page.itertext())
    assert (
        "This run has no such numbers. Hence no plot of: Model FLOPs utilisation; Waiting" in text
    )
    assert "loss/code 3" in text


def test_without_a_key_saving_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert dashboard.main(["--entity", "team", "--project", "nano"]) == ConfigError.exit_code
    text = capsys.readouterr().err
    assert "no API key is known here" in text
    assert "`wandb login`" in text
    assert "--json FILE" in text
    assert dashboard.main(["--project", "nano"]) == ConfigError.exit_code
    assert "--entity: not given" in capsys.readouterr().err


def test_without_the_package_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb_workspaces.workspaces", None)
    with pytest.raises(ConfigError, match=r"pip install 'megatron-ext\[dashboard\]'"):
        dashboard.workspace(entity="team", project="nano")


class View:
    """A workspace that a server was asked to keep."""

    entity, project, url = "team", "nano", "https://example.org/view"

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.saved = error, 0

    def save(self) -> None:
        if self.error:
            raise self.error
        self.saved += 1


def test_with_a_key_it_is_saved_once_and_a_refusal_is_explained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import wandb

    monkeypatch.setattr(wandb, "login", lambda **_: True)
    view: Any = View()
    assert dashboard.save(view) == view.url
    assert view.saved == 1
    refusing: Any = View(PermissionError("not a member"))
    with pytest.raises(ConfigError, match=r"--entity=team --project=nano.*not a member"):
        dashboard.save(refusing)
