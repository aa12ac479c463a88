"""Writing many files in parallel into a folder that appears only when it is complete.

Files are made in `.NAME.partial` beside the output, each under a temporary name until it is whole.
Interrupted, the same command takes the whole ones over; after an error nothing is left.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock
from typing import Any, BinaryIO, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from megatron_ext.checkpoint.hf.blobs import flush
from megatron_ext.errors import CheckpointError

PLAN = "plan.json"
LINE_SECONDS = 10.0


class Stopped(Exception):
    """Another file failed, so this one is not worth finishing."""


@dataclass(frozen=True)
class Job:
    """A file to be made.

    Attributes:
        name: of the file.
        nbytes: about how many; for the progress bar.
        write: fills the open file, and calls `advance` with bytes done. What it returns is kept as
            JSON beside the file until the end.
    """

    name: str
    nbytes: int
    write: Callable[[BinaryIO, Callable[[int], None]], Any]


@contextmanager
def output_folder(output: Path, plan: dict[str, Any]) -> Iterator[Path]:
    """The folder to write into; it becomes `output` at the end of the block.

    Args:
        plan: what is made from what. An unfinished folder of another plan is an error.

    Raises:
        CheckpointError: the output exists, or another conversion into it is unfinished.
    """
    output = output.absolute()
    if output.exists():
        raise CheckpointError(f"{output}: exists already; remove it or name another output")
    partial = output.with_name(f".{output.name}.partial")
    try:
        partial.mkdir(parents=True, exist_ok=True)
        with (partial / PLAN).open("a+") as file:
            _claim(partial, file, json.dumps(plan, indent=1, sort_keys=True))
            try:
                yield partial
            except CheckpointError:
                shutil.rmtree(partial, ignore_errors=True)
                raise
            (partial / PLAN).unlink()
            os.rename(partial, output)
    except OSError as error:
        raise CheckpointError(
            f"{partial}: cannot be written ({error}). Check free space, quota and rights; the same "
            "command then goes on from there"
        ) from error


def _claim(partial: Path, file: TextIO, text: str) -> None:
    """One process at a time, and only what it would itself have begun."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise CheckpointError(f"{partial}: another process is writing there; wait for it") from None
    except OSError:  # a file system without locks
        pass
    file.seek(0)
    begun = file.read()
    if begun not in ("", text):
        raise CheckpointError(
            f"{partial}: is left of another conversion that was interrupted; finish that one with "
            "its own command, or remove the folder"
        )
    if not begun:
        file.write(text)
        file.flush()


def run(jobs: Sequence[Job], folder: Path, *, workers: int, label: str) -> list[Any]:
    """Make the files that are not there yet, and return what each `write` returned.

    Raises:
        CheckpointError: from a job; the others are stopped.
    """
    with _progress(sum(job.nbytes for job in jobs), label) as advance:
        stop = Event()

        def make(job: Job) -> Any:
            file, note = folder / job.name, folder / f"{job.name}.json"
            if not file.exists():
                _write(job, folder, stop, advance)
            else:
                advance(job.nbytes)
            return json.loads(note.read_text())

        with ThreadPoolExecutor(workers) as pool:
            futures = [pool.submit(make, job) for job in jobs]
            try:
                done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            finally:
                # Also when the user interrupts: threads end at the next piece.
                failed = [f for f in futures if f.done() and f.exception() is not None]
                if failed or any(not f.done() for f in futures):
                    stop.set()
                    pool.shutdown(wait=True, cancel_futures=True)
            errors = [f.exception() for f in done if f.exception() is not None]
            errors.sort(key=lambda error: isinstance(error, Stopped))
            if errors:
                raise errors[0]  # type: ignore[misc]
            results = [future.result() for future in futures]
    for job in jobs:
        (folder / f"{job.name}.json").unlink()
    return results


def _write(job: Job, folder: Path, stop: Event, advance: Callable[[int], None]) -> None:
    temporary = folder / f".{job.name}.tmp"

    def step(count: int) -> None:
        advance(count)
        if stop.is_set():
            raise Stopped

    with temporary.open("wb") as stream:
        note = job.write(stream, step)
        flush(stream)
    # Before the file gets its name, so that one with a name has its note.
    (folder / f"{job.name}.json").write_text(json.dumps(note))
    os.replace(temporary, folder / job.name)


@contextmanager
def _progress(total: int, label: str) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal; elsewhere a line now and then. Takes bytes, from any thread."""
    console = Console(stderr=True)
    if console.is_terminal:
        columns = (
            TextColumn(label),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task(label, total=total)
            yield lambda count: progress.advance(task, count)
        return
    lock, start = Lock(), time.monotonic()
    state = {"done": 0, "next": start + LINE_SECONDS}

    def advance(count: int) -> None:
        with lock:
            state["done"] += count
            now = time.monotonic()
            if now >= state["next"]:
                state["next"] = now + LINE_SECONDS
                done = state["done"]
                rate = done / (now - start) / 1e6
                text = f"{label}: {done / 1e9:.1f} of {total / 1e9:.1f} GB, {rate:.0f} MB/s"
                print(text, file=sys.stderr, flush=True)

    yield advance
