"""Reading the pickles of a checkpoint without executing anything that they ask for.

torch's reader unpickles `.metadata` and the entries that are no tensors as they are, and a pickle
may call any function. So both are read here first: `.metadata` with a list of the classes that
torch's writer puts there, the entries with torch's own `weights_only`. What does not pass is never
shown to that reader.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from megatron_ext.errors import CheckpointError

METADATA = ".metadata"
COMMON = "common.pt"  # of megatron-core before 0.19, and of our import

# Plain records and enumerations; making one of them does nothing else.
_ALLOWED = {
    "pathlib": {"PosixPath"},  # where it was written
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},  # a look-up in a table
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.planner": {
        "SavePlan",
        "TensorWriteData",
        "WriteItem",
        "WriteItemType",
    },
}


class _Metadata(pickle.Unpickler):
    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        self._found: dict[Any, dict[str, Any]] = {}

    def find_class(self, module: str, name: str) -> Any:
        # No dots: they would reach attributes of what is allowed.
        if name in _ALLOWED.get(module, ()):
            found = super().find_class(module, name)
            self._found.setdefault(found, dict(vars(found)))
            return found
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise _Forbidden(f"{module}.{name}")

    def load(self) -> Any:
        try:
            return super().load()
        finally:
            # A pickle can set attributes of a class too, such as PosixPath.parent for the process.
            changed = [found for found, before in self._found.items() if vars(found) != before]
            for found in changed:
                _put_back(found, self._found[found])
            if changed:
                raise _Forbidden(f"{changed[0].__name__} in another form")


def _put_back(found: Any, before: dict[str, Any]) -> None:
    now = dict(vars(found))
    for name in now.keys() - before.keys():
        delattr(found, name)
    for name, value in before.items():
        if now.get(name) is not value:
            setattr(found, name, value)


class _Forbidden(Exception):
    """Names what a pickle wanted to use."""


def read_metadata(folder: Path) -> Metadata:
    """The table of a checkpoint: which tensor has which shape and lies where.

    Raises:
        CheckpointError: it wants more than the classes of such a table, is damaged, points outside
            the folder, or says that entries are compressed.
    """
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            metadata = _Metadata(file).load()
    except _Forbidden as forbidden:
        raise CheckpointError(_refused(path, str(forbidden))) from forbidden
    except Exception as error:  # Damaged pickles raise anything.
        raise CheckpointError(
            f"{path}: damaged ({type(error).__name__}: {error}). Put the file back from a copy, or "
            "take another checkpoint"
        ) from error
    places = getattr(metadata, "storage_data", None)
    if not isinstance(metadata, Metadata) or not isinstance(places, dict):
        raise CheckpointError(f"{path}: holds no table of tensors. Take another checkpoint")
    for place in places.values():
        name = str(place.relative_path)
        if Path(name).name != name:
            raise CheckpointError(
                f"{path}: points outside its folder, to {name!r}. Do not use what somebody may "
                "have made to do harm; take a checkpoint from a source that you trust"
            )
        # torch would unpickle what comes out, not what is checked here.
        if place.transform_descriptors:
            raise CheckpointError(_refused(path, f"{place.transform_descriptors[0]} on {name}"))
    return metadata


def check_objects(folder: Path, metadata: Metadata, names: Iterable[str]) -> None:
    """Read entries that are no tensors, and accept tensors and plain values only.

    Args:
        folder: of the checkpoint.
        metadata: its table.
        names: those of the entries to check, of `object_names`.

    Raises:
        CheckpointError: an entry holds something else, or is damaged.
        OSError: a file cannot be read.
    """
    places: dict[Any, Any] = metadata.storage_data
    for name in names:
        place = places[MetadataIndex(name)]
        path = folder / place.relative_path
        with path.open("rb") as file:
            file.seek(place.offset)
            _check_plain(path, name, file.read(place.length))
    if (folder / COMMON).exists():
        _check_plain(folder / COMMON, "", (folder / COMMON).read_bytes())


def object_names(metadata: Metadata) -> list[str]:
    """Names of the entries that are no tensors."""
    return [
        name
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, BytesStorageMetadata)
    ]


def _check_plain(path: Path, name: str, content: bytes) -> None:
    try:
        torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # Damaged pickles raise anything.
        # Not its whole text, which advises to execute what is there.
        wanted = re.search(r"GLOBAL (\S+)", str(error))
        if wanted:
            entry = f"{name} in it " if name else ""
            raise CheckpointError(_refused(path, wanted[1], entry)) from error
        raise CheckpointError(
            f"{path}: {name or 'is'} damaged ({type(error).__name__}). Put the file back from a "
            "copy, or take another checkpoint"
        ) from error


def _refused(path: Path, wanted: str, entry: str = "") -> str:
    return (
        f"{path}: {entry}wants to use {wanted}, which no checkpoint needs; nothing of it was "
        "executed. Do not use what somebody may have made to do harm; take a checkpoint from a "
        "source that you trust"
    )
