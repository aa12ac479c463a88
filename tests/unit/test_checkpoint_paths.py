"""Names, `latest` and retention: whatever has a checkpoint's name is whole."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ext.checkpoint import paths
from megatron_ext.errors import CheckpointError

EXTRA = {"tokens": 5, paths.RESERVED: {"step": 1}}


def complete(folder: Path, step: int) -> Path:
    temporary = paths.prepare(folder, step, {**EXTRA, paths.RESERVED: {"step": step}})
    (temporary / paths.COMPLETE).write_text("{}")
    return paths.publish(temporary, step, {})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_publish_names_the_folder_and_latest_follows(tmp_path: Path) -> None:
    complete(tmp_path, 10)
    complete(tmp_path, 20)
    assert names(tmp_path) == ["latest", "step_00000010", "step_00000020"]
    assert (tmp_path / "latest").read_text() == "step_00000020\n"
    assert paths.latest(tmp_path) == tmp_path / "step_00000020"


def test_an_incomplete_folder_is_never_published(tmp_path: Path) -> None:
    complete(tmp_path, 10)
    temporary = paths.prepare(tmp_path, 20, EXTRA)
    with pytest.raises(OSError, match="metadata"):
        paths.publish(temporary, 20, {})
    assert paths.latest(tmp_path) == tmp_path / "step_00000010"
    assert list(paths.step_folders(tmp_path)) == [10]


def test_nothing_there_is_none(tmp_path: Path) -> None:
    assert paths.latest(tmp_path) is None
    assert paths.latest(tmp_path / "absent") is None


def test_without_the_file_latest_the_newest_complete_one_counts(tmp_path: Path) -> None:
    complete(tmp_path, 10)
    complete(tmp_path, 20)
    (tmp_path / "latest").unlink()
    (tmp_path / "step_00000030").mkdir()
    assert paths.latest(tmp_path) == tmp_path / "step_00000020"


def test_steps_are_compared_as_numbers(tmp_path: Path) -> None:
    steps = [99_999_998, 99_999_999, 100_000_000]
    for step in steps:
        complete(tmp_path, step)
    (tmp_path / "latest").unlink()
    assert [path.name for path in paths.candidates(tmp_path)] == [
        *("step_100000000", "step_99999999", "step_99999998")
    ]
    paths.point(tmp_path, "step_99999999")
    # A longer name is no reason to count among the newest up to `latest`.
    assert paths.prune(tmp_path, keep=1, keep_every=0) == [tmp_path / ".step_99999998.old"]
    paths.point(tmp_path, "step_100000000")
    old = paths.prune(tmp_path, keep=1, keep_every=0)
    assert old == [tmp_path / ".step_99999999.old"]
    assert old[0].is_dir(), "deleting takes long: whoever prunes chooses when"
    paths.delete(old)
    assert not old[0].exists()


@pytest.mark.parametrize("text", ["step_00000099", "", "../step_00000010", "/"])
def test_a_wrong_latest_is_an_error_that_lists_the_choices(tmp_path: Path, text: str) -> None:
    complete(tmp_path, 10)
    (tmp_path / "latest").write_text(text)
    with pytest.raises(CheckpointError, match=r"step_00000010.*run.fresh=true"):
        paths.latest(tmp_path)


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    (complete(tmp_path, 10) / "old").touch()
    assert not (complete(tmp_path, 10) / "old").exists()
    assert names(tmp_path) == ["latest", "step_00000010"]


@pytest.mark.parametrize(
    ("keep", "keep_every", "left"),
    [
        (0, 0, [1, 2, 3, 4, 5, 6]),
        (2, 0, [5, 6]),
        (1, 0, [6]),
        (1, 2, [2, 4, 6]),
        (9, 0, [1, 2, 3, 4, 5, 6]),
    ],
)
def test_retention_keeps_the_newest_and_the_multiples(
    tmp_path: Path, keep: int, keep_every: int, left: list[int]
) -> None:
    for step in range(1, 7):
        complete(tmp_path, step)
    paths.prune(tmp_path, keep=keep, keep_every=keep_every)
    assert list(paths.step_folders(tmp_path)) == left


def test_latest_stays_though_it_is_not_the_newest(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        complete(tmp_path, step)
    (tmp_path / "latest").write_text("step_00000002\n")
    paths.prune(tmp_path, keep=1, keep_every=0)
    assert list(paths.step_folders(tmp_path)) == [2, 3, 4]
    assert paths.latest(tmp_path) == tmp_path / "step_00000002"


def test_clean_removes_what_interrupted_saves_left(tmp_path: Path) -> None:
    complete(tmp_path, 10)
    paths.prepare(tmp_path, 20, EXTRA)
    (tmp_path / ".step_00000005.old").mkdir()
    (tmp_path / ".latest.tmp").touch()
    paths.clean(tmp_path)
    assert names(tmp_path) == ["latest", "step_00000010"]


def test_extra_is_plain_json_with_ours_apart(tmp_path: Path) -> None:
    path = complete(tmp_path, 10)
    assert paths.read_extra(path) == json.loads((path / "extra.json").read_text())
    assert paths.read_extra(path)["checkpoint"]["step"] == 10


def test_errors_name_the_folder_and_its_neighbours(tmp_path: Path) -> None:
    complete(tmp_path, 10)
    with pytest.raises(CheckpointError, match=r"no such checkpoint.*step_00000010"):
        paths.read_extra(tmp_path / "step_00000011")
    with pytest.raises(CheckpointError, match=r"not a complete checkpoint.*step_00000010"):
        paths.read_extra(tmp_path)
    (tmp_path / "step_00000010" / "extra.json").write_text("{")
    with pytest.raises(CheckpointError, match="damaged"):
        paths.read_extra(tmp_path / "step_00000010")


def test_needs_no_torch() -> None:
    code = "import sys, megatron_ext.checkpoint.paths; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_command_on_the_page_goes_back_to_an_older_checkpoint(tmp_path: Path) -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "checkpoints.md"
    (command,) = [line for line in page.read_text().splitlines() if line.startswith("echo ")]
    folder = tmp_path / "runs" / "mine" / "checkpoints"
    for step in (100, 200):
        complete(folder, step)
    subprocess.run(command, shell=True, cwd=tmp_path, check=True)
    assert paths.latest(folder) == folder / "step_00000100"
