"""Tensors as bytes in files: the rows that are asked for are read, and nothing else is.

Not by memory maps: pages of a mapped file count as the process's memory, and a conversion has to
show that it needs little.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from megatron_ext.errors import CheckpointError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U8": torch.uint8,
    "F8_E8M0": torch.uint8,  # powers of two, as their biased exponents
    "I64": torch.int64,
    "I32": torch.int32,
}
CODES = {dtype: code for code, dtype in reversed(DTYPES.items())}
# The length of a header is 8 bytes; the format allows headers of 100 MB.
LONGEST_HEADER = 100_000_000


@dataclass(frozen=True, slots=True)
class Blob:
    """A contiguous tensor at a place in a file."""

    file: Path
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def read(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Elements `start` to `stop` of the flattened tensor, 1-D, in memory of their own.

        Raises:
            CheckpointError: the file ends before.
        """
        stop = prod(self.shape) if stop is None else stop
        out = torch.empty(stop - start, dtype=self.dtype)
        if out.numel():
            view = memoryview(out.view(torch.uint8).numpy())
            with self.file.open("rb", buffering=0) as file:
                file.seek(self.offset + start * out.element_size())
                got = 0
                while got < len(view):
                    count = file.readinto(view[got:])
                    if not count:
                        raise CheckpointError(
                            f"{self.file}: ends before the data that it should hold; copy it again"
                        )
                    got += count
        return out


def safetensors_blobs(file: Path) -> dict[str, Blob]:
    """The tensors of a safetensors file, from its header; no data is read.

    Raises:
        CheckpointError: the file is missing, cut short, or not in that format.
    """
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= LONGEST_HEADER:
                raise ValueError(f"the header would be {length} bytes long")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        blobs, end = {}, 0
        for name, entry in header.items():
            first, last = entry["data_offsets"]
            dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
            if last - first != prod(shape) * dtype.itemsize:
                raise ValueError(f"{name}: {last - first} bytes do not hold {list(shape)} {dtype}")
            blobs[name] = Blob(file, 8 + length + first, dtype, shape)
            end = max(end, 8 + length + last)
        found = file.stat().st_size
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{file}: not a readable safetensors file ({type(error).__name__}: {error})"
        ) from error
    if found != end:
        raise CheckpointError(f"{file}: has {found} bytes, not the {end} that its header tells of")
    return blobs


@dataclass(frozen=True)
class Planned:
    """A tensor that is going to be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def write_safetensors(
    stream: BinaryIO, planned: Iterable[Planned], parts: Iterable[Iterable[Tensor]]
) -> None:
    """Write one file, part by part: safetensors' own writer takes whole tensors only.

    Args:
        stream: where to.
        planned: the tensors in their order.
        parts: for each, its elements in order, in pieces of any shape.

    Raises:
        ValueError: the parts of a tensor do not add up to it.
    """
    planned, header, end = list(planned), {"__metadata__": {"format": "pt"}}, 0
    entries: dict[str, object] = dict(header)
    for tensor in planned:
        place = [end, end + tensor.nbytes]
        code, shape = CODES[tensor.dtype], list(tensor.shape)
        entries[tensor.name] = {"dtype": code, "shape": shape, "data_offsets": place}
        end = place[1]
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data starts at a multiple of 8, as the format recommends
    stream.write(len(text).to_bytes(8, "little") + text)
    for tensor, pieces in zip(planned, parts, strict=True):
        written = 0
        for piece in pieces:
            if piece.dtype != tensor.dtype:
                raise ValueError(f"{tensor.name}: planned as {tensor.dtype}, got {piece.dtype}")
            data = piece.contiguous().flatten().view(torch.uint8)
            stream.write(memoryview(data.numpy()))
            written += data.numel()
        if written != tensor.nbytes:
            raise ValueError(f"{tensor.name}: {written} bytes, planned {tensor.nbytes}")


def flush(stream: BinaryIO) -> None:
    """Everything written is on the disk when this returns."""
    stream.flush()
    os.fsync(stream.fileno())
