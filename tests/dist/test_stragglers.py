"""A rank slower than the others is named, in layouts where they wait at different places."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_ext.resilience.stragglers import RankTimes, Stragglers
from tests.dist.test_resume import TINY, rows
from tests.support.runs import Launcher


@pytest.mark.parametrize("layout", [[], ["parallel.pipeline=2"]], ids=["data", "pipeline"])
def test_a_slow_rank_is_named(layout: list[str], launcher: Launcher, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = [*TINY, "train.steps=4", "checkpoint.interval=0", f"run.dir={folder}", *layout]
    # Layer 1, of full attention, is on the second stage.
    ranks = launcher.start_ranks(
        [*words, "logging.rank_interval=4"],
        ranks=2,
        output=folder.with_suffix(".out"),
        before="tests.support.incidents:slow_rank:1",
    )
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].text
    text = ranks[0].text
    assert "warning: slow ranks in steps 2 to 4" in text
    host = json.loads((folder / "run.json").read_text())["host"]
    named = text.split("slow ranks in steps")[1].splitlines()[1]
    assert named.startswith(f"  rank 1 on {host}: ")
    row = rows(folder)[3]
    assert row["straggler/rank"] == 1
    assert row["straggler/ratio"] > 1.2
    assert all("straggler/rank" not in other for other in rows(folder)[:3])
    table = json.loads((folder / "ranks.json").read_text())
    fast, slow = table["ranks"]
    assert (table["first_step"], table["last_step"]) == (2, 4)
    # The fast rank's wait is the slow rank's sleep, up to what other processes take of the cores.
    assert fast["wait"] > 0.2
    assert slow["work"] - fast["work"] > 0.2


def table(work: list[float], *, stages: list[int] | None = None, **probe: float) -> Stragglers:
    times = [
        RankTimes(
            rank,
            host=f"host{rank // 2}",
            stage=stages[rank] if stages else 0,
            work=own,
            data=0.0,
            wait=max(work) - own,
            probe=probe.get(f"rank{rank}", 1.0),
        )
        for rank, own in enumerate(work)
    ]
    return Stragglers(1, 10, 0.2, times)


def test_ranks_are_compared_with_those_of_their_stage() -> None:
    stages = [0, 0, 0, 1, 1, 1]
    uneven = table([1.0, 1.0, 1.0, 2.0, 2.0, 2.0], stages=stages)
    assert uneven.slow() == []
    assert uneven.warning() == ""
    late = table([1.0, 1.5, 1.0, 2.0, 2.0, 2.1], stages=stages)
    assert [row.times.rank for row in late.slow()] == [1]
    assert "rank 1 on host0: 1.50 x the median" in late.warning()
    assert late.metrics()["straggler/rank"] == 1


def test_a_probe_names_a_rank_that_keeps_pace_with_its_group() -> None:
    found = table([1.0] * 8, rank6=1.4)
    assert [row.times.rank for row in found.slow()] == [6]
    assert "a matrix product alone takes 1.40 x the median" in found.warning()
    assert "all on host3" in found.warning()
    assert found.metrics()["straggler/probe_rank"] == 6


def test_of_many_slow_ranks_the_slowest_are_listed() -> None:
    found = table([1.0] * 20 + [2.0 + rank for rank in range(8)])
    lines = found.warning().splitlines()
    assert lines[1].startswith("  rank 27 ")
    assert lines[6] == "  and 3 more, see ranks.json"
