"""A rank whose device computes wrongly without an error is named by the others."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from megatron_ext.resilience.replay import Replayed, checksum, disagreement
from tests.dist.test_resume import TINY, reproducible_rows
from tests.support.runs import Launcher

THREE = [*TINY, "train.batch_tokens=192", "train.steps=5", "checkpoint.interval=0"]


def test_a_flipped_bit_in_one_of_three_ranks_is_named_and_the_others_lose_nothing(
    launcher: Launcher, tmp_path: Path
) -> None:
    folders = [tmp_path / name for name in ("plain", "replayed", "faulty")]
    for folder, every, before in zip(
        folders, (0, 2, 2), ("", "", "tests.support.incidents:flip_bit:1"), strict=True
    ):
        words = [*THREE, f"run.dir={folder}", f"resilience.replay_interval={every}"]
        out = folder.with_suffix(".out")
        ranks = launcher.start_ranks(words, ranks=3, output=out, before=before)
        codes = [rank.wait() for rank in ranks]
        assert codes == [40 if before else 0] * 3, ranks[0].text
    plain, replayed, faulty = folders
    # Gradients, balancer, data and metrics are those of a run that never replayed.
    assert reproducible_rows(replayed) == reproducible_rows(plain)
    end = json.loads((faulty / "exit.json").read_text())
    assert (end["code"], end["step"]) == (40, 3)
    assert end["reason"].startswith("replay before step 4: rank 1 on ")
    assert "found other loss than 2 ranks of the same place" in end["reason"]
    assert "rank 0" not in end["reason"]


def row(rank: int, *sums: int, place: tuple[int, ...] = (0, 0, 0)) -> Replayed:
    return Replayed(rank, f"host{rank}", place, sums)


def test_the_first_part_that_differs_tells() -> None:
    same = [row(rank, 1, 2, 3) for rank in range(3)]
    assert disagreement(same) == ""
    for sums, part in (((9, 9, 9), "weights"), ((1, 2, 9), "gradients")):
        words = disagreement([*same, row(3, *sums)])
        assert words == f"rank 3 on host3 found other {part} than 3 ranks of the same place"


def test_of_two_ranks_both_are_named_and_other_places_are_another_matter() -> None:
    found = disagreement([row(0, 1, 2, 3), row(1, 1, 2, 4)])
    assert found == (
        "rank 0 on host0, rank 1 on host1 found different gradients; which is right is not known"
    )
    assert disagreement([row(0, 1, 2, 3), row(1, 5, 6, 7, place=(1, 0, 0))]) == ""


def test_any_flipped_bit_changes_the_checksum() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        tensor = torch.randn(33).to(dtype)
        before = int(checksum([tensor, torch.ones(2)]))
        for bit in range(8 * tensor.element_size() - 1):
            flipped = tensor.clone()
            flipped.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])[
                7
            ] ^= 1 << bit
            assert int(checksum([flipped, torch.ones(2)])) != before
    assert int(checksum([])) == 0
