"""A seeded part of `make campaign`: ten kills in every phase and eight damaged files."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.campaign import __main__ as campaign
from tests.campaign.phases import Kill
from tests.campaign.trials import (
    Bench,
    Row,
    damage_run,
    judge,
    kill_chain,
    prepare_chain,
)
from tests.support.runs import Launcher

# One or two of each phase, at points that a seed drew; two ranks and one.
ONE = [
    Kill("data", 0, 3, 0.214, True),
    Kill("forward", 0, 2, 0.630, False),
    Kill("writing", 0, 1, 0.377, False),
    Kill("finalize", 0, 1, 0.481, True),
    Kill("writer", 0, 1, 0.702, False),
]
TWO = [
    Kill("save", 1, 1, 0.345, False),
    Kill("optimizer", 1, 2, 0.560, True),
    Kill("finalize", 0, 1, 0.205, False),
]
DAMAGES = [
    (1, [(10, "__0_0.distcp", "flip"), (8, ".metadata", "zero"), (6, "extra.json", "truncate")]),
    (2, [(10, "metadata.json", "lose")]),
    (
        1,
        [
            (10, "__0_0.distcp", "replace"),
            (8, "checksums.json", "lose"),
            (6, "__0_0.distcp", "lengthen"),
            (4, ".metadata", "lose"),
        ],
    ),
]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with Launcher() as launcher:
        yield Bench(launcher, tmp_path_factory.mktemp("campaign"))


def outcomes(rows: list[Row]) -> list[tuple[str, str, str]]:
    return [(row.what, row.outcome, row.note) for row in rows]


@pytest.mark.parametrize(("ranks", "kills"), [(1, ONE), (2, TWO)])
def test_killed_runs_end_in_the_same_loss_sequence(
    ranks: int, kills: list[Kill], bench: Bench
) -> None:
    rows = kill_chain(bench, f"kills{ranks}", ranks, kills)
    assert outcomes(rows) == [(row.what, "same", "") for row in rows]
    assert len(rows) == len(kills)


def test_a_killed_preparation_of_data_ends_in_the_same_shards(bench: Bench) -> None:
    rows = prepare_chain(bench, "prepare", [(0.02, True), (0.1, False)])
    assert all(row.outcome in ("same", "missed") for row in rows), outcomes(rows)
    assert any(row.outcome == "same" for row in rows), "at least one came in time"


@pytest.mark.parametrize(("ranks", "damages"), DAMAGES)
def test_damaged_checkpoints_are_passed_over_or_refused(
    ranks: int, damages: list[tuple[int, str, str]], bench: Bench
) -> None:
    name = f"damage{ranks}{len(damages)}"
    rows = damage_run(bench, name, ranks, damages, name)
    expected = "refused" if len(damages) == 4 else "same"
    assert outcomes(rows) == [(row.what, expected, "") for row in rows]


@pytest.mark.parametrize(
    ("codes", "text", "outcome"),
    [
        ([None], "", "hang"),
        ([0], "resumes after step 2 from x", "lost"),
        ([0], "starts anew with seed 1", "lost"),
        ([30], "error: a file is bad", "silent"),
        ([1], "Traceback", "crash"),
        ([0], "resumes after step 4 from x", "finished"),
        ([-9], "resumes after step 4 from x", ""),
    ],
)
def test_the_judge_sees_what_is_wrong(codes: list[int | None], text: str, outcome: str) -> None:
    kill = Kill("forward", 0, 1, 0.5, False)
    assert judge(codes, text, 4, kill)[0] == outcome


def test_the_table_holds_no_failure_and_the_page_says_what_it_holds() -> None:
    rows = campaign.read(campaign.TABLE)
    assert {row["outcome"] for row in rows} <= {"same", "refused", "missed"}
    done = campaign.counts(rows)
    assert done["kill"] >= 200
    assert done["damage"] >= 40
    page = (campaign.TABLE.parent / "operations.md").read_text()
    assert f"{done['kill']} kills and {done['damage']} damaged files, 0 failed" in page


def test_a_trial_whose_lines_are_deleted_is_next() -> None:
    rows = [{"seed": "0", "trial": str(number)} for number in (0, 1, 1, 3)]
    assert campaign.first_missing(rows, 0) == 2
    assert campaign.first_missing([*rows, {"seed": "0", "trial": "2"}], 0) == 4
    assert campaign.first_missing(rows, 1) == 0
