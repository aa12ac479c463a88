"""Load of experts: definitions, bounded keys, and the history of every expert on disk."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.config.schema import LoggingOptions
from megatron_ext.observe import registry
from megatron_ext.observe.expert_load import (
    ExpertLoad,
    LoadTable,
    layer_statistics,
    over_layers,
    violation_floor,
)
from megatron_ext.observe.jsonl import read_rows
from megatron_ext.observe.layer_history import (
    FILE_NAME,
    is_due,
    pack_counts,
    read_history,
    unpack_counts,
)
from megatron_ext.observe.metric_table import EXPERT_METRICS, TOP_LAYERS
from megatron_ext.observe.metrics import Metrics
from megatron_ext.ops.quantile.load import LayerLoad
from tests.support.loads import draw_loads

ROW = {name: 1.0 for name in registry.required_names() if name != "step"}


def load_of(counts: list[int], *, layer: int = 0, top_k: int = 2, dropped: int = 0) -> LayerLoad:
    zeros = torch.zeros(len(counts))
    return LayerLoad(
        layer=layer,
        top_k=top_k,
        tokens=torch.tensor((sum(counts) + dropped) // top_k),
        counts=torch.tensor(counts),
        bias=zeros,
        new_bias=zeros,
        predicted=None,
        out_of_range=torch.tensor(0),
        bin_width=torch.tensor(0.0),
        dropped=torch.tensor(dropped),
    )


def metrics_of(loads: list[LayerLoad], *, expert_parallel: int = 1) -> dict[str, float]:
    watch, table = ExpertLoad(expert_parallel=expert_parallel), LoadTable.gather(loads)
    return watch.metrics(table, watch.statistics(table))


def reference(load: LayerLoad, *, ranks: int) -> dict[str, float]:
    """The definitions, one number at a time."""
    counts = [int(count) for count in load.counts]
    experts, total = len(counts), sum(counts)
    mean = total / experts
    held = experts // ranks
    shares = [count / total for count in counts]
    by_rank = [sum(counts[rank * held : (rank + 1) * held]) for rank in range(ranks)]
    bias, new = load.bias.tolist(), load.new_bias.tolist()
    assert load.predicted is not None
    predicted = load.predicted.tolist()
    return {
        "moe/max_violation": (max(counts) - mean) / mean,
        "moe/load_cv": math.sqrt(sum((c - mean) ** 2 for c in counts) / experts) / mean,
        "moe/load_entropy": -sum(p * math.log(p) for p in shares if p) / math.log(experts),
        "moe/dead_fraction": sum(c == 0 for c in counts) / experts,
        "moe/max_share": max(shares),
        "moe/rank_load": max(by_rank) / (total / ranks),
        "moe/dropped": int(load.dropped) / (int(load.tokens) * load.top_k),
        "balance/bias_range": max(bias) - min(bias),
        "balance/bias_change": max(abs(a - b) for a, b in zip(bias, new, strict=True)),
        "balance/out_of_range": int(load.out_of_range) / (int(load.tokens) * experts),
        "balance/predicted_violation": max(predicted) / (sum(predicted) / experts) - 1,
    }


def test_a_level_prediction_is_no_violation_to_the_last_digit() -> None:
    level = torch.full((896,), 4096 * 16 / 896, dtype=torch.float64)
    load = replace(load_of([73] * 896), predicted=level)
    assert metrics_of([load])["balance/predicted_violation"] == 0.0


@given(
    counts=st.lists(st.integers(0, 10**6), min_size=8, max_size=8).filter(any),
    ranks=st.sampled_from([1, 2, 4, 8]),
    seed=st.integers(0, 99),
)
def test_every_statistic_is_its_definition(counts: list[int], ranks: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    load = replace(
        load_of(counts, top_k=1, dropped=3),
        bias=torch.randn(8, generator=generator),
        new_bias=torch.randn(8, generator=generator),
        predicted=torch.rand(8, generator=generator, dtype=torch.float64) + 0.1,
        out_of_range=torch.tensor(17),
    )
    found = layer_statistics(LoadTable.gather([load]), expert_parallel=ranks)
    for name, value in reference(load, ranks=ranks).items():
        assert found[name][0] == pytest.approx(value, rel=1e-12, abs=1e-12), name


def test_collapsed_and_even_routing_have_the_values_that_everybody_knows() -> None:
    # Equal scores everywhere: plain top-k gives all tokens to experts 0 and 1.
    collapsed = metrics_of([load_of([100, 100, *[0] * 14])], expert_parallel=4)
    assert collapsed["moe/dead_fraction"] == 1 - 2 / 16
    assert collapsed["moe/max_violation"] == 16 / 2 - 1
    assert collapsed["moe/rank_load"] == 4.0
    assert collapsed["moe/load_entropy"] == pytest.approx(math.log(2) / math.log(16))
    even = metrics_of([load_of([25] * 16)], expert_parallel=4)
    assert [even[f"moe/{name}"] for name in ("max_violation", "load_cv", "dead_fraction")] == [
        0.0
    ] * 3
    assert even["moe/rank_load"] == even["moe/load_entropy"] == 1.0
    assert even["moe/max_share"] == 1 / 16


def test_the_floor_is_what_chance_alone_gives() -> None:
    assert violation_floor(tokens=8192, top_k=16, num_experts=896) == pytest.approx(0.30, abs=0.01)
    rng = np.random.default_rng(0)
    # Each token picks expert e with probability k/E, independent of all others.
    counts = rng.binomial(8192, 16 / 896, size=(200, 896))
    violation = np.median(counts.max(axis=1) / counts.mean(axis=1) - 1)
    assert violation == pytest.approx(
        violation_floor(tokens=8192, top_k=16, num_experts=896), rel=0.15
    )


def test_the_worst_layer_is_named_and_small_entropy_is_bad() -> None:
    loads = [
        load_of([4, 4, 4, 4], layer=3),
        load_of([10, 2, 2, 2], layer=7),
        load_of([8, 4, 2, 2], layer=9),
    ]
    found = metrics_of(loads)
    assert (found["moe/max_violation"], found["moe/max_violation/layer"]) == (1.5, 7)
    assert found["moe/max_violation/mean"] == pytest.approx((0 + 1.5 + 1) / 3)
    assert found["moe/load_entropy/layer"] == 7
    assert [found[f"moe/top/{place}/layer"] for place in (2, 3)] == [9, 3]
    assert "moe/top/4/layer" not in found
    assert metrics_of(loads[::-1]) == found  # whatever order the stages come in


@pytest.mark.parametrize(("layers", "experts"), [(1, 16), (92, 896)])
def test_the_number_of_keys_does_not_grow_and_all_are_registered(layers: int, experts: int) -> None:
    watch = ExpertLoad()
    for step in (1, 2):
        table = LoadTable.gather(draw_loads(step, layers=layers, experts=experts, top_k=4))
        found = watch.metrics(table, watch.statistics(table))
    registered = {metric.name for metric in EXPERT_METRICS}
    if layers >= TOP_LAYERS:
        assert found.keys() == registered
    else:
        assert found.keys() == {name for name in registered if not name.startswith("moe/top/")}
    assert len(json.dumps(found)) < 3000


def test_a_prediction_is_compared_with_the_next_step_only() -> None:
    watch = ExpertLoad()

    def error(counts: list[int], predicted: list[float] | None) -> float | None:
        load = load_of(counts)
        if predicted is not None:
            load = replace(load, predicted=torch.tensor(predicted, dtype=torch.float64))
        table = LoadTable.gather([load])
        return watch.metrics(table, watch.statistics(table)).get("balance/prediction_error")

    assert error([16, 0, 0, 0], [8, 4, 2, 2]) is None  # nothing was predicted before
    assert error([8, 4, 2, 2], [4, 4, 4, 4]) == 0.0
    assert error([10, 2, 2, 2], None) == 1.5
    assert error([4, 4, 4, 4], [4, 4, 4, 4]) is None  # the rule made no promise


def test_a_layer_without_tokens_has_no_numbers_and_disturbs_no_other() -> None:
    found = metrics_of([load_of([0, 0, 0, 0], layer=1), load_of([6, 2, 4, 4], layer=2)])
    assert (found["moe/max_violation"], found["moe/max_violation/mean"]) == (0.5, 0.5)
    assert "moe/top/2/layer" not in found
    empty = metrics_of([load_of([0, 0, 0, 0])])
    assert not any(name.startswith("moe/load") for name in empty)
    assert over_layers(np.array([0]), {"moe/load_cv": np.array([math.nan])}) == {}


@given(
    data=st.lists(st.lists(st.integers(0, 2**40), min_size=5, max_size=5), min_size=1, max_size=4)
)
def test_packed_counts_are_exact(data: list[list[int]]) -> None:
    counts = np.array(data, dtype=np.int64)
    packed = json.loads(json.dumps(pack_counts(counts)))
    assert np.array_equal(unpack_counts(packed), counts)


def test_a_record_of_92_layers_of_896_experts_is_small() -> None:
    counts = np.random.default_rng(0).poisson(2**26 * 16 / 896, size=(92, 896)).astype(np.int64)
    assert len(json.dumps(pack_counts(counts))) < 200_000


@pytest.mark.parametrize(
    "damage",
    [{"data": "####"}, {"data": ""}, {"width": 3}, {"shape": [2, 9]}, {"low": None}, {"low": [1]}],
)
def test_damaged_counts_are_an_error(damage: dict[str, object]) -> None:
    packed = pack_counts(np.arange(12).reshape(3, 4))
    with pytest.raises(ValueError, match=r"layers\.jsonl: packed counts are damaged"):
        unpack_counts({**packed, **damage})


def run(folder: Path, steps: range, *, resume_step: int = 0, interval: int = 3) -> str:
    stream = io.StringIO()
    with Metrics(
        folder,
        logging=LoggingOptions(expert_interval=interval),
        run_id="small-1",
        config={},
        resume_step=resume_step,
        writer=True,
        total_steps=7,
        expert_parallel=2,
        stream=stream,
    ) as log:
        for step in steps:
            log.step(step, ROW, loads=draw_loads(step))
        log.finish(0, "done")
    return stream.getvalue()


def test_rows_the_history_and_the_console_tell_the_same_story(tmp_path: Path) -> None:
    printed = run(tmp_path, range(1, 8))
    rows = {row["step"]: row for row in read_rows(tmp_path / "metrics.jsonl")}
    history = read_history(tmp_path)
    assert [record["step"] for record in history] == [1, 3, 6, 7]
    for record in history:
        experts, row = record["experts"], rows[record["step"]]
        counts = unpack_counts(experts["counts"])
        loads = draw_loads(record["step"])
        assert np.array_equal(counts, np.stack([load.counts.numpy() for load in loads]))
        violation = experts["statistics"]["moe/max_violation"]
        assert max(violation) == pytest.approx(row["moe/max_violation"], rel=1e-5)
        assert experts["layers"][int(np.argmax(violation))] == row["moe/max_violation/layer"]
    first = printed.splitlines()[0]
    assert f"imb {1 + rows[1]['moe/max_violation']:.2f}" in first
    assert len(first) <= 120


def test_killed_at_any_byte_and_resumed_gives_the_history_of_an_uninterrupted_run(
    tmp_path: Path,
) -> None:
    run(tmp_path / "whole", range(1, 8))
    whole = (tmp_path / "whole" / FILE_NAME).read_bytes()
    folder = tmp_path / "killed"
    folder.mkdir()
    for cut in range(0, len(whole) + 1, 97):
        for resume_step in (0, 4):
            if resume_step == 4 and whole[:cut].count(b"\n") < 2:
                continue  # the records of steps 1 and 3 were on disk before the checkpoint of 4
            (folder / FILE_NAME).write_bytes(whole[:cut])
            (folder / "metrics.jsonl").unlink(missing_ok=True)
            run(folder, range(resume_step + 1, 8), resume_step=resume_step)
            assert (folder / FILE_NAME).read_bytes() == whole


def test_a_run_without_experts_or_with_interval_0_has_no_history(tmp_path: Path) -> None:
    run(tmp_path, range(1, 3), interval=0)
    assert not (tmp_path / FILE_NAME).exists()
    assert read_history(tmp_path) == []
    assert "moe/max_violation" in read_rows(tmp_path / "metrics.jsonl")[1]


@settings(max_examples=30)
@given(interval=st.integers(0, 5), total=st.integers(1, 20))
def test_records_are_due_at_the_first_the_last_and_every_nth_step(
    interval: int, total: int
) -> None:
    due = [s for s in range(1, total + 1) if is_due(s, interval=interval, total_steps=total)]
    wanted = {1, total, *range(interval, total + 1, interval)} if interval else set()
    assert due == sorted(wanted)
