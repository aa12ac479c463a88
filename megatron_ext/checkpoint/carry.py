"""Moments of frozen parameters on their way from one checkpoint to the next, without being loaded.

A checkpoint is whole: also what the run does not hold in memory stands in it, copied byte by byte
from the checkpoint before. Each rank's writer copies a share into a file of its own, and the table
of the new checkpoint gets the entries. So reading at another layout, checksums, deleting old
checkpoints and going back need to know nothing of it.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from megatron_ext.checkpoint import checksums, safe
from megatron_ext.checkpoint.checksums import ChecksumStream, Entry
from megatron_ext.errors import CheckpointError

PREFIX = "optimizer.state."


@dataclass(frozen=True)
class Piece:
    """A stored piece of a tensor: `length` bytes of a file from `offset` on."""

    index: MetadataIndex
    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class Share:
    """What one rank copies into its file."""

    source: Path
    pieces: tuple[Piece, ...]
    file: str

    def copy(self, folder: Path) -> Entry:
        """Copy into `folder`, flushed to the disk.

        Raises:
            OSError: a file cannot be read or written.
            ValueError: what was read is not what was written once.
        """
        with (folder / self.file).open("wb") as file:
            stream = ChecksumStream(file)
            for piece in self.pieces:
                self._copy(piece, stream)
            checksums.sync(file)
        expected = self._whole_file()
        if expected is not None and stream.entry != expected:
            raise ValueError(
                f"{self.source / self.pieces[0].file}: expected {expected}, found {stream.entry}"
            )
        return stream.entry

    def _copy(self, piece: Piece, stream: ChecksumStream) -> None:
        left = piece.length
        with (self.source / piece.file).open("rb", buffering=0) as file:
            file.seek(piece.offset)
            while left:
                block = file.read(min(left, checksums.BLOCK_BYTES))
                if not block:
                    raise ValueError(f"{self.source / piece.file}: is cut short")
                stream.write(block)
                left -= len(block)

    def _whole_file(self) -> Entry | None:
        """The entry of the file that is copied as a whole, as from the second save on; else the
        file has been compared with its checksum when it was loaded from."""
        if {piece.file for piece in self.pieces} != {self.file}:
            return None
        entry = (checksums.read(self.source) or {}).get(self.file)
        size = sum(piece.length for piece in self.pieces)
        return entry if entry is not None and entry.size == size else None


@dataclass(frozen=True)
class Carried:
    """What a new checkpoint takes over from an earlier one.

    Attributes:
        tensors: their descriptions, by stored name.
        paths: what torch's table keeps beside, by stored name.
        shares: one a rank, some of them without pieces.
    """

    tensors: Mapping[str, Any]
    paths: Mapping[str, Any]
    shares: tuple[Share, ...]

    def enter(self, folder: Path) -> None:
        """Add the copied entries to the table of the new checkpoint.

        Raises:
            CheckpointError: its table is damaged.
            OSError: it cannot be written.
        """
        metadata = safe.read_metadata(folder)
        metadata.state_dict_metadata.update(self.tensors)
        metadata.storage_data.update(
            {
                piece.index: _StorageInfo(share.file, piece.offset, piece.length)
                for share in self.copied()
                for piece in share.pieces
            }
        )
        if self.paths:
            metadata.planner_data = {**(metadata.planner_data or {}), **self.paths}
        with (folder / safe.METADATA).open("wb") as file:
            pickle.dump(metadata, file)
            checksums.sync(file)

    def copied(self) -> tuple[Share, ...]:
        """The shares as they lie in the new checkpoint."""
        shares = []
        for share in self.shares:
            offset, pieces = 0, []
            for piece in share.pieces:
                pieces.append(replace(piece, file=share.file, offset=offset))
                offset += piece.length
            shares.append(replace(share, pieces=tuple(pieces)))
        return tuple(shares)

    def after(self, folder: Path) -> Carried:
        """What the checkpoint after the one in `folder` takes over from that."""
        return replace(self, shares=tuple(replace(s, source=folder) for s in self.copied()))


def parameter_of(stored: str) -> str | None:
    """The parameter whose moment or main weight is stored under a name; None for other names."""
    if not stored.startswith(PREFIX):
        return None
    return stored.removeprefix(PREFIX).split(".", 1)[1]


def plan(source: Path, *, frozen: Callable[[str], bool], ranks: int) -> Carried:
    """Share out the copying of what `source` holds of the frozen parameters' optimizer state.

    Args:
        source: a checkpoint.
        frozen: whether the parameter of a name is.
        ranks: that write.

    Raises:
        CheckpointError: its table is damaged.
    """
    metadata = safe.read_metadata(source)
    names = [n for n in metadata.state_dict_metadata if frozen(parameter_of(n) or "")]
    shares = _share_out(_pieces(metadata, set(names)), ranks)
    kept = metadata.planner_data or {}
    return Carried(
        tensors={name: metadata.state_dict_metadata[name] for name in names},
        paths={name: kept[name] for name in names if name in kept},
        shares=tuple(
            # Padded, so that files in the order of their names are in that of the ranks: copied
            # again on as many, each is copied as a whole.
            Share(source, tuple(pieces), f"carried_{rank:06d}.distcp")
            for rank, pieces in enumerate(shares)
        ),
    )


def _pieces(metadata: Metadata, names: set[str]) -> list[Piece]:
    places: Mapping[Any, Any] = metadata.storage_data
    pieces = [
        Piece(index, str(place.relative_path), place.offset, place.length)
        for index, place in places.items()
        if index.fqn in names
    ]
    missing = names - {piece.index.fqn for piece in pieces}
    if missing:
        raise CheckpointError(f"the table names no place of {', '.join(sorted(missing)[:3])}")
    return sorted(pieces, key=lambda piece: (piece.file, piece.offset))


def _share_out(pieces: list[Piece], ranks: int) -> list[list[Piece]]:
    """In order, about the same number of bytes for each rank."""
    shares: list[list[Piece]] = [[] for _ in range(ranks)]
    total, done = sum(piece.length for piece in pieces), 0
    for piece in pieces:
        shares[min(ranks - 1, done * ranks // max(total, 1))].append(piece)
        done += piece.length
    return shares
