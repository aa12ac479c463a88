"""`profile.steps`: the files that a run leaves can be read back, and hold the step asked for."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from tests.dist.test_resume import TINY, rows
from tests.support.runs import Launcher


def test_a_chosen_step_leaves_a_trace_and_a_table_of_kernels(
    launcher: Launcher, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    words = [*TINY, "train.steps=3", "checkpoint.interval=0", f"run.dir={folder}"]
    words += ["profile.steps=[2]", "profile.ranks=[1]"]
    ranks = launcher.start_ranks(words, ranks=2, output=folder.with_suffix(".out"))
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].text
    assert f"profile of step 2 in {folder}/profile/step_00000002/" in ranks[0].text
    written = sorted(path.name for path in (folder / "profile").rglob("*") if path.is_file())
    assert written == ["rank_00001.kernels.txt", "rank_00001.trace.json.gz"]
    place = folder / "profile" / "step_00000002"
    with gzip.open(place / "rank_00001.trace.json.gz", "rt") as file:
        events = [e for e in json.load(file)["traceEvents"] if e.get("ph") == "X"]
    names = [event["name"] for event in events]
    # Of the backward pass and of the optimizer too: the whole step.
    for part in ("aten::mm", "MmBackward0", "gloo:all_reduce", "aten::addcdiv_"):
        assert any(part in name for name in names), part
    table = (place / "rank_00001.kernels.txt").read_text()
    assert "aten::mm" in table
    found = rows(folder)
    kernels = [row.get("profile/kernels") for row in found]
    assert kernels[0] is kernels[2] is None
    # Two layers, two micro-batches a rank.
    said = int(table.split(": ", 1)[1].split()[0])
    assert kernels[1] == said / 4
    assert kernels[1] > 50
