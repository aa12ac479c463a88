"""A run folder belongs to one process at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from megatron_ext.errors import ConfigError

LOCK = ".lock"


def hold(folder: Path, *, wait_seconds: float = 30.0) -> None:
    """Keep the folder for this process until it ends: two runs in it would destroy each other's
    rows and checkpoints.

    Args:
        folder: the run folder.
        wait_seconds: for the ranks of a launch that was just killed.

    Raises:
        ConfigError: another process still has it.
    """
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    end = time.monotonic() + wait_seconds
    while not _lock(descriptor):
        if time.monotonic() < end:
            time.sleep(0.2)
            continue
        os.close(descriptor)
        raise ConfigError(
            f"run.dir={folder}: another process is training in it (wait for it, stop it, or "
            "give another run.dir or run.name; if this is one job of several ranks, they do "
            "not know of each other: start them with torchrun)"
        )


@contextlib.contextmanager
def briefly(folder: Path) -> Iterator[bool]:
    """Whether the folder is free, and if so, holding it meanwhile.

    Not for a process that holds it already: closing the file would give that lock up.
    """
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        yield _lock(descriptor)
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    try:
        # A lock of the process: a kill ends it, and forked writers do not inherit it.
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:  # a file system without locks
        return True
    return True
