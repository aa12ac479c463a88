"""Names of checkpoint folders, which of them is the latest, and which may go. No torch here.

A folder of checkpoints holds `step_00000010/` and so on, and `latest`, a text file with the name of
one of them. A checkpoint is written as `.step_00000010.<process>.tmp`, renamed when it is complete,
and only then named by `latest`; so whatever has a proper name is whole. One that was found damaged
later is renamed to `step_00000010.damaged`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_ext.checkpoint import checksums
from megatron_ext.errors import CheckpointError

LATEST = "latest"
EXTRA = "extra.json"
# Written last by megatron-core's saver, inside the temporary folder.
COMPLETE = "metadata.json"
RESERVED = "checkpoint"
FORMAT = 2  # of `extra.json` and the names of tensors
WITH_CHECKSUMS = 2  # the first with `checksums.json`
DAMAGED = ".damaged"
# Beside the files of tensors.
NEEDED = (EXTRA, COMPLETE, ".metadata")


def step_name(step: int) -> str:
    """Name of the folder of a step."""
    return f"step_{step:08d}"


def step_folders(folder: Path) -> dict[int, Path]:
    """The complete checkpoints in `folder`, by step, ascending."""
    found = {}
    for path in folder.glob("step_*"):
        if _step(path) >= 0 and is_complete(path):
            found[_step(path)] = path
    return dict(sorted(found.items()))


def is_complete(path: Path) -> bool:
    """Whether `path` is a checkpoint that was written to its end."""
    return (path / COMPLETE).is_file() and (path / EXTRA).is_file()


def latest(folder: Path) -> Path | None:
    """The checkpoint to resume from, None when there is none.

    Without the file `latest` (the first save was interrupted just before it), the newest complete
    checkpoint.

    Args:
        folder: the folder of checkpoints, `<run folder>/checkpoints`.

    Raises:
        CheckpointError: `latest` names something that is not a complete checkpoint.
    """
    pointer = folder / LATEST
    complete = step_folders(folder)
    if not pointer.is_file():
        return list(complete.values())[-1] if complete else None
    name = pointer.read_text().strip()
    path = folder / name
    if not name or Path(name).name != name or not is_complete(path):
        choices = ", ".join(path.name for path in complete.values()) or "none"
        raise CheckpointError(
            f"{pointer} names {name!r}, which is not a complete checkpoint in {folder}. "
            f"Complete ones: {choices}. Write one of these names into {pointer}, or start anew "
            "with run.fresh=true"
        )
    return path


def candidates(folder: Path) -> list[Path]:
    """What to resume from, best first: the one that `latest` names (without that file, the newest),
    then those before.

    They need not be complete: one whose folder is there and files are lost is damaged, which
    whoever checks it has to report.

    Raises:
        CheckpointError: `latest` names no checkpoint in `folder`.
    """
    pointer = folder / LATEST
    there = sorted((p for p in folder.glob("step_*") if _step(p) >= 0), key=_step)
    if pointer.is_file():
        named = [path for path in there if path.name == pointer.read_text().strip()]
        first = named[0] if named else latest(folder)
    else:
        first = there[-1] if there else None
    if first is None:
        return []
    before = [path for path in there if _step(path) < _step(first)]
    return [first, *reversed(before)]


def set_aside(damaged: Sequence[Path], *, instead: Path) -> None:
    """Rename damaged checkpoints, so that nothing counts or reads them, and correct `latest`."""
    point(instead.parent, instead.name)
    for path in damaged:
        number, target = 0, path.with_name(f"{path.name}{DAMAGED}")
        while target.exists():
            number += 1
            target = path.with_name(f"{path.name}{DAMAGED}.{number}")
        os.rename(path, target)
    _sync(instead.parent)


def _step(path: Path) -> int:
    """Steps are compared as numbers: from 10**8 on names have nine digits. -1: no name of one."""
    match = re.fullmatch(r"step_(\d{8,})", path.name)
    return int(match[1]) if match else -1


def find(run_folder: Path, *, chosen: str | None) -> Path:
    """The checkpoint to read: the chosen one, else the latest of a run.

    Raises:
        CheckpointError: the run has none.
    """
    if chosen:
        return Path(chosen)
    path = latest(run_folder / "checkpoints")
    if path is None:
        raise CheckpointError(
            f"{run_folder / 'checkpoints'}: no checkpoint there. Train first (run.mode=train), "
            "name the run's own run.dir or run.name, or give a checkpoint with checkpoint.load=PATH"
        )
    return path


def read_extra(path: Path) -> dict[str, Any]:
    """What `extra.json` of a checkpoint holds: the caller's values and, under `checkpoint`, ours.

    Raises:
        CheckpointError: no such checkpoint, incomplete, or not readable.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such checkpoint folder; {_neighbours(path)}")
    if not is_complete(path):
        missing = ", ".join(n for n in (COMPLETE, EXTRA) if not (path / n).is_file())
        raise CheckpointError(
            f"{path}: not a complete checkpoint ({missing} missing); {_neighbours(path)}"
        )
    try:
        extra = json.loads((path / EXTRA).read_text())
        extra[RESERVED]["step"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path / EXTRA}: damaged ({error}); {_neighbours(path)}") from error
    return dict(extra)


def _neighbours(path: Path) -> str:
    for folder in (path.parent, path / "checkpoints", path):
        names = [p.name for p in step_folders(folder).values() if p != path]
        if names:
            return f"complete ones in {folder}: {', '.join(names[-5:])}"
    return "give the path of a step_* folder that holds metadata.json and extra.json"


def prepare(folder: Path, step: int, extra: dict[str, Any]) -> Path:
    """Make the empty temporary folder of a step, with `extra.json` in it, and return it."""
    text = json.dumps(extra, indent=1, sort_keys=True)
    # With the process in its name: a background writer may outlive its killed run for a while.
    temporary = folder / f".{step_name(step)}.{os.getpid()}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    _write(temporary / EXTRA, text + "\n")
    return temporary


def publish(temporary: Path, step: int, written: Mapping[str, checksums.Entry]) -> Path:
    """Give a complete temporary folder its name, then let `latest` name it. Both are atomic.

    A checkpoint of the same step that is there already (of a run that was wound back) is replaced.

    Args:
        temporary: what `prepare` gave.
        step: of the checkpoint.
        written: entries for `checksums.json` of the files whose writers took them.
    """
    folder = temporary.parent
    final = folder / step_name(step)
    if not is_complete(temporary):
        raise OSError(f"{temporary} lacks {COMPLETE} or {EXTRA}")
    try:
        checksums.write(temporary, written)
        _sync(temporary)
        if final.exists():
            delete([_set_apart(final)])
        os.rename(temporary, final)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _sync(folder)
    point(folder, final.name)
    return final


def point(folder: Path, name: str) -> None:
    """Let `latest` name a checkpoint, in one step."""
    _write(folder / f".{LATEST}.tmp", name + "\n")
    os.replace(folder / f".{LATEST}.tmp", folder / LATEST)
    _sync(folder)


def prune(folder: Path, *, keep: int, keep_every: int) -> list[Path]:
    """Rename old checkpoints, to be deleted, and return their new paths, which nothing reads.

    The one that `latest` names always stays. One that lacks a file, or has one cut short, is no
    reason to delete another: it does not count. To `delete` large ones takes seconds.

    Args:
        folder: the folder of checkpoints.
        keep: how many of the newest up to `latest` stay; 0: all.
        keep_every: multiples of this step stay for ever; 0: none. Checkpoints after `latest` (of a
            run that was wound back) are not counted and stay until their step is saved again.
    """
    current = latest(folder)
    if keep <= 0 or current is None:
        return []
    folders = step_folders(folder)
    steps = [step for step, path in folders.items() if step <= _step(current)]
    whole = [step for step in steps if checksums.looks_whole(folders[step])]
    if len(whole) < keep:
        return []
    old = [s for s in steps if s < whole[-keep] and not (keep_every > 0 and s % keep_every == 0)]
    return [_set_apart(folders[step]) for step in old]


def delete(folders: Iterable[Path]) -> None:
    """Delete what `prune` renamed; `clean` does what is left of it when a run ends in between."""
    for path in folders:
        shutil.rmtree(path, ignore_errors=True)


def clean(folder: Path) -> list[Path]:
    """Delete what interrupted saves and deletions left behind, and return it."""
    stale = [*folder.glob(".step_*.tmp"), *folder.glob(".step_*.old")]
    delete(stale)
    (folder / f".{LATEST}.tmp").unlink(missing_ok=True)
    return stale


def _set_apart(path: Path) -> Path:
    # A half-deleted checkpoint must not bear a checkpoint's name.
    doomed = path.parent / f".{path.name}.old"
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(path, doomed)
    return doomed


def _write(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
