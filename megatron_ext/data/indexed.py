"""megatron-core's indexed-dataset format (``.bin`` + ``.idx``), read and written with numpy alone.

Written from the format, so that data workers and login nodes import neither torch nor megatron-core
(5 s and 0.9 GB); a test reads our files with megatron-core and its files with ours.

``NAME.bin``: the tokens of all documents, one after the other, little endian, no header.
``NAME.idx``: ``MMIDIDX\\0\\0``, version (uint64, 1), token type (uint8), sequences n (uint64),
entries d = documents + 1 (uint64), lengths (int32 [n]), byte offsets (int64 [n]), document bounds
in sequences (int64 [d]). Here one document is one sequence, so the bounds are 0, 1, ..., n.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from megatron_ext.data.checksum import BlockHasher
from megatron_ext.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, type[np.generic]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    8: np.uint16,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
REMEDY = "Copy the folder again, or make it anew: data/prepare.py ... --overwrite"


def token_dtype(vocab_size: int) -> type[np.generic]:
    """The smallest type that megatron-core would choose too: uint16 below 65500 ids, else int32."""
    return np.uint16 if vocab_size < 65500 else np.int32


class ShardWriter:
    """Writes one shard; nothing carries its final name before ``finish``.

    Args:
        prefix: path without suffix; ``.bin`` and ``.idx`` are added.
        dtype: type of a token on disk.
    """

    def __init__(self, prefix: Path, *, dtype: type[np.generic]) -> None:
        self.prefix = prefix
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self._code = CODES[dtype]
        self._lengths: list[int] = []
        # A process that outlived its killed parent must not write into the same file.
        self._partial = prefix.with_name(f".{prefix.name}.bin.{os.getpid()}.partial")
        self._file = self._partial.open("wb")
        self._hasher = BlockHasher()

    def add(self, tokens: npt.ArrayLike) -> None:
        """Append one document, int [length] with its eod last. An id out of range is an error."""
        array = np.asarray(tokens, dtype=np.int64)
        limits = np.iinfo(self.dtype)
        if array.size and (array.min() < 0 or array.max() > limits.max):
            raise DataError(f"{self.prefix}.bin: token id {array.max()} does not fit {self.dtype}")
        raw = array.astype(self.dtype).tobytes()
        self._file.write(raw)
        self._hasher.update(raw)
        self._lengths.append(array.size)

    def finish(self) -> dict[str, object]:
        """Make both files durable under their final names; returns the manifest's entry."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        lengths = np.asarray(self._lengths, dtype="<i4")
        ends = np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize
        offsets = np.concatenate([np.zeros(1, np.int64), ends])[: lengths.size].astype("<i8")
        bounds = np.arange(lengths.size + 1, dtype="<i8")
        head = HEADER.pack(MAGIC, 1, self._code, lengths.size, bounds.size)
        index = head + lengths.tobytes() + offsets.tobytes() + bounds.tobytes()
        index_hasher = BlockHasher()
        index_hasher.update(index)
        partial = self.prefix.with_name(f".{self.prefix.name}.idx.{os.getpid()}.partial")
        with partial.open("wb") as file:
            file.write(index)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self.prefix.with_name(self.prefix.name + ".idx"))
        self._partial.replace(self.prefix.with_name(self.prefix.name + ".bin"))
        return {
            "name": self.prefix.name,
            "documents": len(self._lengths),
            "tokens": int(lengths.sum(dtype=np.int64)),
            "bin": self._hasher.result(),
            "idx": index_hasher.result(),
        }

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
        self._partial.unlink(missing_ok=True)


class ShardReader:
    """One shard, memory-mapped. Header, sizes and offsets are checked before any token is read.

    Attributes:
        lengths: int32 [documents], tokens of each document.
        dtype: type of a token on disk.
    """

    def __init__(self, prefix: Path) -> None:
        self.prefix = prefix
        index_path = prefix.with_name(prefix.name + ".idx")
        bin_path = prefix.with_name(prefix.name + ".bin")
        for path in (index_path, bin_path):
            if not path.is_file():
                raise DataError(f"{path}: no such file. {REMEDY}")
        raw = index_path.read_bytes()
        if len(raw) < HEADER.size:
            raise DataError(
                f"{index_path}: truncated at offset {len(raw)}, the header alone has "
                f"{HEADER.size} bytes. {REMEDY}"
            )
        magic, version, code, sequences, entries = HEADER.unpack_from(raw)
        if magic != MAGIC or version != 1 or code not in DTYPES:
            raise DataError(
                f"{index_path}: no index of an indexed dataset (offset 0: magic {magic!r}, version "
                f"{version}, token type {code}; allowed: {MAGIC!r}, 1, {sorted(DTYPES)}). {REMEDY}"
            )
        expected = HEADER.size + 12 * sequences + 8 * entries
        if len(raw) != expected:
            what = f"truncated at offset {len(raw)}" if len(raw) < expected else "too long"
            raise DataError(
                f"{index_path}: {what}: {len(raw)} bytes, {expected} for {sequences} sequences. "
                f"{REMEDY}"
            )
        if entries != sequences + 1:
            raise DataError(
                f"{index_path}: {sequences} sequences in {entries - 1} documents; here a document "
                "is one sequence. Make it anew from the text: data/prepare.py"
            )
        self.dtype = np.dtype(DTYPES[code]).newbyteorder("<")
        at = HEADER.size
        self.lengths: npt.NDArray[np.int32] = np.frombuffer(raw, "<i4", sequences, at)
        self._offsets = np.frombuffer(raw, "<i8", sequences, at + 4 * sequences)
        ends = np.cumsum(self.lengths, dtype=np.int64) * self.dtype.itemsize
        starts = ends - self.lengths.astype(np.int64) * self.dtype.itemsize
        wrong = np.flatnonzero((self._offsets != starts) | (self.lengths < 0))
        if wrong.size:
            place = at + 4 * sequences + 8 * int(wrong[0])
            raise DataError(
                f"{index_path}: document {wrong[0]} has length {self.lengths[wrong[0]]} and starts "
                f"at byte {self._offsets[wrong[0]]}, {starts[wrong[0]]} expected (offset {place}). "
                f"{REMEDY}"
            )
        size, total = bin_path.stat().st_size, int(ends[-1]) if sequences else 0
        if size != total:
            what = f"truncated at offset {size}" if size < total else f"too long from {total} on"
            raise DataError(f"{bin_path}: {what}: {size} bytes, its index counts {total}. {REMEDY}")
        self._data: npt.NDArray[np.generic] = (
            np.memmap(bin_path, dtype=self.dtype, mode="r") if size else np.zeros(0, self.dtype)
        )

    def __len__(self) -> int:
        return int(self.lengths.size)

    def read(
        self, document: int, *, begin: int = 0, end: int | None = None
    ) -> npt.NDArray[np.int64]:
        """Tokens [begin, end) of a document (end: its length), int64."""
        length = int(self.lengths[document])
        stop = length if end is None else end
        if not 0 <= begin <= stop <= length:
            raise IndexError(f"tokens [{begin}, {stop}) of a document of {length}")
        first = int(self._offsets[document]) // self.dtype.itemsize
        return self._data[first + begin : first + stop].astype(np.int64)
