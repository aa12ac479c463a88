"""Loading a checkpoint executes nothing: what a pickle asks for is refused before torch sees it."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PosixPath
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_checkpoint
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorProperties

from megatron_ext.checkpoint import checksums, paths, safe
from megatron_ext.checkpoint.load import load
from megatron_ext.errors import CheckpointError


@pytest.fixture(autouse=True, scope="module")
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@dataclass
class Trap:
    """A pickle of it makes a folder when it is read."""

    victim: Path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.victim),)


def checkpoint(folder: Path, *, entry: object, metadata: Any = None, common: Any = None) -> Path:
    """One with a tensor, an object and, in the end, checksums: an attacker has those right."""
    temporary = paths.prepare(folder, 2, {paths.RESERVED: {"step": 2, "format": paths.FORMAT}})
    torch_checkpoint.save(
        {"weight": torch.arange(6.0), "object/shard_0_1": entry},
        storage_writer=torch_checkpoint.FileSystemWriter(temporary),
        planner=DefaultSavePlanner(flatten_state_dict=False),
        no_dist=True,
    )
    (temporary / paths.COMPLETE).write_text('{"sharded_backend": "torch_dist"}')
    if metadata is not None:
        (temporary / safe.METADATA).write_bytes(pickle.dumps(metadata))
    if common is not None:
        torch.save(common, temporary / safe.COMMON)
    return paths.publish(temporary, 2, {})


def attempt(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(path, [nn.Linear(2, 2)], None, None)  # type: ignore[arg-type]
    return str(caught.value)


def check(path: Path) -> None:
    metadata = safe.read_metadata(path)
    safe.check_objects(path, metadata, safe.object_names(metadata))


def test_the_trap_works_where_nobody_looks(tmp_path: Path) -> None:
    """Negative control: torch's own reader runs both kinds."""
    victim = tmp_path / "victim"
    path = checkpoint(tmp_path / "a", entry={}, metadata=Trap(victim))
    with pytest.raises(Exception, match=r"state_dict_metadata|storage_meta"):
        FileSystemReader(path).read_metadata()
    assert victim.exists()
    victim.rmdir()
    path = checkpoint(tmp_path / "b", entry=Trap(victim))
    assert not victim.exists()
    wanted = {"object/shard_0_1": io.BytesIO()}
    torch_checkpoint.load(wanted, storage_reader=FileSystemReader(path), no_dist=True)
    assert victim.exists()


def test_a_trap_in_the_table_does_not_run(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    path = checkpoint(tmp_path / "a", entry={}, metadata=Trap(victim))
    message = attempt(path)
    assert not victim.exists()
    assert f"{path / safe.METADATA}: wants to use " in message
    assert "posix.mkdir" in message
    assert "nothing of it was executed" in message
    assert "source that you trust" in message


def test_a_trap_deep_in_a_true_table_does_not_run(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    table = FileSystemReader(checkpoint(tmp_path / "a", entry={})).read_metadata()
    table.planner_data = {"x": [Trap(victim)]}
    path = checkpoint(tmp_path / "b", entry={}, metadata=table)
    assert "wants to use " in attempt(path)
    assert not victim.exists()


def test_a_trap_in_an_object_does_not_run(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    path = checkpoint(tmp_path / "a", entry=Trap(victim))
    message = attempt(path)
    assert not victim.exists()
    assert "object/shard_0_1 in it wants to use posix.mkdir" in message
    assert "weights_only" not in message, "torch's own advice is to execute it"


def test_a_trap_in_common_values_does_not_run(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    path = checkpoint(tmp_path / "a", entry={}, common=Trap(victim))
    assert f"{path / safe.COMMON}: wants to use posix.mkdir" in attempt(path)
    assert not victim.exists()


@pytest.mark.parametrize(
    "wanted",
    [
        b"cos\nsystem\n(S'true'\ntR.",
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"ctorch\nload\n.",
        b"ctorch.serialization\nload\n.",
        b"ctorch.distributed.checkpoint.filesystem\npickle\n.",
        # Protocol 4 reaches attributes of what is allowed through a dot.
        b"\x80\x04\x8c\x05torch\x8c\x0dSize.__init__\x93.",
        b"\x80\x04\x8c\x27torch.distributed.checkpoint.filesystem\x8c\x0cpickle.loads\x93.",
    ],
)
def test_what_is_not_on_the_list_is_refused(wanted: bytes, tmp_path: Path) -> None:
    (tmp_path / safe.METADATA).write_bytes(wanted)
    with pytest.raises(CheckpointError, match="wants to use"):
        safe.read_metadata(tmp_path)


def test_an_honest_table_and_honest_objects_pass(tmp_path: Path) -> None:
    entry = {"a": [1, 2.0, None, "x"], "b": torch.arange(3), "c": (True, b"bytes")}
    path = checkpoint(tmp_path, entry=entry, common={"args": {}})
    check(path)
    metadata = safe.read_metadata(path)
    assert safe.object_names(metadata) == ["object/shard_0_1"]
    theirs = FileSystemReader(path).read_metadata()
    assert metadata.state_dict_metadata == theirs.state_dict_metadata
    assert metadata.storage_data == theirs.storage_data


def test_files_outside_the_folder_are_not_read(tmp_path: Path) -> None:
    table = FileSystemReader(checkpoint(tmp_path / "a", entry=[1])).read_metadata()
    table.storage_data[MetadataIndex("object/shard_0_1")].relative_path = "../../secret"
    path = checkpoint(tmp_path / "b", entry={}, metadata=table)
    assert "points outside its folder, to '../../secret'" in attempt(path)


def test_entries_that_would_be_unpacked_first_are_refused(tmp_path: Path) -> None:
    """What is checked must be what torch reads, which unpacks where the table says so."""
    table = FileSystemReader(checkpoint(tmp_path / "a", entry=[1])).read_metadata()
    table.storage_data[MetadataIndex("object/shard_0_1")].transform_descriptors = ["stream.zstd/1"]
    path = checkpoint(tmp_path / "b", entry=[1], metadata=table)
    assert "wants to use stream.zstd/1 on __0_0.distcp" in attempt(path)


@pytest.mark.parametrize(
    ("name", "value"), [(b"parent", b"S'/etc'"), (b"sent", b"I1"), (b"__doc__", b"I1")]
)
def test_classes_cannot_be_changed(name: bytes, value: bytes, tmp_path: Path) -> None:
    """A pickle's BUILD sets attributes of whatever it is given, also of an allowed class."""
    before = dict(vars(PosixPath))
    harm = b"cpathlib\nPosixPath\n(N(dS'" + name + b"'\n" + value + b"\nstb."
    (tmp_path / safe.METADATA).write_bytes(harm)
    with pytest.raises(CheckpointError, match="wants to use PosixPath in another form"):
        safe.read_metadata(tmp_path)
    assert dict(vars(PosixPath)) == before
    assert (tmp_path / "a").parent == tmp_path


@pytest.mark.parametrize("content", [b"", b"noise", pickle.dumps([1]), pickle.dumps(Metadata({}))])
def test_a_table_that_is_none_is_damaged(content: bytes, tmp_path: Path) -> None:
    (tmp_path / safe.METADATA).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"damaged|no table of tensors"):
        safe.read_metadata(tmp_path)


def test_every_dtype_passes(tmp_path: Path) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn):
        metadata = Metadata({}, TensorProperties(dtype=dtype), {})
        (tmp_path / safe.METADATA).write_bytes(pickle.dumps(metadata))
        assert safe.read_metadata(tmp_path).planner_data.dtype is dtype


def test_checksums_come_first(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    path = checkpoint(tmp_path / "a", entry={})
    (path / safe.METADATA).write_bytes(pickle.dumps(Trap(victim)))
    message = attempt(path)
    assert f"{path / safe.METADATA}: expected " in message
    assert checksums.read(path)
    assert not victim.exists()
