"""Health of attention in the row and in the history: definitions, bounded keys, resume."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest

from megatron_ext.config.schema import LoggingOptions
from megatron_ext.observe import registry
from megatron_ext.observe.attention_health import health_metrics, health_statistics
from megatron_ext.observe.jsonl import read_rows
from megatron_ext.observe.layer_history import FILE_NAME, read_history
from megatron_ext.observe.metric_table import ATTENTION_METRICS
from megatron_ext.observe.metrics import Metrics
from megatron_ext.ops.kda.health import LayerHealth, decay_percentile
from tests.support.loads import draw_health, draw_loads

ROW = {name: 1.0 for name in registry.required_names() if name != "step"}
KEYS = {metric.name for metric in ATTENTION_METRICS}


def metrics_of(records: list[LayerHealth]) -> dict[str, float]:
    return health_metrics(records, health_statistics(records))


def test_worst_spread_and_pooled_percentiles() -> None:
    records = draw_health(1, layers=8)
    found = metrics_of(records)
    linear = [record for record in records if record.rates]
    full = [record for record in records if not record.rates]
    assert (len(linear), len(full)) == (6, 2)
    means = [record.values["decay_mean"] for record in linear]
    assert found["kda/decay_mean"] == pytest.approx(sum(means) / 6)
    assert (found["kda/decay_mean/min"], found["kda/decay_mean/max"]) == (min(means), max(means))
    norms = {record.layer: record.values["state_norm"] for record in linear}
    assert found["kda/state_norm"] == max(norms.values())
    assert norms[int(found["kda/state_norm/layer"])] == max(norms.values())
    gate = [record.values["attention_gate_mean"] for record in full]
    assert found["mla/gate_mean"] == pytest.approx(sum(gate) / 2)
    together = tuple(np.sum([record.rates for record in linear], axis=0).tolist())
    assert found["kda/decay_p50"] == decay_percentile(together, 50)
    assert found["kda/decay_p01"] < found["kda/decay_p50"] < found["kda/decay_p99"]


@pytest.mark.parametrize("layers", [4, 93])
def test_the_number_of_keys_does_not_grow_and_all_are_registered(layers: int) -> None:
    assert metrics_of(draw_health(1, layers=layers)).keys() == KEYS


def test_a_model_of_one_kind_has_the_keys_of_that_kind() -> None:
    records = draw_health(1, layers=4)
    linear, full = metrics_of(records[:3]), metrics_of(records[3:])
    assert linear.keys() == {name for name in KEYS if name.startswith("kda/")}
    assert full.keys() == {name for name in KEYS if name.startswith("mla/")}


def run(folder: Path, steps: range, *, resume_step: int = 0) -> None:
    with Metrics(
        folder,
        logging=LoggingOptions(expert_interval=3),
        run_id="small-1",
        config={},
        resume_step=resume_step,
        writer=True,
        total_steps=6,
        stream=io.StringIO(),
    ) as log:
        for step in steps:
            health = draw_health(step) if step % 2 == 0 else ()
            log.step(step, ROW, loads=draw_loads(step), health=health)


def test_a_step_with_both_parts_is_one_record_and_a_resumed_run_writes_the_same(
    tmp_path: Path,
) -> None:
    run(tmp_path / "whole", range(1, 7))
    history = read_history(tmp_path / "whole")
    parts = {record["step"]: sorted(record.keys() - {"step"}) for record in history}
    both = ["attention", "experts"]
    assert parts == {1: ["experts"], 2: ["attention"], 3: ["experts"], 4: ["attention"], 6: both}
    statistics = history[-1]["attention"]["statistics"]
    assert history[-1]["attention"]["layers"] == [0, 1, 2, 3]
    assert statistics["kda/decay_mean"][3] is None  # full attention
    assert statistics["mla/gate_mean"][:3] == [None] * 3
    rows = read_rows(tmp_path / "whole" / "metrics.jsonl")
    assert [row["step"] for row in rows if "kda/decay_mean" in row] == [2, 4, 6]
    largest = max(value for value in statistics["kda/tile_decay"] if value is not None)
    assert largest == pytest.approx(rows[-1]["kda/tile_decay"], rel=1e-5)

    run(tmp_path / "killed", range(1, 6))
    run(tmp_path / "killed", range(4, 7), resume_step=3)
    files = [tmp_path / name / FILE_NAME for name in ("whole", "killed")]
    assert files[0].read_bytes() == files[1].read_bytes()
