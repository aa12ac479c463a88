"""Kernel variants chosen before are found by the GPU's name, and other GPUs are left alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_ext.ops.kda import tuned
from megatron_ext.ops.kda.tune import share_of
from megatron_ext.ops.kda.tune_work import Kda


def test_a_tuned_gpu_gets_its_folder_and_another_one_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuned, "HERE", tmp_path)
    (tmp_path / "NVIDIA_H200").mkdir()
    assert tuned.variables("NVIDIA H200") == {
        "FLA_CONFIG_DIR": str(tmp_path / "NVIDIA_H200"),
        "FLA_CACHE_MODE": "fuzzy",
    }
    assert tuned.variables("Another (80 GB)") == {}
    assert tuned.folder("Another (80 GB)").name == "Another_80_GB"


def test_every_committed_choice_is_complete() -> None:
    for file in tuned.HERE.glob("*/*.json"):
        content = json.loads(file.read_text())
        assert content["kernel_name"] == file.stem
        for entry in [*content["autotune_entries"].values()]:
            assert {"kwargs", "num_warps", "num_stages", "num_ctas"} <= entry["config"].keys()


@pytest.mark.parametrize("shares", [1, 3, 14])
def test_every_variant_is_compiled_by_somebody_and_each_share_can_run(shares: int) -> None:
    variants = list(range(5))
    parts = [share_of(variants, share, shares) for share in range(shares)]
    assert set().union(*parts) == set(variants)
    assert all(variants[0] in part for part in parts)
    assert sum(map(len, parts)) == len(variants) + shares - 1


@pytest.mark.parametrize(
    ("work", "outputs", "gradients"),
    [
        (Kda(2, 8, 4), 1, 8),
        (Kda(2, 8, 4, unbounded=True, final=True), 1, 8),
        (Kda(2, 8, 4, documents=(0, 3, 8), initial=True, final=True), 2, 9),
    ],
)
def test_the_work_gives_outputs_and_all_gradients(work: Kda, outputs: int, gradients: int) -> None:
    found = work(tokens=8, exact=True)
    assert len(found) == outputs + gradients
    assert all(bool(tensor.isfinite().all() and tensor.any()) for tensor in found)
