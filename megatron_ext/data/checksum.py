"""Checksums a block: a mismatch names the bytes that are damaged, not just the file."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from megatron_ext.errors import DataError

BLOCK = 16 << 20  # bytes; a corpus of 20 TB keeps its checksums in a few tens of megabytes
DIGEST = 8  # bytes; enough against accidents, which is what this guards against


class BlockHasher:
    """Size and blake2b digests of every 16 MiB of what is fed to ``update``."""

    def __init__(self) -> None:
        self._size = 0
        self._digests: list[str] = []
        self._hash = hashlib.blake2b(digest_size=DIGEST)

    def update(self, raw: bytes) -> None:
        view = memoryview(raw)
        while len(view):
            room = BLOCK - self._size % BLOCK
            part, view = view[:room], view[room:]
            self._hash.update(part)
            self._size += len(part)
            if self._size % BLOCK == 0:
                self._digests.append(self._hash.hexdigest())
                self._hash = hashlib.blake2b(digest_size=DIGEST)

    def result(self) -> dict[str, Any]:
        """``{"bytes": size, "blake2b": [hex digest of each block]}``."""
        tail = [self._hash.hexdigest()] if self._size % BLOCK else []
        return {"bytes": self._size, "blake2b": self._digests + tail}


def check_size(path: Path, entry: dict[str, Any], *, remedy: str) -> None:
    """DataError when the file is missing or has another size than its manifest entry says."""
    if not path.is_file():
        raise DataError(f"{path}: listed in the manifest but not there. {remedy}")
    size, wanted = path.stat().st_size, int(entry["bytes"])
    if size != wanted:
        what = f"truncated at offset {size}" if size < wanted else f"too long from {wanted} on"
        raise DataError(f"{path}: {what}: {size} bytes, the manifest says {wanted}. {remedy}")


def check_blocks(path: Path, entry: dict[str, Any], *, remedy: str) -> None:
    """DataError naming the first block whose digest differs. The size has been checked before."""
    with path.open("rb") as file:
        for number, wanted in enumerate(entry["blake2b"]):
            raw = file.read(BLOCK)
            if hashlib.blake2b(raw, digest_size=DIGEST).hexdigest() != wanted:
                first = number * BLOCK
                raise DataError(
                    f"{path}: damaged between offset {first} and {first + len(raw)} (its checksum "
                    f"is not the manifest's). {remedy}"
                )
