"""Damage to the files of a checkpoint, as disks, copies and people do it."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path


def flip(path: Path, chance: random.Random) -> str:
    content = bytearray(path.read_bytes())
    place = chance.randrange(len(content))
    content[place] ^= 1 << chance.randrange(8)
    path.write_bytes(content)
    return f"a bit of byte {place} flipped"


def truncate(path: Path, chance: random.Random) -> str:
    content = path.read_bytes()
    size = chance.randrange(len(content))
    path.write_bytes(content[:size])
    return f"cut to {size} of {len(content)} bytes"


def lengthen(path: Path, chance: random.Random) -> str:
    content = path.read_bytes()
    extra = chance.randint(1, 4096)
    path.write_bytes(content + bytes(extra))
    return f"{extra} zeros added"


def zero(path: Path, chance: random.Random) -> str:
    """As a block that was allocated and never written."""
    content = bytearray(path.read_bytes())
    start = chance.randrange(len(content))
    stop = min(len(content), start + 4096)
    # Not where there are zeros already: that would be no damage.
    while not any(content[start:stop]):
        start = chance.randrange(len(content))
        stop = min(len(content), start + 4096)
    content[start:stop] = bytes(stop - start)
    path.write_bytes(content)
    return f"bytes {start} to {stop} zeroed"


def lose(path: Path, chance: random.Random) -> str:
    path.unlink()
    return "removed"


def replace(path: Path, chance: random.Random) -> str:
    """Another file of the same size, as after a mix-up."""
    path.write_bytes(chance.randbytes(path.stat().st_size))
    return "replaced by noise"


KINDS: dict[str, Callable[[Path, random.Random], str]] = {
    f.__name__: f for f in (flip, truncate, lengthen, zero, lose, replace)
}
