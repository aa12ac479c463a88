"""Text into prepared folders: in parallel, atomically, resumable (command: ``data/prepare.py``).

The inputs are cut into units (`readers.cut`), each unit becomes one shard. Finished shards are
noted in ``.work/``; a preparation that was interrupted takes them as they are and makes the others.
``manifest.json`` is written last: where it stands, the folder is complete.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import multiprocessing.connection
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from megatron_ext.data.claim import WORK, alone, claim, clear
from megatron_ext.data.indexed import ShardWriter, token_dtype
from megatron_ext.data.manifest import Manifest, write_json, write_manifest
from megatron_ext.data.readers import Broken, Piece, cut, digest, documents, expand
from megatron_ext.data.tokenizers import Tokenizer, load_tokenizer
from megatron_ext.errors import DataError

Progress = Callable[[int, int, int], None]  # bytes of the unit, its documents, its tokens


class OnError(Enum):
    stop = "stop"
    skip = "skip"


@dataclass(frozen=True)
class PrepareOptions:
    """How to read and cut. All but ``workers`` decide the output."""

    tokenizer: str = "byte"
    field: str = "text"  # key of jsonl, column of parquet
    patterns: tuple[str, ...] = ()  # which files of a folder; all when empty
    unit_bytes: int = 64 << 20  # of input a shard
    on_error: OnError = OnError.stop  # for a document that cannot be read
    workers: int = 1  # processes


@dataclass(frozen=True)
class _Unit:
    """One job of a worker process."""

    number: int
    pieces: list[Piece]
    folder: Path
    options: PrepareOptions

    @property
    def weight(self) -> int:
        return sum(piece.weight for piece in self.pieces)

    @property
    def note(self) -> Path:
        return self.folder / WORK / f"shard-{self.number:05d}.json"


def prepare(
    inputs: Sequence[Path],
    *,
    output: Path,
    name: str,
    options: PrepareOptions,
    progress: Callable[[int], Progress] | None = None,
    overwrite: bool = False,
) -> Manifest:
    """Make a prepared folder; returns its manifest.

    Args:
        inputs: files and folders: text (one document a file), jsonl(.gz, .zst), parquet.
        output: the folder to make. name: of the source, in metrics.
        progress: called with the total bytes; what it returns is called after every unit.
        overwrite: remove what a finished or other preparation left in ``output``.

    Raises:
        DataError: nothing to read, a document that cannot be read (unless ``on_error`` is skip),
            an ``output`` that holds something else.
    """
    files = expand(inputs, patterns=options.patterns)
    tokenizer = load_tokenizer(options.tokenizer)
    settings = [tokenizer.fingerprint, options.field, options.unit_bytes, options.on_error.value]
    inputs_digest = digest(files, options=settings)
    units = [
        _Unit(number, pieces, output, options)
        for number, pieces in enumerate(cut(files, unit_bytes=options.unit_bytes))
    ]
    done = claim(output, files=files, inputs_digest=inputs_digest, overwrite=overwrite)
    if done is not None:
        return done
    with alone(output):
        return _fill(
            output,
            name=name,
            units=units,
            tokenizer=tokenizer,
            digest=inputs_digest,
            workers=options.workers,
            progress=progress,
        )


def _fill(
    output: Path,
    *,
    name: str,
    units: Sequence[_Unit],
    tokenizer: Tokenizer,
    digest: str,
    workers: int,
    progress: Callable[[int], Progress] | None,
) -> Manifest:
    """Make what is missing of a claimed folder."""
    report = progress(sum(unit.weight for unit in units)) if progress else _silent
    notes: dict[int, dict[str, Any]] = {}
    for unit, note in _run(units, workers=workers):
        notes[unit.number] = note
        report(unit.weight, note["shard"]["documents"], note["shard"]["tokens"])
    ordered = [notes[unit.number] for unit in units]
    skipped = sum(note["skipped"] for note in ordered)
    shards = [note["shard"] for note in ordered if note["shard"]["documents"]]
    if not shards:
        clear(output)
        raise DataError(
            f"{output}: no text for it in any input ({skipped} documents are empty or were "
            "skipped). Check the INPUT arguments, --pattern and --field"
        )
    manifest = Manifest(
        source=name,
        tokenizer=_facts(tokenizer),
        documents=sum(shard["documents"] for shard in shards),
        tokens=sum(shard["tokens"] for shard in shards),
        skipped=skipped,
        inputs=digest,
        shards=shards,
    )
    for note in ordered:  # an empty unit has made empty files
        if not note["shard"]["documents"]:
            for suffix in (".bin", ".idx"):
                (output / (note["shard"]["name"] + suffix)).unlink(missing_ok=True)
    write_manifest(output, manifest)
    shutil.rmtree(output / WORK)
    return manifest


def _silent(_bytes: int, _documents: int, _tokens: int) -> None:
    return None


def _facts(tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "name": tokenizer.name,
        "fingerprint": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "eod": tokenizer.eod,
    }


def _run(units: Sequence[_Unit], *, workers: int) -> Iterator[tuple[_Unit, dict[str, Any]]]:
    """Every unit with its note as it completes; those of an earlier try come first."""
    left = []
    for unit in units:
        note = _finished(unit)
        if note is None:
            left.append(unit)
        else:
            yield unit, note
    if workers <= 1 or len(left) <= 1:
        for unit in left:
            yield unit, _make(unit)
        return
    with _pool(min(workers, len(left))) as pool:
        # A window of jobs: a corpus of 100 thousand units is not queued at once.
        waiting = iter(left)
        running: dict[Future[dict[str, Any]], _Unit] = {}
        while True:
            while len(running) < 2 * workers and (job := next(waiting, None)) is not None:
                running[pool.submit(_make, job)] = job
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(future), future.result()


@contextlib.contextmanager
def _pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    # spawn: forking a process that has threads (progress bar, pyarrow) can deadlock
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_follow_parent)
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _follow_parent() -> None:
    """End this worker when the command is killed; otherwise it would wait for work for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        sentinel = parent.sentinel

        def watch() -> None:
            multiprocessing.connection.wait([sentinel])
            os._exit(1)

        threading.Thread(target=watch, daemon=True).start()


def _finished(unit: _Unit) -> dict[str, Any] | None:
    """The note of a unit that an earlier try finished, if its files are still there and whole."""
    if not unit.note.exists():
        return None
    note: dict[str, Any] = json.loads(unit.note.read_text(encoding="utf-8"))
    shard = note["shard"]
    for part in ("bin", "idx"):
        path = unit.folder / f"{shard['name']}.{part}"
        if not path.is_file() or path.stat().st_size != shard[part]["bytes"]:
            return None
    return note


def _make(unit: _Unit) -> dict[str, Any]:
    """Write one shard and note it (runs in a worker process)."""
    options = unit.options
    tokenizer = load_tokenizer(options.tokenizer)
    prefix = unit.folder / f"shard-{unit.number:05d}"
    skipped = 0
    with ShardWriter(prefix, dtype=token_dtype(tokenizer.vocab_size)) as writer:
        for piece in unit.pieces:
            for text in documents(piece, field=options.field):
                if isinstance(text, Broken):
                    if options.on_error is OnError.stop:
                        raise DataError(
                            f"{text.reason}. Repair the file, or leave such documents out with "
                            "--on-error skip; the same command goes on where it stopped"
                        )
                    skipped += 1
                    continue
                tokens = tokenizer.encode(text)
                if not tokens:
                    skipped += 1
                    continue
                tokens.append(tokenizer.eod)
                writer.add(tokens)
        shard = writer.finish()
    note = {"shard": shard, "skipped": skipped}
    write_json(unit.note, note)
    return note
