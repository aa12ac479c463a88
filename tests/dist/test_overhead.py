"""`bench/overhead.py` compares steps of a run with bare ones."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.dist.test_resume import TINY
from tests.support.runs import QUIET, ROOT


def test_the_mean_weighs_measured_steps_by_how_often_they_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    bench = importlib.import_module("overhead")
    watched = {2: 90.0} | dict.fromkeys(range(6, 31), 1.1) | {10: 3.1, 20: 2.1, 30: 2.1}
    table = bench.rows(1.0, watched, interval=10, total=30)
    assert [row["s"] for row in table] == pytest.approx([1.0, 1.1, 2.1, 1.2])
    assert [row["more"] for row in table] == [None, "10.00 %", None, "20.00 %"]


def test_a_run_is_timed_from_row_to_row(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    words = ["--bare", "2", "--json", str(file), *TINY]
    done = subprocess.run(
        [
            *(sys.executable, "-W", "ignore", "bench/overhead.py", *words),
            *("train.steps=12", "logging.health_interval=4"),
        ],
        cwd=ROOT,
        env=os.environ | QUIET,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (table,) = json.loads(file.read_text(encoding="utf-8"))["tables"].values()
    assert len(table) == 4
    assert all(row["s"] > 0 for row in table)
