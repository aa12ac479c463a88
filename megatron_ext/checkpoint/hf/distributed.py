"""Our checkpoints (torch's distributed format), read and written piece by piece on one process.

torch's own reader and writer hold whole tensors, the writer all those of a file. A tensor here is
many chunks, each a `torch.save` of its own in a file; the numbers in it lie in one run of bytes.
"""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from megatron_ext.checkpoint import safe
from megatron_ext.checkpoint.hf.blobs import Blob
from megatron_ext.errors import CheckpointError

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a tensor, and where it is stored."""

    offsets: Shape
    sizes: Shape
    file: str
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Stored:
    """A whole tensor of a checkpoint."""

    shape: Shape
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


class StoredTensors:
    """The tensors of one checkpoint, saved at any layout.

    Args:
        folder: a complete `step_*` folder.

    Raises:
        CheckpointError: what lies there cannot be read, or a file is missing or cut short.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._blobs: dict[Chunk, Blob] = {}
        try:
            metadata = safe.read_metadata(folder)
            places: dict[Any, Any] = metadata.storage_data or {}
            self.tensors = {
                name: Stored(
                    tuple(found.size), found.properties.dtype, _chunks(name, found, places)
                )
                for name, found in metadata.state_dict_metadata.items()
                if isinstance(found, TensorStorageMetadata)
            }
            ends: dict[str, int] = {}
            for place in places.values():
                end = place.offset + place.length
                ends[place.relative_path] = max(end, ends.get(place.relative_path, 0))
            for name, end in sorted(ends.items()):
                size = (folder / name).stat().st_size
                if size < end:
                    raise ValueError(f"{name} has {size} bytes, not the {end} that were written")
        except CheckpointError:
            raise
        except Exception as error:  # A table that is not what it should be raises anything.
            raise CheckpointError(f"{folder}: damaged ({type(error).__name__}: {error})") from error

    def read(self, key: str, index: Sequence[int], start: int, stop: int) -> Tensor:
        """Rows `start` to `stop` of `tensor[index]`, put together from the chunks that hold them.

        Args:
            key: name of the tensor.
            index: leading indices.
            start, stop: along the axis after them. A vector or number after them is one row each.

        Returns:
            [stop - start, ...], dtype as stored.
        """
        stored = self.tensors[key]
        lead = len(index)
        low = (*index, start, *(0 for _ in stored.shape[lead + 1 :]))
        high = (*(i + 1 for i in index), stop, *stored.shape[lead + 1 :])
        out = torch.empty([b - a for a, b in zip(low, high, strict=True)], dtype=stored.dtype)
        filled = 0
        for chunk in stored.chunks:
            ends = [a + n for a, n in zip(chunk.offsets, chunk.sizes, strict=True)]
            first = [max(a, b) for a, b in zip(low, chunk.offsets, strict=True)]
            last = [min(a, b) for a, b in zip(high, ends, strict=True)]
            if any(a >= b for a, b in zip(first, last, strict=True)):
                continue
            here = tuple(slice(a - b, c - b) for a, b, c in zip(first, low, last, strict=True))
            there = [(a - o, c - o) for a, o, c in zip(first, chunk.offsets, last, strict=True)]
            part = self._read_box(key, chunk, stored.dtype, there)
            out[here] = part
            filled += part.numel()
        if filled != out.numel():
            raise CheckpointError(
                f"{self.folder}: {key} has {filled} of {out.numel()} numbers of {list(low)} to "
                f"{list(high)}; the checkpoint is damaged"
            )
        return out.reshape(out.shape[lead:])

    def _read_box(
        self, key: str, chunk: Chunk, dtype: torch.dtype, box: list[tuple[int, int]]
    ) -> Tensor:
        """A box of a chunk: what it spans of the outermost axes that it cuts is read in one run."""
        whole = chunk.sizes
        axis = 0  # the first axis on which the box is more than one index
        while axis < len(box) - 1 and box[axis][1] - box[axis][0] == 1:
            axis += 1
        inner = prod(whole[axis + 1 :])
        before = 0
        for (first, _), size in zip(box[:axis], whole[:axis], strict=True):
            before = before * size + first
        base = before * whole[axis]
        blob = self._blobs.get(chunk) or self._blob(key, chunk, dtype)
        rows = blob.read((base + box[axis][0]) * inner, (base + box[axis][1]) * inner)
        shape = [1] * axis + [box[axis][1] - box[axis][0], *whole[axis + 1 :]]
        rest = tuple(slice(a, b) for a, b in box[axis + 1 :])
        return rows.view(shape)[(slice(None),) * (axis + 1) + rest]

    def _blob(self, key: str, chunk: Chunk, dtype: torch.dtype) -> Blob:
        """Where the numbers of a chunk are."""
        file = self.folder / chunk.file
        try:
            with file.open("rb") as stream:
                place = _find_numbers(
                    _Window(stream, chunk.start, chunk.length), chunk.sizes, dtype
                )
        except Exception as error:  # Damaged pickles raise anything.
            raise CheckpointError(
                f"{file}: {key} is damaged ({type(error).__name__}: {error})"
            ) from error
        self._blobs[chunk] = Blob(file, chunk.start + place, dtype, chunk.sizes)
        return self._blobs[chunk]


def _find_numbers(window: _Window, sizes: Shape, dtype: torch.dtype) -> int:
    """Offset of the numbers in what `torch.save` made of a contiguous tensor: a zip file, not
    compressed, with a pickle that describes the tensor and the bytes of its storage.

    `torch.load` would read all of them.
    """
    with zipfile.ZipFile(cast("IO[bytes]", window)) as archive:
        names = [info.filename for info in archive.infolist()]
        (description,) = (name for name in names if name.endswith("/data.pkl"))
        found = _Description(io.BytesIO(archive.read(description))).load()
        storage, first, shape, stride = found
        data = archive.getinfo(f"{description.removesuffix('data.pkl')}data/{storage[2]}")
    plain = torch.empty_strided(shape, stride, device="meta").is_contiguous()
    if (
        tuple(shape) != sizes
        or not plain
        or data.file_size < (first + prod(sizes)) * dtype.itemsize
    ):
        raise ValueError(f"is {list(shape)} with strides {list(stride)}, not {list(sizes)}")
    if data.compress_type != zipfile.ZIP_STORED:
        raise ValueError("is compressed")
    # The directory gives the place of an entry's own header, whose name and extra field vary.
    window.seek(data.header_offset + 26)
    lengths = window.read(4)
    header = 30 + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
    return int(data.header_offset + header + first * dtype.itemsize)


class _Description(pickle.Unpickler):
    """Reads (storage, offset, shape, strides) of a saved tensor; makes no object of any other."""

    def persistent_load(self, saved: Any) -> Any:
        return saved

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda *args: args[:4]
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module == "torch" and name.endswith("Storage"):
            return name
        raise pickle.UnpicklingError(f"holds {module}.{name}, which is no plain tensor")


class _Window(io.RawIOBase):
    """A part of a file as a file."""

    def __init__(self, stream: BinaryIO, start: int, length: int) -> None:
        super().__init__()
        self._stream, self._start, self._length, self._at = stream, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        view = view[: max(0, self._length - self._at)]
        self._stream.seek(self._start + self._at)
        count = self._stream.readinto(view)  # type: ignore[attr-defined]
        self._at += count
        return int(count)


def _chunks(name: str, found: TensorStorageMetadata, places: dict[Any, Any]) -> tuple[Chunk, ...]:
    chunks = []
    for chunk in found.chunks:
        place = places[MetadataIndex(name, chunk.offsets)]
        chunks.append(
            Chunk(
                tuple(chunk.offsets),
                tuple(chunk.sizes),
                place.relative_path,
                place.offset,
                place.length,
            )
        )
    return tuple(chunks)


def append(stream: Any, tensor: Tensor) -> tuple[int, int]:
    """Write one chunk at the end of an open file; its start and length there."""
    start = stream.tell()
    torch.save(tensor.contiguous(), stream)
    return start, stream.tell() - start


def write_index(folder: Path, tensors: dict[str, Stored]) -> None:
    """Make a folder of chunk files a checkpoint: torch's index, and megatron-core's two files."""
    entries: dict[str, Any] = {}
    results = []
    for name, stored in tensors.items():
        chunks = [
            ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
            for chunk in stored.chunks
        ]
        properties = TensorProperties(dtype=stored.dtype)
        entries[name] = TensorStorageMetadata(properties, torch.Size(stored.shape), chunks)
        for number, chunk in enumerate(stored.chunks):
            results.append(
                WriteResult(
                    MetadataIndex(name, chunk.offsets, number),
                    chunk.length,
                    _StorageInfo(chunk.file, chunk.start, chunk.length),
                )
            )
    FileSystemWriter(folder).finish(Metadata(entries), [results])
    torch.save({}, folder / "common.pt")
    marker = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (folder / "metadata.json").write_text(json.dumps(marker))
