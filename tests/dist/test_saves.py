"""What checkpoints cost is in the rows of a run, and `bench/saves.py` reads it there."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.dist.test_resume import TINY, rows
from tests.support.runs import QUIET, ROOT, Launcher


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module("saves")


def test_a_row_has_what_training_waited_for_the_save_before_it(
    bench: Any, launcher: Launcher, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    run = launcher.start(
        [*TINY, "train.steps=7", "checkpoint.interval=3", f"run.dir={folder}"],
        output=tmp_path / "out",
        before="tests.support.incidents:dear_saves:x",
    )
    assert run.wait() == 0, run.text
    found = rows(folder)
    stalls = [row["checkpoint/stall_seconds"] for row in found]
    saved = [n for n, stall in enumerate(stalls) if stall >= 7]
    assert saved == [3, 6], "rows 4 and 7, after the saves of steps 3 and 6"
    # Each look of 1 s is in a row too, of the same step or of one after it; nothing else is.
    assert stalls[:3] == pytest.approx([0, 0, 0], abs=0.1)
    assert sum(stalls[3:6]) >= 8
    (first,) = bench.waiting_rows(found[:6], every=3)
    assert first["save of step"] == 3
    assert first["training waited s"] == pytest.approx(sum(stalls[3:6]))
    assert found[-1]["checkpoint/save_seconds"] > 0


def test_the_share_is_of_the_time_to_the_next_save(bench: Any) -> None:
    found = [
        {"step_seconds": 2.0, "checkpoint/stall_seconds": stall, "checkpoint/save_seconds": 3.0}
        for stall in (0.0, 0.0, 0.5, 0.5, 9.0, 0.0, 7.0)
    ]
    assert bench.waiting_rows(found, every=2) == [
        {
            "save of step": 2,
            "training waited s": 1.0,
            "wall time to the next s": 5.0,
            "share": "20.00 %",
            "until complete s": 3.0,
        },
        {
            "save of step": 4,
            "training waited s": 9.0,
            "wall time to the next s": 13.0,
            "share": "69.23 %",
            "until complete s": 3.0,
        },
    ]


def test_throughput_is_that_of_the_bytes_of_the_checkpoint(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    words = ["--saves", "0", "--json", str(file), "--folder", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "bench/saves.py", *words, *TINY],
        cwd=ROOT,
        env=os.environ | QUIET,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (table,) = json.loads(file.read_text())["tables"].values()
    assert [row["what"].split(",")[0] for row in table] == [
        "one file written and on disk",
        "save",
        "one file read",
        "load",
    ]
    for row in table:
        assert row["GB/s"] == pytest.approx(row["MB"] / 1e3 / row["s"])
    assert list(tmp_path.iterdir()) == [file], "nothing is left of the checkpoints"
