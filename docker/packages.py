"""Which packages of requirements.lock an image still lacks, and whether it kept its own.

    python docker/packages.py missing requirements.lock     prints the lines to install (--no-deps)
    python docker/packages.py check docker/constraints.txt  ends with 1 where the image differs

What the image has stays as it is, at whatever version: its torch is built against its own
libraries. Needs Python's standard library only.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path

# torch's wheels bring CUDA as packages of these names; the image has it as system libraries, and a
# second copy would be loaded in its place. Development tools train nothing.
OF_TORCH_WHEELS = re.compile(r"nvidia-.*|cuda-.*")
# fmt: off
TOOLS = frozenset({
    "ast-serialize", "cfgv", "distlib", "execnet", "grimp", "hypothesis", "identify",
    "import-linter", "iniconfig", "librt", "mypy", "mypy-extensions", "nodeenv", "pathspec",
    "platformdirs", "pluggy", "pre-commit", "pytest", "pytest-timeout", "pytest-xdist",
    "python-discovery", "ruff", "sortedcontainers", "types-pyyaml", "virtualenv",
})
# fmt: on


def plain(name: str) -> str:
    """A package's name as indexes compare it: lower case, single dashes."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(text: str) -> dict[str, str]:
    """Version by plain name of the `name==version` lines of a lock or constraints file."""
    lines = (line.split("#")[0].strip() for line in text.splitlines())
    return {
        plain(name): version
        for name, _, version in (line.partition("==") for line in lines if line)
    }


def missing(lock: Mapping[str, str], installed: Iterable[str], kept: Iterable[str]) -> list[str]:
    """Lines of the lock to install.

    Args:
        lock: version by name.
        installed: names in the image.
        kept: names that are the image's alone, installed or not.
    """
    there = {plain(name) for name in (*installed, *kept)}
    return [
        f"{name}=={version}"
        for name, version in lock.items()
        if name not in there and name not in TOOLS and not OF_TORCH_WHEELS.fullmatch(name)
    ]


def differences(constraints: Mapping[str, str], installed: Mapping[str, str]) -> list[str]:
    """One line for each package that the image has not, or in another version."""
    wrong = []
    for name, version in constraints.items():
        found = installed.get(name)
        if found is None:
            wrong.append(f"{name}: {version} expected, not there")
        elif found.split("+")[0] != version:
            wrong.append(f"{name}: {version} expected, got {found}")
    return wrong


def main(words: list[str]) -> int:
    """The command. Returns the exit code."""
    constraints = pins((Path(__file__).parent / "constraints.txt").read_text(encoding="utf-8"))
    installed = {plain(d.metadata["Name"]): d.version for d in metadata.distributions()}
    command, file = words
    content = pins(Path(file).read_text(encoding="utf-8"))
    if command == "missing":
        print("\n".join(missing(content, installed, constraints)))
        return 0
    wrong = differences(content, installed)
    if wrong:
        print(f"{file} and the image differ:", *wrong, sep="\n  ", file=sys.stderr)
        print("Correct the file, with the new tag of the image if it has one.", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
