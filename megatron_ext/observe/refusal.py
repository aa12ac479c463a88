"""A run that ends before it has begun is on record too, for the launcher that started it."""

from __future__ import annotations

import sys
from pathlib import Path

from megatron_ext.errors import ConfigError, MegatronExtError
from megatron_ext.observe import lock
from megatron_ext.observe.run_files import write_exit
from megatron_ext.parallel.environment import Environment


def report(error: MegatronExtError, place: Environment) -> int:
    """Print an error that a command ended with, and leave `exit.json` where the run has not.

    A wrong configuration is found by all ranks and told by the first; what one host cannot do is
    told once a host. A launcher hides the exit code of this process, so that `exit.json` is needed
    even if the run folder has to be made for it.

    Returns:
        The exit code.
    """
    everywhere = isinstance(error, ConfigError)
    if place.rank == 0 if everywhere else place.local_rank == 0 or not error.shared:
        named = place.world_size > 1 and not everywhere
        print(f"[rank {place.rank}] {error}" if named else error, file=sys.stderr)
    if place.rank == 0 and error.run_dir is not None:
        _record(Path(error.run_dir), error, make=place.launched)
    return error.exit_code


def _record(folder: Path, error: MegatronExtError, *, make: bool) -> None:
    try:
        if make:
            folder.mkdir(parents=True, exist_ok=True)
        if not folder.is_dir():
            return
        with lock.briefly(folder) as free:
            if free:  # else a run goes on in it, to which this command is nothing
                write_exit(folder, code=error.exit_code, reason=str(error), step=0)
    except OSError as problem:
        print(f"exit.json in {folder}: not written ({problem})", file=sys.stderr)
