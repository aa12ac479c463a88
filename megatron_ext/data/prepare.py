"""Text into prepared folders: in parallel, atomically, resumable (command: ``data/prepare.py``).

The inputs are cut into units (`readers.cut`), each unit becomes one shard. Finished shards are
noted in ``.work/``; a preparation that was interrupted takes them as they are and makes the others.
``manifest.json`` is written last: where it stands, the folder is complete.
"""

from __future__ import annotations

import json
import multiprocessing
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from megatron_ext.data.indexed import ShardWriter, token_dtype
from megatron_ext.data.manifest import (
    FILE,
    Manifest,
    read_manifest,
    write_json,
    write_manifest,
)
from megatron_ext.data.readers import Broken, Piece, cut, digest, documents, expand
from megatron_ext.data.tokenizers import Tokenizer, load_tokenizer
from megatron_ext.errors import DataError

WORK = ".work"
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
    done = _claim(output, files=files, inputs_digest=inputs_digest, overwrite=overwrite)
    if isinstance(done, Manifest):
        return done
    report = progress(sum(unit.weight for unit in units)) if progress else _silent
    notes: dict[int, dict[str, Any]] = {}
    for unit, note in _run(units, workers=options.workers):
        notes[unit.number] = note
        report(unit.weight, note["shard"]["documents"], note["shard"]["tokens"])
    ordered = [notes[unit.number] for unit in units]
    skipped = sum(note["skipped"] for note in ordered)
    shards = [note["shard"] for note in ordered if note["shard"]["documents"]]
    if not shards:
        _clear(output)
        raise DataError(
            f"{', '.join(map(str, inputs))}: no text in {len(files)} files ({skipped} documents "
            "are empty or were skipped). Check the INPUT arguments, --pattern and --field"
        )
    manifest = Manifest(
        source=name,
        tokenizer=_facts(tokenizer),
        documents=sum(shard["documents"] for shard in shards),
        tokens=sum(shard["tokens"] for shard in shards),
        skipped=skipped,
        inputs=inputs_digest,
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


def _claim(
    output: Path, *, files: Sequence[Path], inputs_digest: str, overwrite: bool
) -> Manifest | None:
    """Take the folder for this preparation; the manifest, when this one is finished already."""
    # Only while unfinished do times count too: a file may change without changing its size.
    plan = {"inputs": inputs_digest, "times": [path.stat().st_mtime_ns for path in files]}
    plan_path = output / WORK / "plan.json"
    if (output / FILE).exists():
        if not overwrite:
            manifest = read_manifest(output)
            if manifest.inputs == inputs_digest:
                return manifest
            raise DataError(
                f"{output / FILE}: this folder holds source {manifest.source} of other inputs or "
                "options. Choose another --output, or add --overwrite to replace it"
            )
        _clear(output)
    elif plan_path.exists():
        if json.loads(plan_path.read_text(encoding="utf-8")) != plan:
            if not overwrite:
                raise DataError(
                    f"{output}: an interrupted preparation of other inputs or options (or the "
                    "input files changed since). Add --overwrite to start anew, or choose another "
                    "--output"
                )
            _clear(output)
    elif output.exists() and any(output.iterdir()):
        raise DataError(
            f"{output}: holds files, but no prepared source. Choose a new or empty --output"
        )
    (output / WORK).mkdir(parents=True, exist_ok=True)
    write_json(plan_path, plan)
    return None


def _clear(output: Path) -> None:
    """Remove what a preparation writes, and nothing else. The manifest goes first."""
    (output / FILE).unlink(missing_ok=True)
    for pattern in ("shard-*.bin", "shard-*.idx", ".shard-*.partial"):
        for path in output.glob(pattern):
            path.unlink()
    shutil.rmtree(output / WORK, ignore_errors=True)


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


@contextmanager
def _pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    # spawn: forking a process that has threads (progress bar, pyarrow) can deadlock
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context)
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


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
