"""The time of a step follows from counts and speeds, and is near what one H200 took."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_ext.config.compose import compose
from megatron_ext.errors import ConfigError
from megatron_ext.plan.calibration import H200, load_calibration
from megatron_ext.plan.rehearsal import Chunk, Stage, rehearse
from megatron_ext.plan.report import time_table
from megatron_ext.plan.timing import span, step_time
from megatron_ext.plan.tracker import Work

MINI = ("run.mode=plan", "model=mini", "data=sample", "run.precision=bf16")


def test_products_messages_and_waiting_add_up_by_hand() -> None:
    words = ["run.mode=plan", "model=nano", "parallel.pipeline=2", "plan.world_size=2"]
    config = compose([*words, "train.batch_tokens=1024", "train.micro_batch_size=1"])
    work = Work(traffic=10**9)
    work.flops["dense"] = 5 * 10**11
    work.sent["tensor", "allreduce"] = 10**9
    chunk = Chunk(
        kept=0, forward=0, backward=0, message_in=0, message_out=0,
        work_forward=work, work_backward=work,
    )  # fmt: skip
    stage = Stage(dense=[(10**6, 4)], experts=[], buffers=0, statistics=0, chunks=[chunk])
    speeds = replace(load_calibration(None), dense_tflops=1.0, other_tbs=1.0, in_node_gbs=1.0)
    took = step_time(config, [stage, stage], speeds, world_size=2).parts
    passes = 2 * 4  # forward and backward of four micro-batches
    assert took["dense products"] == pytest.approx(0.5 * passes)
    assert took["all other kernels"] == pytest.approx(0.001 * passes)
    hop = 4 * 256 * 128 * 4 / 1e9  # four messages of 256 tokens to the other stage, one way each
    assert took["messages between ranks"] == pytest.approx(1.0 * passes + hop)
    waits = sum(took[name] for name in list(took)[:6]) / 4
    assert took["waiting for other stages"] == pytest.approx(waits)


def test_products_in_float32_are_not_timed_with_the_speed_of_bfloat16() -> None:
    words = ["run.mode=plan", "model=nano", "train.batch_tokens=1024", "train.micro_batch_size=1"]
    took = {}
    for precision in ("fp32", "bf16"):
        config = compose([*words, f"run.precision={precision}"])
        stage = rehearse(config, 384, stage=0, imbalance=1.0)
        took[precision] = step_time(config, [stage], load_calibration(None), world_size=1).parts
    speeds = load_calibration(None)
    for name, speed in (
        ("dense products", speeds.dense_tflops),
        ("products of experts", speeds.grouped_tflops),
        ("full attention", speeds.attention_tflops),
    ):
        ratio = took["fp32"][name] / took["bf16"][name]
        assert ratio == pytest.approx(speed / speeds.fp32_tflops), name


@pytest.mark.parametrize(
    ("kind", "ranks"), [("tensor", 2), ("expert", 4), ("data", 16), ("pipeline", 32)]
)
def test_groups_stretch_over_as_many_ranks_as_their_stride_says(kind: str, ranks: int) -> None:
    layout = ["parallel.tensor=2", "parallel.expert=4", "parallel.pipeline=2"]
    config = compose(["run.mode=plan", "model=nano", *layout, "plan.world_size=32"])
    assert span(config, kind, world_size=32) == ranks


@pytest.mark.parametrize(
    ("words", "seconds"),
    [
        (("train.micro_batch_size=4",), 0.592),
        (("train.micro_batch_size=4", "residual=block"), 0.601),
        (("train.micro_batch_size=8", "data.sequence_length=8192", "train.recompute=full"), 0.767),
        (("train.micro_batch_size=1", "data.sequence_length=65536", "train.recompute=full"), 1.46),
    ],
    ids=["fitted", "attention residuals", "recomputed", "long"],
)
def test_time_that_one_h200_was_busy_is_predicted(words: tuple[str, ...], seconds: float) -> None:
    config = compose([*MINI, "train.batch_tokens=65536", *words])
    stage = rehearse(config, 384, stage=0, imbalance=1.0)
    took = step_time(config, [stage], load_calibration(None), world_size=1)
    # 10 % was the largest difference; the first row is what one of the speeds was fitted to.
    assert took.total == pytest.approx(seconds, rel=0.12)


def test_the_table_tells_the_cost_and_what_is_assumed() -> None:
    config = compose([*MINI, "plan.gpu_hour_price=2", "train.steps=3600"])
    stage = rehearse(config, 384, stage=0, imbalance=1.0)
    speeds = load_calibration(None)
    took = step_time(config, [stage], speeds, world_size=1)
    text = time_table(config, took, speeds, world_size=1, flops=1e9)
    assert f"{took.total:.4g} GPU hours, {2 * took.total:.4g} at 2 an hour" in text
    assert "assumed, not measured: memory_tbs, gpus_per_node, in_node_gbs" in text


def test_a_calibration_file_that_is_no_good_says_what_is_allowed(tmp_path: Path) -> None:
    good = json.loads(H200.read_text(encoding="utf-8"))
    for change, message in (
        ({"dense_tflops": {"value": 0, "basis": "measured"}}, "dense_tflops=0: must be above 0"),
        ({"kda_ns": {"basis": "measured"}}, "'value' is missing or wrong"),
    ):
        path = tmp_path / "speeds.json"
        path.write_text(json.dumps(good | change), encoding="utf-8")
        with pytest.raises(ConfigError, match=message):
            load_calibration(str(path))
    with pytest.raises(ConfigError, match="cannot be read"):
        load_calibration(str(tmp_path / "none.json"))
