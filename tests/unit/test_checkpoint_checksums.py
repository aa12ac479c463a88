"""Every damage to every file of a checkpoint is found before the file is used."""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.checkpoint import checksums, paths, verify
from megatron_ext.errors import CheckpointError
from tests.support.damage import KINDS

FILES = ("__0_0.distcp", "__1_0.distcp", ".metadata", "metadata.json", "extra.json", checksums.FILE)


@pytest.fixture(autouse=True, scope="module")
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def complete(folder: Path, step: int, *, form: int = paths.FORMAT) -> Path:
    """A checkpoint as it is published, of noise."""
    ours = {"step": step, "format": form}
    temporary = paths.prepare(folder, step, {"tokens": 5, paths.RESERVED: ours})
    written = {}
    for name in FILES[:2]:
        with (temporary / name).open("wb") as file:
            stream = checksums.ChecksumStream(file)
            stream.write(random.Random(f"{name}{step}").randbytes(20_000))
        written[name] = stream.entry
    (temporary / ".metadata").write_bytes(random.Random(step).randbytes(500))
    (temporary / paths.COMPLETE).write_text('{"sharded_backend": "torch_dist"}')
    return paths.publish(temporary, step, written)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("kind", KINDS)
def test_any_damage_to_any_file_is_found_and_passed_over(
    kind: str, file: str, tmp_path: Path
) -> None:
    older, newest = complete(tmp_path, 2), complete(tmp_path, 4)
    assert verify.problems(newest) == []
    KINDS[kind](newest / file, random.Random(f"{kind}{file}"))
    found = verify.problems(newest)
    assert found
    assert str(newest) in found[0]
    sound = verify.newest_sound(tmp_path)
    assert sound.path == older
    assert list(sound.damaged) == found
    assert paths.latest(tmp_path) == older
    assert (tmp_path / "step_00000004.damaged").is_dir()
    assert verify.newest_sound(tmp_path) == verify.Sound(older), "said once"


def test_messages_give_file_expected_and_found(tmp_path: Path) -> None:
    path = complete(tmp_path, 4)
    entry = checksums.entry_of(path / FILES[0])
    assert entry.size == 20_000
    KINDS["flip"](path / FILES[0], random.Random(0))
    KINDS["lose"](path / FILES[1], random.Random(0))
    flipped, lost = verify.problems(path)
    crc = checksums.entry_of(path / FILES[0]).crc32
    assert (
        flipped == f"{path / FILES[0]}: expected {entry}, found 20000 bytes with CRC-32 {crc:08x}"
    )
    assert lost.startswith(f"{path / FILES[1]}: expected 20000 bytes with CRC-32 ")
    assert lost.endswith("found no file")
    text = verify.explain(path, [flipped, lost])
    assert text.startswith(f"{path}: damaged:\n  {flipped}\n")
    assert "Put the files back from a copy" in text
    assert "latest" in text


def test_none_sound_is_an_error_and_nothing_is_renamed(tmp_path: Path) -> None:
    for step in (2, 4):
        KINDS["truncate"](complete(tmp_path, step) / FILES[0], random.Random(0))
    with pytest.raises(CheckpointError, match=r"no checkpoint there is sound(.|\n)*run.fresh=true"):
        verify.newest_sound(tmp_path)
    assert sorted(paths.step_folders(tmp_path)) == [2, 4]


def test_newer_ones_than_latest_are_not_gone_on_from(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        complete(tmp_path, step)
    paths.point(tmp_path, "step_00000004")
    KINDS["flip"](tmp_path / "step_00000004" / FILES[0], random.Random(0))
    sound = verify.newest_sound(tmp_path)
    assert sound.path == tmp_path / "step_00000002"


def test_one_in_the_middle_that_lost_a_file_is_named_too(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        complete(tmp_path, step)
    KINDS["flip"](tmp_path / "step_00000006" / FILES[0], random.Random(0))
    KINDS["lose"](tmp_path / "step_00000004" / "extra.json", random.Random(0))
    sound = verify.newest_sound(tmp_path)
    assert sound.path == tmp_path / "step_00000002"
    assert "step_00000004/extra.json" in sound.damaged[1]


def test_without_latest_the_newest_is_still_checked(tmp_path: Path) -> None:
    older, newest = complete(tmp_path, 2), complete(tmp_path, 4)
    (tmp_path / "latest").unlink()
    KINDS["lose"](newest / paths.COMPLETE, random.Random(0))
    sound = verify.newest_sound(tmp_path)
    assert sound.path == older
    assert sound.damaged


def test_without_checkpoints_there_is_none(tmp_path: Path) -> None:
    assert verify.newest_sound(tmp_path / "absent") == verify.Sound(None)


def test_an_older_version_wrote_no_checksums_and_a_newer_one_that_lacks_them_is_damaged(
    tmp_path: Path,
) -> None:
    for step, form in ((2, 1), (4, 2)):
        (complete(tmp_path, step, form=form) / checksums.FILE).unlink()
    old, new = paths.step_folders(tmp_path).values()
    assert verify.problems(old) == []
    assert verify.problems(new) == [f"{new / checksums.FILE}: found no file"]


def test_a_file_that_is_listed_outside_the_folder_is_refused(tmp_path: Path) -> None:
    path = complete(tmp_path, 2)
    table = json.loads((path / checksums.FILE).read_text())
    table["files"]["../secret"] = {"bytes": 1, "crc32": "00000000"}
    (path / checksums.FILE).write_text(json.dumps(table))
    assert "found a path" in verify.problems(path)[0]


def test_a_file_that_shrank_before_the_checkpoint_got_its_name_is_not_published(
    tmp_path: Path,
) -> None:
    temporary = paths.prepare(tmp_path, 2, {})
    (temporary / paths.COMPLETE).write_text("{}")
    (temporary / "a").write_bytes(b"12")
    with pytest.raises(OSError, match="has 2 bytes, not the 3 written"):
        paths.publish(temporary, 2, {"a": checksums.Entry(3, 0)})
    assert paths.latest(tmp_path) is None


@pytest.mark.parametrize("kind", ["truncate", "lose", "lengthen"])
def test_retention_does_not_count_what_is_cut_short(kind: str, tmp_path: Path) -> None:
    for step in (2, 4, 6):
        complete(tmp_path, step)
    for step in (4, 6):
        KINDS[kind](tmp_path / f"step_{step:08d}" / FILES[0], random.Random(step))
    assert paths.prune(tmp_path, keep=1, keep_every=0) == []
    assert verify.first_sound(paths.candidates(tmp_path)).path == tmp_path / "step_00000002"
    for step in (8, 10):
        complete(tmp_path, step)
        paths.prune(tmp_path, keep=1, keep_every=0)
    assert list(paths.step_folders(tmp_path)) == [10]


def test_what_was_found_damaged_is_not_deleted_and_does_not_count(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        complete(tmp_path, step)
    KINDS["flip"](tmp_path / "step_00000006" / FILES[0], random.Random(0))
    assert verify.newest_sound(tmp_path).path == tmp_path / "step_00000004"
    paths.prune(tmp_path, keep=2, keep_every=0)
    paths.clean(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "latest",
        "step_00000002",
        "step_00000004",
        "step_00000006.damaged",
    ]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
@pytest.mark.parametrize("call", ["fsync", "rename", "replace"])
def test_a_disk_that_fails_at_the_last_moment_leaves_the_one_before(
    call: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the tensors are written already, and the small files, the name or `latest` are not."""
    before = complete(tmp_path, 2)

    def fail(*args: object) -> None:
        raise OSError(number, os.strerror(number))

    temporary = paths.prepare(tmp_path, 4, {paths.RESERVED: {"step": 4, "format": paths.FORMAT}})
    (temporary / paths.COMPLETE).write_text("{}")
    (temporary / ".metadata").write_text("x")
    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(OSError, match=os.strerror(number)):
            paths.publish(temporary, 4, {})
    assert verify.newest_sound(tmp_path).path == before
    paths.clean(tmp_path)
    assert not list(tmp_path.glob(".*"))


def test_a_folder_that_cannot_be_written_is_said_when_going_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (2, 4):
        complete(tmp_path, step)
    KINDS["flip"](tmp_path / "step_00000004" / FILES[0], random.Random(0))

    def fail(*args: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(CheckpointError, match=r"cannot be renamed .*Read-only.* rights"):
        verify.newest_sound(tmp_path)
    assert sorted(paths.step_folders(tmp_path)) == [2, 4]


@given(st.lists(st.binary(max_size=200), max_size=6))
@settings(max_examples=50, deadline=None)
def test_the_stream_and_the_file_agree_however_it_is_cut(parts: list[bytes]) -> None:
    file = BytesIO()
    stream = checksums.ChecksumStream(file)
    for part in parts:
        assert stream.write(part) == len(part)
    assert stream.tell() == len(file.getvalue())
    whole = checksums.ChecksumStream(BytesIO())
    whole.write(file.getvalue())
    assert stream.entry == whole.entry


def test_the_stream_counts_what_torch_writes(tmp_path: Path) -> None:
    with (tmp_path / "a").open("wb") as file:
        stream = checksums.ChecksumStream(file)
        torch.save(torch.arange(5000, dtype=torch.float64).view(50, 100), stream)  # type: ignore[arg-type]
    assert stream.entry == checksums.entry_of(tmp_path / "a")


def test_checksums_need_no_torch() -> None:
    code = "import sys, megatron_ext.checkpoint.checksums; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
