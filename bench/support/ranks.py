"""Processes of one layout: started together, ended together."""

from __future__ import annotations

import multiprocessing
import os
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from megatron_ext.parallel.environment import variables_of_shared_gpu


class RankFailedError(Exception):
    """What the first rank that failed said, or that time was over."""


def run_ranks(
    function: Callable[..., None],
    *arguments: Any,
    ranks: int,
    folder: Path,
    limit: float,
    fork: bool,
    shared: bool = False,
) -> None:
    """Call a function in as many processes as torchrun would start, and wait for them.

    Args:
        function: of a module, so that it can be named to a new process.
        folder: where each rank leaves its error, in a folder of this call.
        limit: seconds after which all are killed.
        fork: copies of this process, which has everything imported: quick, and only where no GPU
            is used.
        shared: ranks share GPUs.

    Raises:
        RankFailedError: a rank raised or died, and the others were killed; or time was over.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context: Any = multiprocessing.get_context("fork" if fork else "spawn")
    errors = Path(tempfile.mkdtemp(prefix="errors", dir=folder))
    processes = []
    for rank in range(ranks):
        place: dict[str, Any] = {}
        if ranks > 1:
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks}
            place |= {"LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        if shared:
            place |= variables_of_shared_gpu(rank)
        error = errors / f"error.{rank}"
        processes.append(context.Process(target=_rank, args=(place, error, function, arguments)))
    for process in processes:
        process.start()
    try:
        _wait(processes, errors, end=time.monotonic() + limit, limit=limit)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()


def _rank(
    place: dict[str, Any], error: Path, function: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    os.environ |= {name: str(value) for name, value in place.items()}
    try:
        function(*arguments)
    except BaseException as problem:
        error.write_text(f"{type(problem).__name__}: {problem}\n\n{traceback.format_exc()}")
        raise


def _wait(processes: list[Any], errors: Path, *, end: float, limit: float) -> None:
    running = dict(enumerate(processes))
    while running:
        left = max(0.0, end - time.monotonic())
        wait([process.sentinel for process in running.values()], timeout=left)
        over = {rank: p for rank, p in running.items() if p.exitcode is not None}
        if failed := {rank: p.exitcode for rank, p in over.items() if p.exitcode}:
            # What the others say of a lost connection comes later.
            said = sorted(errors.glob("error.*"), key=lambda file: file.stat().st_mtime)
            if said:
                raise RankFailedError(f"rank {said[0].suffix[1:]}: {said[0].read_text()}")
            rank, code = next(iter(failed.items()))
            raise RankFailedError(f"rank {rank}: ended with code {code}")
        if not over and time.monotonic() >= end:
            raise RankFailedError(f"not done after {limit:.0f} s (--limit)")
        for rank in over:
            del running[rank]
