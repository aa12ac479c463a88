"""The demo corpus: the library sources of the Python that runs, prepared on first use.

Real code and prose, some 400 files, present wherever Python is, nothing to download.
"""

from __future__ import annotations

import contextlib
import fcntl
import platform
import shutil
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

from megatron_ext.config.schema import DataOptions, SourceOptions
from megatron_ext.data.manifest import FILE, read_manifest
from megatron_ext.data.prepare import OnError, PrepareOptions, prepare
from megatron_ext.data.readers import digest
from megatron_ext.data.tokenizers import load_tokenizer
from megatron_ext.errors import DataError

NAME = "python-stdlib"
# Tests and tables (encodings) are no prose; the rest is written by machines or for one machine.
LEFT_OUT = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "encodings",
    "lib2to3",
    "pydoc_data",
    "ensurepip",
    "__pycache__",
}


def library_sources() -> list[Path]:
    """The ``*.py`` files of the standard library, sorted, without tests and installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [
        path
        for path in root.rglob("*.py")
        if not LEFT_OUT & set(path.relative_to(root).parts[:-1])
        and not path.name.startswith("_sysconfigdata")
        and not path.parent.name.startswith("config-")
    ]
    if not files:
        raise DataError(
            f"{root}: no library sources (a Python without *.py files). Use another Python, or set "
            "data.demo=false and name data.sources"
        )
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def ensure_demo(options: DataOptions) -> SourceOptions:
    """The demo source, prepared if it is not there yet (a few seconds, once).

    Any number of processes may call it at once: one prepares under a lock, in a temporary folder
    that takes its final name in one step. The name holds what the content depends on (Python's
    version, the files' names and sizes, the tokenizer).

    Raises:
        DataError: the cache cannot be written.
    """
    files = library_sources()
    tokenizer = load_tokenizer(options.tokenizer)
    key = digest(files, options=[tokenizer.fingerprint])[:8]
    default = Path.home() / ".cache" / "megatron-ext"
    cache = Path(options.cache_dir).expanduser() if options.cache_dir else default
    folder = cache / f"{NAME}-{platform.python_version()}-{tokenizer.name}-{key}"
    if not (folder / FILE).is_file():
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with _lock(cache / f".{folder.name}.lock"):
                if not (folder / FILE).is_file():
                    _make(folder, files=files, tokenizer=options.tokenizer)
        except OSError as error:
            raise DataError(
                f"{folder}: the demo corpus cannot be written ({error}). Set data.cache_dir to a "
                "folder that can be"
            ) from error
    return SourceOptions(name=read_manifest(folder).source, path=str(folder), weight=1.0)


def _make(folder: Path, *, files: list[Path], tokenizer: str) -> None:
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        prepare(
            files,
            output=scratch / "corpus",
            name=NAME,
            options=PrepareOptions(tokenizer=tokenizer, on_error=OnError.skip),
        )
        try:
            (scratch / "corpus").rename(folder)
        except OSError:
            # Where locks do not work (some network file systems) another process may be first.
            if not (folder / FILE).is_file():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Held by one process at a time, and given up by the system when that process dies."""
    with path.open("w") as file:
        # Where there are no locks the work may be done twice, but the rename stays atomic.
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
