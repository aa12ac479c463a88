"""What a launch finds in its run folder: nothing, a run to go on with, or a finished one."""

from __future__ import annotations

import fcntl
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_ext.checkpoint.paths import latest, read_extra
from megatron_ext.config.schema import RunConfig
from megatron_ext.errors import ConfigError, MegatronExtError
from megatron_ext.observe.run_files import choose_run_id

LOCK = ".lock"


@dataclass(frozen=True)
class Found:
    """What rank 0 found, the same object on every rank.

    Attributes:
        folder: the run folder, absolute.
        checkpoint: where to go on from; None starts anew.
        run_id: identity of the run, for wandb.
        step: of that checkpoint; 0 without one.
        finished: whether the run has all its steps already.
        moved: where an older run went with `run.fresh=true`.
    """

    folder: Path
    checkpoint: Path | None
    run_id: str
    step: int
    finished: bool
    moved: Path | None


def open_run_folder(config: RunConfig, *, rank: int) -> Found:
    """Decide once, on rank 0, and tell all ranks. Collective.

    Raises:
        ConfigError, CheckpointError: what rank 0 met, on every rank.
    """
    answer: list[Any] = [None]
    if rank == 0:
        try:
            answer[0] = look(config)
        except MegatronExtError as error:
            answer[0] = error
        except OSError as error:
            answer[0] = ConfigError(
                f"run.dir: {config.run.dir} cannot be used ({error.strerror}); give a folder that "
                f"can be written"
            )
    dist.broadcast_object_list(answer, src=0)
    if isinstance(answer[0], Exception):
        raise answer[0]
    found: Found = answer[0]
    return found


def look(config: RunConfig) -> Found:
    """Move an older run aside if asked to, find the checkpoint, and choose the run id."""
    folder = Path(str(config.run.dir))
    moved = None
    if config.run.fresh and folder.is_dir():
        hold(folder)  # not from under a run that is going on
        moved = move_aside(folder)
    folder.mkdir(parents=True, exist_ok=True)
    hold(folder)
    checkpoint = latest(folder / "checkpoints")
    extra = read_extra(checkpoint) if checkpoint else {}
    step = int(extra.get("step", 0))
    return Found(
        folder=folder,
        checkpoint=checkpoint,
        run_id=choose_run_id(folder, name=config.run.name, from_checkpoint=extra.get("run_id")),
        step=step,
        finished=step >= config.train.steps,
        moved=moved,
    )


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
    while True:
        try:
            # A lock of the process: a kill ends it, and forked writers do not inherit it.
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            if time.monotonic() < end:
                time.sleep(0.2)
                continue
            os.close(descriptor)
            raise ConfigError(
                f"run.dir={folder}: another process is training in it (wait for it, stop it, or "
                "give another run.dir or run.name; if this is one job of several ranks, they do "
                "not know of each other: start them with torchrun)"
            ) from error
        except OSError:  # a file system without locks
            pass
        return


def move_aside(folder: Path) -> Path:
    """Rename a run folder to the first free `<name>.1`, `<name>.2` ...; nothing is deleted."""
    number = 1
    while (target := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    folder.rename(target)
    return target
