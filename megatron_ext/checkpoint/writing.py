"""The background writer of one rank: its file of tensors, and what that file should be."""

from __future__ import annotations

import os
from functools import partial
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from torch.distributed.checkpoint.filesystem import (
    SerializationFormat,
    _StorageWriterTransforms,
    _write_item,
)

from megatron_ext.checkpoint.checksums import ChecksumStream, Entry


def with_checksums(request: AsyncRequest) -> tuple[AsyncRequest, Connection | None]:
    """Let the writer of a save take checksums of what it writes.

    Args:
        request: what megatron-core made of a save; its writer is replaced by ours.

    Returns:
        The request to schedule, and where `report` finds the entries; None where this rank has
        nothing to write.
    """
    if request.async_fn is None:
        return request, None
    receive, send = Pipe(duplex=False)
    return request._replace(async_fn=partial(_write, send)), receive


def report(connection: Connection | None) -> dict[str, Entry] | None:
    """What the writer wrote, by name of file; None when it died before it could say. Call it when
    the writer has ended."""
    if connection is None:
        return {}
    with connection:
        return dict(connection.recv()) if connection.poll() else None


def _write(
    send: Connection, rank: int, buckets: list[tuple[Any, str, tuple[Any, Any]]], results: Any
) -> None:
    """Write one file a bucket as torch's writer does, in a forked process.

    Args:
        rank: of this process.
        buckets: (path, name, (objects, tensors)), the last two as (item, data).
        results: a queue; gets the places of all items by number of the bucket, or an exception.
    """
    outcome: dict[int, list[Any]] | RuntimeError
    places: dict[int, list[Any]] = {}
    entries = {}
    try:
        for number, (path, name, (objects, tensors)) in enumerate(buckets):
            with Path(path).open("wb") as file:
                stream: Any = ChecksumStream(file)
                places[number] = [
                    _write_item(
                        _StorageWriterTransforms(),
                        stream,
                        data,
                        item,
                        name,
                        SerializationFormat.TORCH_SAVE,
                    )
                    for item, data in (*objects, *tensors)
                ]
                file.flush()
                os.fsync(file.fileno())
            entries[name] = stream.entry
        outcome = places
    except Exception as error:  # Whatever it is, the training process has to hear of it.
        outcome = RuntimeError(f"{type(error).__name__}: {error}")
    send.send(entries)
    results.put(outcome)
