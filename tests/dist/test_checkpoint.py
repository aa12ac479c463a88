"""Checkpoints of a small model with both kinds of attention: exact at the same layout, equal at any
other, and sound after a failed or killed save. Four launches carry all assertions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.checkpoint.save import MOST_FILES

ROOT = Path(__file__).resolve().parents[2]
MAIN = "tests.support.checkpoint_worker"
LAYOUTS = ("tensor", "pipeline", "virtual", "data", "data_plain")


def launch(mode: str, folder: Path, *, ranks: int = 1, fails: bool = False) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", "-m"]
    if ranks > 1:
        command += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
    log = folder / f"{mode}.log"
    # Into a file: a writer that outlived its run would hold a pipe open.
    with log.open("w") as output:
        done = subprocess.run(
            [*command, MAIN, mode, str(folder)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=500,
            check=False,
        )
    assert (done.returncode != 0) == fails, log.read_text()[-3000:]
    return dict(json.loads((folder / f"{mode}.json").read_text()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def one(folder: Path) -> dict[str, Any]:
    return launch("one", folder)


@pytest.fixture(scope="module")
def many(folder: Path, one: dict[str, Any]) -> dict[str, Any]:
    return launch("many", folder, ranks=2)


@pytest.fixture(scope="module")
def back(folder: Path, many: dict[str, Any]) -> dict[str, Any]:
    return launch("back", folder)


@pytest.fixture(scope="module")
def crash(folder: Path) -> dict[str, Any]:
    return launch("crash", folder, fails=True)


def test_resume_at_the_same_layout_is_bit_exact(one: dict[str, Any], folder: Path) -> None:
    sizes = [file.stat().st_size for file in (folder / "one/step_00000002").glob("*.distcp")]
    assert len(sizes) == MOST_FILES
    assert max(sizes) < 1.5 * sum(sizes) / len(sizes), "written at a time, none much later"
    assert one["resumed"] == 0.0
    assert one["resumed_norm_equal"]
    assert one["same_noise"], "the random states came back"
    assert one["extra"] == one["weights_only"] == {"tokens": 128, "run": "abc"}
    assert one["smallest_moment"] > 0.0, "the comparison is not one of zeros"


def test_precision_may_change_and_float32_parameters_in_bf16_models_keep_their_moments(
    one: dict[str, Any],
) -> None:
    assert one["bf16_count"] > 40
    assert one["bf16_mains"] == 0.0, "main weights read the float32 weights, not their rounding"
    assert one["fp32_from_bf16"] == 0.0, "a float32 model reads the main weights"
    assert one["bf16_plain"] == 0.0, "without a sharded optimizer too"
    assert one["bf16_moments"] == 0.0


def test_weight_decay_reaches_the_groups_of_the_table(one: dict[str, Any]) -> None:
    assert one["decay"]["optimizer"] == one["decay"]["table"]
    assert min(one["decay"]["table"]) > 0


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_state_of_a_sharded_optimizer_is_gathered_whole(
    one: dict[str, Any], many: dict[str, Any], precision: str
) -> None:
    main = ["fp32_param"] if precision == "bf16" else []
    alone, together = (found["gathered"][precision] for found in (one, many))
    for found in (alone, together):
        assert found["wrong"] == 0
        assert found["count"] > 40
        assert found["names"] == ["exp_avg", "exp_avg_sq", *main]
        # Once this is 0, checkpoint/gather.py can go.
        assert found["wrong in megatron-core"] > 40
    assert alone["copies"] == 0, "one rank has all of it"
    assert together["copies"] > 0


@pytest.mark.parametrize("name", LAYOUTS)
def test_any_layout_loads_the_checkpoint_of_one_rank(many: dict[str, Any], name: str) -> None:
    assert many[name]["loaded"] == 0.0, "weights and moments, whole tensors"
    # One step from equal state; rounding by another order of summation only.
    assert many[name]["trained"] < 1e-4
    assert many[name]["norm"] < 1e-6, "every gradient counts once in the norm"
    assert many[name]["again"] == 0.0, "and reads back its own, saved in the background or not"


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("sharded", [True, False])
def test_one_rank_loads_the_checkpoint_of_any_layout(
    back: dict[str, Any], name: str, sharded: bool
) -> None:
    assert back[f"{name} {sharded}"] == 0.0


@pytest.mark.parametrize(
    ("message", "parts"),
    [
        ("absent", ["no such checkpoint", "step_00000002"]),
        ("other", ["not a complete checkpoint", "step_*"]),
        ("shape", ["output_layer.weight is [128, 32] there and [256, 32] here", "config.yaml"]),
        ("left_over", ["not in the model: decoder.layers.1.", "and more", "run.fresh=true"]),
        ("damaged", ["damaged", ".metadata: expected", "found no file", "latest"]),
        ("truncated", ["distcp: expected", "bytes, found", "latest"]),
        ("flipped", ["distcp: expected", "with CRC-32", "latest"]),
        ("no_sums", ["checksums.json: found no file", "latest"]),
        ("older_truncated", ["distcp has", "bytes, not the", "latest"]),
        ("blocked", ["cannot be prepared", "relaunch"]),
        ("not_json", ["extra.json", "set is not JSON serializable"]),
    ],
)
def test_errors_say_what_and_what_to_do(
    one: dict[str, Any], message: str, parts: list[str]
) -> None:
    for part in parts:
        assert part in one["messages"][message]


def test_a_checkpoint_from_before_checksums_is_read(one: dict[str, Any]) -> None:
    assert one["older"] == {"tokens": 128, "run": "abc"}


@pytest.mark.parametrize("name", ["full_async", "full_sync"])
def test_a_failed_write_leaves_nothing_and_the_next_save_works(
    crash: dict[str, Any], name: str
) -> None:
    assert "Check free space" in crash[name]
    assert crash[f"{name}_left"] == ["latest", "step_00000001"]
    assert crash[f"{name}_after"] == ["latest", "step_00000001", "step_00000003"]


def test_training_does_not_wait_until_old_checkpoints_are_deleted(crash: dict[str, Any]) -> None:
    kept = ["latest", "step_00000002", "step_00000003"]
    assert crash["while_deleting"] == [".step_00000001.old", *kept]
    assert crash["deleted"] == kept


def test_a_kill_in_the_middle_of_a_save_leaves_the_one_before(
    crash: dict[str, Any], folder: Path
) -> None:
    from megatron_ext.checkpoint import paths

    latest = paths.latest(folder / "crash")
    assert latest is not None
    assert latest.name == "step_00000001"
    assert list(paths.step_folders(folder / "crash")) == [1]
    assert list((folder / "crash").glob(".step_00000002.*.tmp"))
    assert crash["helpers"] == []
    paths.clean(folder / "crash")
    assert sorted(p.name for p in (folder / "crash").iterdir()) == ["latest", "step_00000001"]
