"""`bench/scaling.py` with two gloo ranks: starts, verifies, profiles, saves, goes on with one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_two_ranks_on_a_cpu(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    words = ["--cpu", "--set", "resume", "--steps", "1", "--warm-up", "1", "--json", str(file)]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "bench/scaling.py", *words],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    saved, resumed = json.loads(file.read_text()).values()
    assert saved["losses"][0] == pytest.approx(saved["reference_loss"], rel=1e-5)
    assert resumed["next_loss"] == pytest.approx(saved["saves"][-1]["next_loss"], rel=1e-5)
    for rank in saved["profile"]:
        # Tokens travel to the experts of the other rank; nothing can take longer than the step.
        assert 0 < rank["exposed"]["all_to_all"] <= rank["total"]["all_to_all"] < rank["seconds"]
    assert all(save["save_seconds"] > save["stall_seconds"] for save in saved["saves"])
    assert "| ep1 goes on | goes on from ep2 |" in done.stdout
