"""What a writer leaves to its training process."""

from __future__ import annotations

import multiprocessing
import os
import signal
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import torch
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest

from megatron_ext.checkpoint.checksums import Entry
from megatron_ext.checkpoint.staging import Staging
from megatron_ext.checkpoint.writing import Report, with_checksums


def test_a_long_report_of_a_writer_that_has_ended_is_read() -> None:
    report, results = Report(), SimpleQueue[object]()
    entries, outcome = {"a": Entry(1, 2)}, {0: ["x" * 1_000_000]}  # more than a pipe holds
    writer = multiprocessing.get_context("fork").Process(
        target=report.leave, args=(entries, outcome)
    )
    writer.start()
    writer.join(timeout=30)
    assert writer.exitcode == 0
    report.take(results)
    assert report.entries == entries
    assert results.get_nowait() == outcome


def test_a_writer_that_was_killed_is_an_error() -> None:
    report, results = Report(), SimpleQueue[object]()
    writer = multiprocessing.get_context("fork").Process(
        target=lambda: os.kill(os.getpid(), signal.SIGKILL)
    )
    writer.start()
    writer.join(timeout=30)
    report.take(results)
    assert report.entries == {}
    assert str(results.get_nowait()) == "it died"


def test_a_save_copies_to_main_memory_our_way(tmp_path: Path) -> None:
    buckets = [("path", "name", ([], [("item", torch.ones(3))]))]
    given = AsyncRequest(print, (0, buckets, SimpleQueue()), [], preload_fn=list)
    staging = Staging()
    request, _ = with_checksums(given, staging=staging, carried=None, folder=tmp_path)
    assert isinstance(request.preload_fn, partial)
    assert (request.preload_fn.func, request.preload_fn.args) == (staging.to_host, (buckets,))
