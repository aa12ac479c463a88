"""One trial: a run that is killed again and again, a run whose checkpoints are damaged, or a
preparation of data that is killed; and what came of it."""

from __future__ import annotations

import hashlib
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.campaign.phases import PHASES, Kill
from tests.dist.test_resume import TINY, reproducible_rows
from tests.support.damage import KINDS
from tests.support.runs import ROOT, Launcher, Run

STEPS, KEEP = 10, 4
# Longer than the watchdog takes, on a machine that is busy with other things.
HANG_SECONDS, LIMIT_SECONDS = 60, 400
COMMAND = [
    *TINY,
    f"train.steps={STEPS}",
    f"checkpoint.keep={KEEP}",
    "evaluate.interval_tokens=0",
    f"resilience.hang_seconds={HANG_SECONDS}",
]
# What a message of ours advises; an ending that we explain has one of these.
REMEDY = re.compile(r"from a copy|relaunch|run\.fresh=true|checkpoint\.load|Write one of these")
GOOD = ("same", "refused")


@dataclass
class Row:
    """A line of the table.

    Attributes:
        what: the kill or the damage, in words.
        outcome: `same` (the same loss sequence in the end), `refused` (nothing sound was left, and
            the message says what to do), or what went wrong: `different`, `lost` (a checkpoint),
            `hang`, `crash`, `silent` (no remedy named), `missed` (the moment never came: no kill).
        note: more on what went wrong.
    """

    kind: str
    ranks: int
    what: str
    outcome: str = ""
    note: str = ""


@dataclass
class Bench:
    """What trials share: the launcher, a folder, and runs that nothing happened to."""

    launcher: Launcher
    folder: Path
    references: dict[int, Path] = field(default_factory=dict)

    def reference(self, ranks: int) -> Path:
        if ranks not in self.references:
            folder = self.folder / f"reference{ranks}" / "run"
            codes, text = finish(self, start(self, folder, ranks))
            assert codes == [0] * ranks, text
            self.references[ranks] = folder
        return self.references[ranks]


def start(bench: Bench, folder: Path, ranks: int, before: str = "") -> list[Run]:
    words, output = [*COMMAND, f"run.dir={folder}"], folder.with_suffix(".out")
    folder.parent.mkdir(parents=True, exist_ok=True)
    if ranks == 1:
        return [bench.launcher.start(words, output=output, before=before)]
    return bench.launcher.start_ranks(words, ranks=ranks, output=output, before=before)


def finish(bench: Bench, runs: list[Run]) -> tuple[list[int | None], str]:
    """Exit codes, None for a rank that hangs, and all output."""
    end = time.monotonic() + LIMIT_SECONDS
    codes: list[int | None] = []
    for run in runs:
        process = psutil.Process(run.pid)
        while process.status() != psutil.STATUS_ZOMBIE and time.monotonic() < end:
            time.sleep(0.02)
        hangs = process.status() != psutil.STATUS_ZOMBIE
        if hangs:
            process.kill()
        codes.append(None if run.wait() is not None and hangs else run.wait())
    return codes, "\n".join(run.text for run in runs)


def latest_step(folder: Path) -> int:
    pointer = folder / "checkpoints" / "latest"
    return int(pointer.read_text().strip().removeprefix("step_")) if pointer.is_file() else 0


def draw_kill(chance: random.Random, ranks: int) -> Kill:
    phase = chance.choice(sorted(PHASES))
    return Kill(
        phase=phase,
        rank=chance.randrange(ranks),
        # Occurrences are batches, steps, or saves, of which there is one in two steps.
        count=chance.randint(
            1, 8 if phase == "data" else 3 if phase in ("forward", "optimizer") else 2
        ),
        point=round(chance.random(), 3),
        group=chance.random() < 0.5,
    )


def kill_chain(bench: Bench, name: str, ranks: int, kills: list[Kill]) -> list[Row]:
    """One run, killed once a launch, then left to end."""
    reference, folder = bench.reference(ranks), bench.folder / name / "run"
    rows = []
    for kill in kills:
        row = Row("kill", ranks, f"{kill.phase} of rank {kill.rank}, {_where(kill)}")
        rows.append(row)
        before = latest_step(folder)
        codes, text = finish(bench, start(bench, folder, ranks, kill.before))
        row.outcome, row.note = judge(codes, text, before, kill)
        if row.outcome == "finished":
            row.outcome = "missed"
            break
    before = latest_step(folder)
    codes, text = finish(bench, start(bench, folder, ranks))
    end, note = judge(codes, text, before, None)
    if end == "finished":
        same = reproducible_rows(folder) == reproducible_rows(reference)
        end, note = ("same", "") if same else ("different", "rows differ from the reference's")
    for row in rows:
        row.outcome = row.outcome or end
        row.note = row.note or (note if row.outcome == end else "")
    if all(row.outcome in (*GOOD, "missed") for row in rows):
        shutil.rmtree(folder.parent)
    return rows


def _where(kill: Kill) -> str:
    whom = "with its helpers" if kill.group else "alone"
    return f"occurrence {kill.count}, at {kill.point:.3f}, {whom}"


def judge(codes: list[int | None], text: str, before: int, kill: Kill | None) -> tuple[str, str]:
    """What is wrong with the end of a launch; `finished`, or nothing when it died as it should."""
    if None in codes:
        return "hang", f"codes {codes}"
    resumed = re.search(r"resumes after step (\d+)|this run is finished, step (\d+)", text)
    step = int(resumed[1] or resumed[2]) if resumed else 0
    # A run that is killed before it has read anything says nothing.
    if (resumed or "starts anew" in text) and step < before:
        return "lost", f"step {before} was saved, the run went on from {step}"
    if all(code == 0 for code in codes):
        return "finished", ""
    if any(code in (20, 30, 40) for code in codes) and not REMEDY.search(text):
        return "silent", text[-300:]
    died = kill is not None and (codes[kill.rank] == -9 or kill.phase == "writer")
    if not died:
        return "crash", f"codes {codes}: {text[-300:]}"
    return "", ""


def draw_damage(chance: random.Random) -> list[tuple[int, str, str]]:
    """(step, file, kind) for the newest checkpoints: one to three of four, seldom all."""
    count = chance.choice((1, 1, 1, 2, 2, 3, 3, KEEP))
    steps = [STEPS - 2 * i for i in range(count)]
    names = ("__0_0.distcp", "__0_0.distcp", ".metadata", "metadata.json", "extra.json")
    return [
        (step, chance.choice((*names, "checksums.json")), chance.choice(sorted(KINDS)))
        for step in steps
    ]


def damage_run(
    bench: Bench, name: str, ranks: int, damages: list[tuple[int, str, str]], seed: str
) -> list[Row]:
    """A finished run, its newest checkpoints damaged, told to go on."""
    reference, folder = bench.reference(ranks), bench.folder / name / "run"
    shutil.copytree(reference, folder)
    rows, chance = [], random.Random(seed)
    for step, file, kind in damages:
        path = folder / "checkpoints" / f"step_{step:08d}" / file
        rows.append(Row("damage", ranks, f"step {step}, {file}: {KINDS[kind](path, chance)}"))
    codes, text = finish(bench, start(bench, folder, ranks))
    newest_sound = STEPS - 2 * len(damages)
    if None in codes:
        outcome, note = "hang", f"codes {codes}"
    elif len(damages) == KEEP:
        refused = all(code == 30 for code in codes) and REMEDY.search(text)
        outcome, note = ("refused", "") if refused else ("silent", f"codes {codes}: {text[-300:]}")
    elif codes != [0] * ranks:
        outcome, note = "crash", f"codes {codes}: {text[-300:]}"
    elif f"resumes after step {newest_sound} " not in text:
        outcome, note = "lost", "did not go on from the newest sound one"
    elif not all(f"step_{step:08d}/{file}" in text for step, file, _ in damages):
        outcome, note = "silent", "a damaged file is not named"
    elif "put their files back from a copy" not in text:
        outcome, note = "silent", "no remedy"
    elif reproducible_rows(folder) != reproducible_rows(reference):
        outcome, note = "different", "rows differ from the reference's"
    else:
        outcome, note = "same", ""
    for row in rows:
        row.outcome, row.note = outcome, note
    if outcome in GOOD:
        shutil.rmtree(folder.parent)
    return rows


def _prepared(folder: Path) -> str:
    """Digest of everything in a prepared folder but where and when it was made."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".json")
    content = b"".join(str(path.relative_to(folder)).encode() + path.read_bytes() for path in files)
    return hashlib.blake2b(content).hexdigest()


def _prepare(output: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "data/prepare.py", "data/sample/raw", "--output", str(output)]
    command += ["--name", "sample", "--shard-mib", "0.05", "--workers", "2"]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def prepare_chain(bench: Bench, name: str, delays: list[tuple[float, bool]]) -> list[Row]:
    """A preparation of data, killed again and again, then left to end."""
    whole, folder = bench.folder / "prepared", bench.folder / name / "prepared"
    if not whole.exists():
        assert _prepare(whole).wait() == 0
    rows = []
    for delay, group in delays:
        whom = "with its workers" if group else "alone"
        row = Row("kill", 1, f"data preparation, after {delay:.3f} s, {whom}")
        rows.append(row)
        process = _prepare(folder)
        while not folder.exists() and process.poll() is None:
            time.sleep(0.002)
        time.sleep(delay)
        family = [psutil.Process(process.pid)] if process.poll() is None else []
        family += family[0].children(recursive=True) if family and group else []
        for member in family:
            member.kill()
        if process.wait() != -9:
            row.outcome = "missed"
    process = _prepare(folder)
    code = process.wait(timeout=LIMIT_SECONDS)
    assert process.stderr is not None
    text = process.stderr.read().decode()
    same = code == 0 and _prepared(folder) == _prepared(whole)
    for row in rows:
        row.outcome = row.outcome or ("same" if same else "different" if code == 0 else "crash")
        row.note = "" if same else text[-300:]
    if same:
        shutil.rmtree(folder.parent)
    return rows


def trials(bench: Bench, *, seed: int, first: int, count: int) -> Iterator[tuple[int, list[Row]]]:
    """The numbered trials of a seed; each depends on its number alone."""
    for number in range(first, first + count):
        chance = random.Random(f"{seed} {number}")
        name, ranks = f"trial{number}", 1 + number % 2
        if number % 6 == 5:
            delays = [(chance.uniform(0, 0.4), chance.random() < 0.5) for _ in range(4)]
            yield number, prepare_chain(bench, name, delays)
        elif number % 6 in (2, 3):
            yield number, damage_run(bench, name, ranks, draw_damage(chance), f"{seed} {number}")
        else:
            kills = [draw_kill(chance, ranks) for _ in range(5)]
            yield number, kill_chain(bench, name, ranks, kills)
