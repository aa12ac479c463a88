"""The small files of a run folder: `config.yaml`, `run.json` and `exit.json`.

All are replaced as a whole, never written in place: neither a reader nor a kill sees half a file.
Only the writer (one rank) calls what is here.
"""

from __future__ import annotations

import json
import os
import platform
import re
import secrets
import socket
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from enum import Enum
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from megatron_ext.observe.redact import redact_argument

PACKAGES = ("megatron-ext", "torch", "megatron-core", "numpy", "transformer-engine", "fla-core")


def replace_file(path: Path, data: bytes) -> None:
    """Write a file in one step: a reader sees the old content or the new, never a part."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def plain(value: Any) -> Any:
    """Nested mappings, sequences, enums and paths as what JSON and YAML know; enums by name."""
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    return value


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """The resolved configuration, as `config.yaml`, in the order of the schema."""
    text = yaml.safe_dump(plain(config), sort_keys=False, allow_unicode=True)
    replace_file(folder / "config.yaml", text.encode())


def versions() -> dict[str, str]:
    """Versions of Python and of what decides the numbers; a package that is missing is left out.

    Read from the installed packages' metadata: nothing is imported for it.
    """
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def git_state(folder: Path | None = None) -> dict[str, Any]:
    """`{"sha": ..., "dirty": ...}` of the source tree, both null outside a git checkout.

    Args:
        folder: where to look; default: where this package stands.
    """
    place = Path(__file__).resolve().parent if folder is None else folder
    try:
        sha = _git(place, "rev-parse", "HEAD")
        # A package installed inside somebody else's checkout (a .venv) is not of that checkout.
        _git(place, "ls-files", "--error-unmatch", ".")
        dirty = _git(place, "status", "--porcelain", "--untracked-files=no") != ""
    except (OSError, subprocess.SubprocessError):
        return {"sha": None, "dirty": None}
    return {"sha": sha, "dirty": dirty}


def _git(folder: Path, *arguments: str) -> str:
    # --no-optional-locks: `status` must not take the index lock from under a user's git command.
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    return result.stdout.strip()


def write_run(
    folder: Path,
    *,
    run_id: str,
    layout: str,
    world_size: int,
    command: Sequence[str],
    backends: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """What is running here, as `run.json`; a relaunch replaces it and keeps the run id.

    Args:
        folder: the run folder.
        run_id: see `choose_run_id`.
        layout: the layout as text, as the header draws it.
        world_size: ranks.
        command: the command line; values of keys that name a secret are left out.
        backends: which implementation each operator took.

    Returns:
        What was written.
    """
    record = {
        "run_id": run_id,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "world_size": world_size,
        "command": [redact_argument(argument) for argument in command],
        "versions": versions(),
        "git": git_state(),
        "backends": dict(backends or {}),
        "layout": layout.splitlines(),
    }
    replace_file(folder / "run.json", _json(record))
    return record


def choose_run_id(folder: Path, *, name: str, from_checkpoint: str | None) -> str:
    """The identity of a run: chosen once, then found again by every relaunch.

    Args:
        folder: the run folder, whose `run.json` holds the id until there is a checkpoint.
        name: `run.name`; a new id begins with it.
        from_checkpoint: the id in the checkpoint that is resumed, which has the last word.

    Returns:
        At most 64 letters, digits, `_` and `-`, as wandb wants it. Random when new: one rank
        chooses and tells the others.
    """
    if from_checkpoint:
        return from_checkpoint
    try:
        known = json.loads((folder / "run.json").read_text()).get("run_id")
    except (OSError, ValueError, AttributeError):
        known = None
    if isinstance(known, str) and known:
        return known
    stem = re.sub(r"[^A-Za-z0-9_-]+", "-", name)[:48].strip("-") or "run"
    return f"{stem}-{secrets.token_hex(4)}"


def write_exit(folder: Path, *, code: int, reason: str, step: int) -> None:
    """How the run ended, as `exit.json`. Launchers act on it; without it a run has crashed."""
    replace_file(folder / "exit.json", _json({"code": code, "reason": reason, "step": step}))


def leave_exit(folder: Path, *, code: int, reason: str, step: int) -> bool:
    """As `write_exit`, unless there is one: for ranks other than the writer, whose own error would
    else be lost behind the crash that it causes on the others. Returns whether it wrote."""
    temporary = folder / f".exit.{socket.gethostname()}.{os.getpid()}.tmp"
    replace_file(temporary, _json({"code": code, "reason": reason, "step": step}))
    try:
        os.link(temporary, folder / "exit.json")  # fails if it exists, in one step
    except OSError:
        return False
    finally:
        temporary.unlink(missing_ok=True)
    return True


def read_exit(folder: Path) -> dict[str, Any] | None:
    """`{"code", "reason", "step"}` of the last launch, None when it crashed or is running."""
    try:
        record = json.loads((folder / "exit.json").read_text())
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def remove_exit(folder: Path) -> None:
    """Called when a run starts: from here on its end is unknown."""
    (folder / "exit.json").unlink(missing_ok=True)


def _json(record: Mapping[str, Any]) -> bytes:
    return (json.dumps(record, indent=2) + "\n").encode()
