"""Kernel variants chosen before are found by the GPU's name, and other GPUs are left alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_ext.ops.kda import tuned


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
