"""Documents out of text, jsonl (.gz, .zst) and parquet files, and the cut of inputs into units."""

from __future__ import annotations

import gzip
import hashlib
import io
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from megatron_ext.errors import DataError

JSONL = (".jsonl", ".ndjson")
JSONL_PACKED = tuple(name + packed for name in JSONL for packed in (".gz", ".zst"))
PARQUET = (".parquet",)


@dataclass(frozen=True)
class Piece:
    """A part of one input file: bytes [begin, end) of jsonl, row groups [begin, end) of parquet."""

    path: Path
    kind: str  # text, jsonl, packed, parquet
    begin: int
    end: int
    weight: int  # bytes on disk, for the progress bar


@dataclass(frozen=True)
class Broken:
    """A document that cannot be read; the reason is what the DataError would say."""

    reason: str


def expand(inputs: Sequence[Path], *, patterns: Sequence[str] = ()) -> list[Path]:
    """All files of the inputs, sorted within each folder. Hidden files are left out.

    A folder yields every file in it, or those that match one of the patterns (``*.py``).
    """
    files: list[Path] = []
    for path in inputs:
        if path.is_file():
            files.append(path)
        elif path.is_dir():
            found = sorted(p for p in path.rglob("*") if p.is_file())
            files += [
                p
                for p in found
                if not any(part.startswith(".") for part in p.relative_to(path).parts)
                and (not patterns or any(p.match(pattern) for pattern in patterns))
            ]
        else:
            raise DataError(f"{path}: no such file or folder. Check the INPUT arguments")
    if not files:
        raise DataError(
            f"{', '.join(map(str, inputs))}: no files in there (hidden ones are left out). Check "
            "the INPUT arguments and --pattern"
        )
    return files


def cut(files: Sequence[Path], *, unit_bytes: int) -> list[list[Piece]]:
    """Units of about ``unit_bytes``, each of which becomes one shard.

    A function of the files alone, so that an interrupted preparation goes on with the same
    units whatever the number of workers.
    """
    units: list[list[Piece]] = []
    small: list[Piece] = []
    for path in files:
        pieces = _pieces(path, unit_bytes)
        if len(pieces) == 1 and pieces[0].weight < unit_bytes:
            if small and sum(piece.weight for piece in small) + pieces[0].weight > unit_bytes:
                units.append(small)
                small = []
            small.append(pieces[0])
            continue
        if small:
            units.append(small)
            small = []
        units += [[piece] for piece in pieces]
    if small:
        units.append(small)
    return units


def _pieces(path: Path, unit_bytes: int) -> list[Piece]:
    name, size = path.name.lower(), path.stat().st_size
    if name.endswith(JSONL):
        bounds = [*range(0, max(size, 1), unit_bytes), size]
        return [Piece(path, "jsonl", a, b, b - a) for a, b in itertools.pairwise(bounds)]
    if name.endswith(JSONL_PACKED):
        return [Piece(path, "packed", 0, size, size)]
    if name.endswith(PARQUET):
        groups = _parquet(path).num_row_groups
        step = max(1, round(groups * unit_bytes / max(size, 1)))
        return [
            Piece(path, "parquet", a, min(a + step, groups), size * min(step, groups - a) // groups)
            for a in range(0, groups, step)
        ]
    return [Piece(path, "text", 0, size, size)]


def documents(piece: Piece, *, field: str) -> Iterator[str | Broken]:
    """The documents of a piece in order; ``field`` is the key or column that holds the text."""
    if piece.kind == "text":
        yield _decode(piece.path.read_bytes(), str(piece.path), 0)
    elif piece.kind == "parquet":
        yield from _parquet_rows(piece, field)
    else:
        yield from _json_lines(piece, field)


def _decode(raw: bytes, where: str, offset: int) -> str | Broken:
    try:
        return raw.decode("utf-8-sig" if offset == 0 else "utf-8")
    except UnicodeDecodeError as error:
        return Broken(f"{where}, offset {offset + error.start}: no UTF-8 ({error.reason})")


def _json_lines(piece: Piece, field: str) -> Iterator[str | Broken]:
    where = str(piece.path)
    with _open(piece.path) as file:
        offset = 0
        if piece.begin:
            # The line that a cut falls into belongs to the unit before.
            file.seek(piece.begin - 1)
            offset = piece.begin - 1 + len(file.readline())
        while piece.kind == "packed" or offset < piece.end:
            try:
                line = file.readline()
            except (OSError, EOFError, ValueError) as error:
                raise DataError(
                    f"{where}: damaged or truncated at offset {offset} of its unpacked text "
                    f"({error}). Copy the file again"
                ) from error
            if not line:
                break
            start, offset = offset, offset + len(line)
            if not line.strip():
                continue
            text = _decode(line, where, start)
            if isinstance(text, Broken):
                yield text
                continue
            try:
                row = json.loads(text)
            except json.JSONDecodeError as error:
                yield Broken(f"{where}, offset {start}: no JSON on this line ({error.msg})")
                continue
            value = row.get(field) if isinstance(row, dict) else None
            if isinstance(value, str):
                yield value
            else:
                keys = sorted(row) if isinstance(row, dict) else type(row).__name__
                yield Broken(
                    f"{where}, offset {start}: no text under {field!r} (there is: {keys}); "
                    "--field names another key"
                )


def _open(path: Path) -> BinaryIO:
    if path.suffix.lower() == ".gz":
        return cast(BinaryIO, gzip.open(path, "rb"))
    if path.suffix.lower() == ".zst":
        return cast(BinaryIO, io.BufferedReader(_ZstdFile(path), buffer_size=1 << 20))
    return path.open("rb")


class _ZstdFile(io.RawIOBase):
    """The unpacked bytes of one or several zstd frames.

    Unlike zstandard's own reader it does not take a file that ends inside a frame for a short one.
    """

    def __init__(self, path: Path) -> None:
        import zstandard

        self._decompressor = zstandard.ZstdDecompressor()
        self._error = zstandard.ZstdError
        self._file = path.open("rb")
        self._frame: Any = None
        self._packed = b""
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            if not self._packed:
                self._packed = self._file.read(1 << 20)
                if not self._packed:
                    if self._frame is not None:
                        raise OSError("the file ends inside a zstd frame")
                    return 0
            if self._frame is None:
                self._frame = self._decompressor.decompressobj()
            try:
                self._ready = self._frame.decompress(self._packed)
            except self._error as error:
                raise OSError(str(error)) from error
            self._packed = self._frame.unused_data
            if self._frame.eof:
                self._frame = None
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def _parquet(path: Path) -> Any:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: no parquet, or truncated ({error}). Copy it again") from error


def _parquet_rows(piece: Piece, field: str) -> Iterator[str | Broken]:
    import pyarrow

    with _parquet(piece.path) as file:
        if field not in file.schema_arrow.names:
            raise DataError(
                f"{piece.path}: no column {field!r} (there is: {file.schema_arrow.names}); "
                "--field names another"
            )
        groups = list(range(piece.begin, piece.end))
        row = sum(file.metadata.row_group(i).num_rows for i in range(piece.begin))
        try:
            for batch in file.iter_batches(batch_size=256, row_groups=groups, columns=[field]):
                for value in batch.column(0).to_pylist():
                    if isinstance(value, str):
                        yield value
                    else:
                        yield Broken(f"{piece.path}, row {row}: no text in column {field!r}")
                    row += 1
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(
                f"{piece.path}: damaged from about row {row} on ({error}). Copy it again"
            ) from error


def digest(files: Sequence[Path], *, options: Sequence[object]) -> str:
    """Hash of the names and sizes of the input files and of what else decides the output."""
    facts = [f"{path.name} {path.stat().st_size}" for path in files]
    facts += [repr(option) for option in options]
    return hashlib.blake2b("\n".join(facts).encode(), digest_size=16).hexdigest()
