"""A copy of the code for a job that waits in a queue while people go on editing."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from megatron_ext.errors import ConfigError


def snapshot(repository: Path, target: Path) -> None:
    """Copy every tracked file as it is now, and this machine's own configuration, to `target`.

    `git.txt` beside them has the commit and the difference to it.

    Raises:
        ConfigError: `repository` is no git checkout.
    """
    try:
        files = _git(repository, "ls-files", "-z").split("\0")
        commit = _git(repository, "rev-parse", "HEAD")
        changes = _git(repository, "diff", "HEAD")
    except (OSError, subprocess.CalledProcessError) as error:
        raise ConfigError(
            f"launch.snapshot=true: {repository} is no git checkout whose files could be copied "
            "(launch.snapshot=false runs them where they are)"
        ) from error
    local = repository / "configs" / "local"
    extra = [str(file.relative_to(repository)) for file in sorted(local.glob("*.yaml"))]
    for name in [*filter(None, files), *extra]:
        source = repository / name
        if not source.is_file():  # deleted and not yet committed, or a submodule
            continue
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target / name)
    (target / "git.txt").write_text(f"{commit}\n{changes}", encoding="utf-8")


def _git(folder: Path, *words: str) -> str:
    command = ["git", "--no-optional-locks", "-C", str(folder), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip("\n")
