"""The background writer of one rank: its files of tensors, what these should be, and how the
training process hears of it.

megatron-core hands on what writers did through a helper process a rank (a `Manager`), which imports
torch when the first result comes: 0.5 GB, and minutes on a busy host, in which the writer waits for
its answer and the run for the writer. Here the writer leaves it in a file without a name, which the
training process reads when the writer has ended: nobody waits for anybody else.
"""

from __future__ import annotations

import contextlib
import pickle
import signal
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from torch.distributed.checkpoint.filesystem import (
    SerializationFormat,
    _StorageWriterTransforms,
    _write_item,
)

from megatron_ext.checkpoint.carry import Share
from megatron_ext.checkpoint.checksums import ChecksumStream, Entry, sync
from megatron_ext.checkpoint.staging import Bucket, Staging


class Report:
    """What a writer leaves to its training process.

    Attributes:
        entries: of what it wrote, by name of file.
    """

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        # Not a pipe: that would fill up, since it is read when the writer has ended.
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `take`)

    def leave(self, entries: dict[str, Entry], outcome: object) -> None:
        """Called in the writer, at its end."""
        pickle.dump((entries, outcome), self._file)
        self._file.flush()

    def take(self, results: SimpleQueue[object]) -> None:
        """Called in the training process, when the writer has ended; hands the outcome on."""
        outcome: object
        with self._file as file:
            file.seek(0)
            try:
                self.entries, outcome = pickle.load(file)
            except (EOFError, pickle.UnpicklingError):
                outcome = RuntimeError("it died")
        results.put(outcome)


def without_helper() -> None:
    """Let megatron-core keep results in this process, before it starts a helper for them."""
    filesystem_async._results_queue = SimpleQueue()


def with_checksums(
    request: AsyncRequest, *, staging: Staging, carried: Share | None, folder: Path
) -> tuple[AsyncRequest, Report]:
    """Let a save copy tensors to `staging`, and its writer take checksums of what it writes.

    Args:
        request: what megatron-core made of a save; its copying to main memory and its writer are
            replaced by ours.
        staging: where it copies tensors to; no earlier writer may read there any more.
        carried: what it is to copy from an earlier checkpoint into `folder`.

    Returns:
        The request to schedule, and the report, which is there when the request is finalised; it
        has no entries where this rank has nothing to write.
    """
    report = Report()
    if request.async_fn is None:
        if carried is not None:  # every rank writes its random states
            raise RuntimeError("a rank that writes nothing cannot copy from a checkpoint")
        return request, report
    take = partial(report.take, request.async_fn_args[2])
    request = request._replace(
        preload_fn=partial(staging.to_host, request.async_fn_args[1]),
        async_fn=partial(_write, report, carried, folder),
        finalize_fns=[take, *request.finalize_fns],
    )
    return request, report


@contextlib.contextmanager
def shielded() -> Iterator[None]:
    """A process forked here never sees the signals that ask a run to stop.

    SLURM and torchrun signal every process of a job, and the writer would note them and go on, or
    raise at the second Ctrl-C. What is blocked here stays blocked in it; this process gets what
    came meanwhile at the end of the block.
    """
    blocked = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _write(
    report: Report,
    carried: Share | None,
    folder: Path,
    rank: int,
    buckets: list[Bucket],
    results: object,
) -> None:
    """Write one file a bucket as torch's writer does, all at a time, in a forked process.

    Args:
        report: gets the places of all items by number of the bucket, or an exception.
        carried: what to copy into `folder` from an earlier checkpoint.
        rank: of this process.
        buckets: (path, name, (objects, tensors)), the last two as (item, data).
        results: of the training process, out of reach here.
    """
    outcome: dict[int, list[Any]] | RuntimeError
    entries = {}
    try:
        # Checksums and the copies into the system's memory take longer than a fast disk.
        with ThreadPoolExecutor(max(1, len(buckets))) as threads:
            written = list(threads.map(_write_file, buckets))
        entries = {name: entry for (_, name, _), (_, entry) in zip(buckets, written, strict=True)}
        if carried is not None:
            entries[carried.file] = carried.copy(folder)
        outcome = {number: places for number, (places, _) in enumerate(written)}
    except Exception as error:  # Whatever it is, the training process has to hear of it.
        outcome = RuntimeError(f"{type(error).__name__}: {error}")
    report.leave(entries, outcome)


def _write_file(bucket: Bucket) -> tuple[list[Any], Entry]:
    """Places of the items in the file, and its checksum."""
    path, name, (objects, tensors) = bucket
    with Path(path).open("wb") as file:
        stream: Any = ChecksumStream(file)
        places = [
            _write_item(
                _StorageWriterTransforms(), stream, data, item, name, SerializationFormat.TORCH_SAVE
            )
            for item, data in (*objects, *tensors)
        ]
        sync(file)
    return places, stream.entry
