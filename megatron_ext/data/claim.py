"""The folder that a preparation fills: whose it is, who may write into it, what may be removed."""

from __future__ import annotations

import contextlib
import fcntl
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_ext.data.manifest import FILE, Manifest, read_manifest, write_json
from megatron_ext.errors import DataError

WORK = ".work"  # notes of finished shards while a preparation is under way


def claim(
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
        clear(output)
    elif plan_path.exists():
        if json.loads(plan_path.read_text(encoding="utf-8")) != plan:
            if not overwrite:
                raise DataError(
                    f"{output}: an interrupted preparation of other inputs or options (or the "
                    "input files changed since). Add --overwrite to start anew, or choose another "
                    "--output"
                )
            clear(output)
    elif output.exists() and any(output.iterdir()):
        raise DataError(
            f"{output}: holds files, but no prepared source. Choose a new or empty --output"
        )
    (output / WORK).mkdir(parents=True, exist_ok=True)
    write_json(plan_path, plan)
    return None


@contextlib.contextmanager
def alone(output: Path) -> Iterator[None]:
    """One preparation a folder at a time; the system ends the claim of a process that dies."""
    with (output / WORK / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(
                f"{output}: another process is preparing this folder. Wait for it, or choose "
                "another --output"
            ) from error
        except OSError:  # a file system without locks
            pass
        _sweep(output)
        yield
        # Again: a worker whose command was killed lives on for a moment, and may begin a shard.
        _sweep(output)


def _sweep(output: Path) -> None:
    for path in output.glob(".shard-*.partial"):
        path.unlink(missing_ok=True)


def clear(output: Path) -> None:
    """Remove what a preparation writes, and nothing else. The manifest goes first."""
    (output / FILE).unlink(missing_ok=True)
    for pattern in ("shard-*.bin", "shard-*.idx", ".shard-*.partial"):
        for path in output.glob(pattern):
            path.unlink()
    shutil.rmtree(output / WORK, ignore_errors=True)
