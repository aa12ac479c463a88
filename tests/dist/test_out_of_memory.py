"""A rank that is out of memory says what was expected, what there was, and what to change."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.dist.test_resume import TINY
from tests.support.runs import Launcher


def test_an_allocation_that_fails_names_the_rank_and_three_ways_out(
    launcher: Launcher, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    words = [*TINY, "train.steps=4", "checkpoint.interval=0", f"run.dir={folder}"]
    ranks = launcher.start_ranks(
        words,
        ranks=2,
        output=folder.with_suffix(".out"),
        before="tests.support.incidents:greedy:1",
    )
    codes = [rank.wait() for rank in ranks]
    assert codes[1] == 20, ranks[1].text
    assert codes[0] != 0, "its peer is gone"
    end = json.loads((folder / "exit.json").read_text())
    assert end["code"] == 20, "not to be started again"
    text = end["reason"]
    assert text in ranks[1].text
    assert text.startswith("out of memory on rank 1 of ")
    assert "pipeline stage 0, after step 2, training step: " in text
    assert "can't allocate memory" in text
    peak = re.search(r"peak +([\d.]+) of ([\d.]+) GiB", text)
    assert peak is not None
    assert 0.1 < float(peak[1]) < float(peak[2])
    total = re.search(r"expected +([\d.]+) MiB by the plan: weights", text)
    assert total is not None
    ways = re.findall(r"^  (\d)\. (\S+)  ([\d.]+) MiB; (.+)$", text, re.M)
    assert [way[1] for way in ways] == [
        "train.micro_batch_size=1",
        "train.recompute=selective",
        "train.recompute=full",
    ]
    assert all(float(way[2]) < float(total[1]) for way in ways)


def test_a_model_that_cannot_be_built_says_so_too(launcher: Launcher, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = [*TINY, f"run.dir={folder}", "train.steps=2", "model.feed_forward_size=1099511627776"]
    run = launcher.start(words, output=folder.with_suffix(".out"))
    assert run.wait() == 20, run.text
    text = json.loads((folder / "exit.json").read_text())["reason"]
    assert "building the model" in text
    assert "GiB by the plan: weights " in text
