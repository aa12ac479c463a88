"""What checkpoints cost: python bench/saves.py [--every 50] [--saves 3] [key=value ...]

Other words are overrides as for pretrain.py. A run is trained with a save in the background every
`--every` steps; its rows say how long training stood still for them. Then the same model, after a
step, is saved while nothing else happens, and loaded, as a resume does, from files that are not in
memory, beside one file of as many bytes. `--saves 0` leaves the run out, for a model that is too
large to train here, and `--repeats 0` the second part. One rank.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common import Row, finish

from launch.measure import MIB, disk_rate
from megatron_ext.checkpoint.load import load
from megatron_ext.checkpoint.save import Checkpointer
from megatron_ext.config.compose import compose
from megatron_ext.parallel import runtime
from megatron_ext.train.loop import save
from megatron_ext.train.state import TrainState, build_state
from megatron_ext.train.step import train_step

ROOT = Path(__file__).resolve().parents[1]


def waiting_rows(rows: Sequence[dict[str, Any]], *, every: int) -> list[Row]:
    """How long training waited for each save of a run.

    Args:
        rows: of `metrics.jsonl`. What the save of a step took stands in the rows after it.
        every: steps between saves. A save with fewer rows after it is left out.
    """
    found = []
    for first in range(every, len(rows) - every + 1, every):
        after = rows[first : first + every]
        stalls = [row["checkpoint/stall_seconds"] for row in after]
        # Evaluation and logging are left out: as if no time passed in them.
        wall = sum(stalls) + sum(row["step_seconds"] for row in after)
        found.append(
            {
                "save of step": first,
                "training waited s": sum(stalls),
                "wall time to the next s": wall,
                "share": f"{100 * sum(stalls) / wall:.2f} %",
                # None: not yet, at the next one.
                "until complete s": after[-1].get("checkpoint/save_seconds"),
            }
        )
    return found


def trained_rows(words: list[str], folder: Path, *, every: int, saves: int) -> list[Row]:
    """Train in `folder` with that many saves inside, and read the rows."""
    command = [sys.executable, "-W", "ignore", str(ROOT / "pretrain.py"), *words]
    command += [f"run.dir={folder}", f"checkpoint.interval={every}"]
    subprocess.run([*command, f"train.steps={every * (saves + 1)}"], check=True)
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return waiting_rows([json.loads(line) for line in lines], every=every)


def throughput_rows(state: TrainState, folder: Path, *, repeats: int) -> list[Row]:
    """Save and load beside the disk, GB/s; medians."""
    train_step(state)  # memory of moments that nobody has written to is not there yet
    checkpointer = Checkpointer(folder, mesh=state.mesh, asynchronous=False, keep=1, keep_every=0)
    seconds: dict[str, list[float]] = {name: [] for name in ("save", "load", "write", "read")}
    for number in range(1, repeats + 1):
        state.step = number  # a step that is saved already is not saved again
        seconds["save"].append(_seconds(lambda: save(state, checkpointer)))
        path = folder / f"step_{number:08}"
        size = sum(file.stat().st_size for file in path.iterdir())
        _forget(path.iterdir())
        seconds["load"].append(
            _seconds(lambda path=path: load(path, state.chunks, state.optimizer, state.mesh))
        )
        seconds["write"].append(size / 1e9 / disk_rate(folder, megabytes=max(1, size // MIB)))
        file = max(path.glob("*.distcp"), key=lambda file: file.stat().st_size)
        _forget([file])
        seconds["read"].append(size / file.stat().st_size * _seconds(lambda file=file: _read(file)))
    checkpointer.close()
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return [
        {
            "what": what,
            "MB": size / 1e6,
            "s": medians[name],
            "GB/s": size / 1e9 / medians[name],
            "of the disk's": f"{100 * medians[disk] / medians[name]:.0f} %" if disk else None,
        }
        for what, name, disk in (
            ("one file written and on disk", "write", ""),
            ("save", "save", "write"),
            ("one file read", "read", ""),
            ("load, checksums first", "load", "read"),
        )
    ]


def _seconds(action: Callable[[], object]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def _read(file: Path) -> None:
    with file.open("rb", buffering=0) as stream:
        while stream.read(8 * MIB):
            pass


def _forget(files: Any) -> None:
    """Let the system drop what it holds of files that are on the disk."""
    for file in files:
        with file.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    """Trains, saves, loads, prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--every", type=int, default=50, help="steps between saves of the run")
    parser.add_argument("--saves", type=int, default=3, help="saves in the midst of the run")
    parser.add_argument(
        "--repeats", type=int, default=3, help="saves and loads, of which medians; 0: none"
    )
    parser.add_argument("--folder", type=Path, help="for checkpoints; default: a temporary one")
    parser.add_argument("--json", type=Path, help="also write the tables there")
    options, words = parser.parse_known_args()
    runtime.quiet()
    config = compose([*words, "run.dir=bench-saves-unused"], world_size=1)
    tables = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        if options.saves:
            tables[f"a run that saves every {options.every} steps"] = trained_rows(
                words, folder / "run", every=options.every, saves=options.saves
            )
        if options.repeats:
            state = build_state(config, runtime.start(config.run))
            tables["throughput"] = throughput_rows(
                state, folder / "checkpoints", repeats=options.repeats
            )
        print("load average", *os.getloadavg())
        finish(tables, json_file=options.json)
    runtime.stop()


if __name__ == "__main__":
    main()
