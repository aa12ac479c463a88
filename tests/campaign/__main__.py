"""`make campaign`: kill runs and damage checkpoints at random, and write down what came of it.

    python -m tests.campaign [--seed N] [--kills 200] [--damages 40] [--minutes M] [--table FILE]

Each trial is a function of the seed and its number. What stands in the table is not done again, so
the same command goes on after an interruption, and a trial whose lines were deleted is run again.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.campaign.trials import GOOD, Bench, Row, trials
from tests.support.runs import ROOT, Launcher

TABLE = ROOT / "docs" / "campaign.csv"
FIELDS = ("seed", "trial", "kind", "ranks", "what", "outcome", "note")


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill runs and damage checkpoints at random.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--damages", type=int, default=40)
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no trial after these")
    parser.add_argument("--table", type=Path, default=TABLE)
    parser.add_argument("--scratch", type=Path, help="where runs go; the failed ones stay there")
    given = parser.parse_args()
    rows = read(given.table)
    end = time.monotonic() + 60 * given.minutes
    scratch = given.scratch or Path(tempfile.mkdtemp(prefix="campaign"))
    with Launcher() as launcher:
        bench = Bench(launcher, scratch)
        while time.monotonic() < end:
            done = counts(rows)
            if done["kill"] >= given.kills and done["damage"] >= given.damages:
                break
            number = first_missing(rows, given.seed)
            ((_, found),) = trials(bench, seed=given.seed, first=number, count=1)
            append(given.table, given.seed, number, found)
            rows = read(given.table)
            print(
                f"trial {number}: " + "; ".join(f"{r.what}: {r.outcome}" for r in found), flush=True
            )
    print(summary(rows))
    bad = [row for row in rows if row["outcome"] not in (*GOOD, "missed")]
    if bad:
        print(f"what failed is in {scratch}")
    return 1 if bad else 0


def read(table: Path) -> list[dict[str, str]]:
    if not table.exists():
        return []
    with table.open(newline="") as file:
        return list(csv.DictReader(file))


def append(table: Path, seed: int, trial: int, rows: list[Row]) -> None:
    new = not table.exists()
    with table.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if new:
            writer.writerow(FIELDS)
        for row in rows:
            note = " ".join(row.note.split())
            writer.writerow((seed, trial, row.kind, row.ranks, row.what, row.outcome, note))


def first_missing(rows: list[dict[str, str]], seed: int) -> int:
    """The next trial of a seed: a new one, or an old one whose lines were deleted."""
    done = {int(row["trial"]) for row in rows if int(row["seed"]) == seed}
    return next(number for number in itertools.count() if number not in done)


def counts(rows: list[dict[str, str]]) -> Counter[str]:
    """Kills that came in time, and damaged files."""
    return Counter(row["kind"] for row in rows if row["outcome"] != "missed")


def summary(rows: list[dict[str, str]]) -> str:
    """Outcomes by what was done, as lines."""
    lines = []
    for kind in ("kill", "damage"):
        outcomes = Counter(row["outcome"] for row in rows if row["kind"] == kind)
        text = ", ".join(f"{name} {count}" for name, count in sorted(outcomes.items()))
        lines.append(f"{kind}: {counts(rows)[kind]} ({text})")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
