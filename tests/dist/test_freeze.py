"""A stage that trains a part of the model: the rest keeps weights and moments, bit for bit, though
the moments lie in the checkpoints only.

The walk is 2 steps of all parameters, 2 of a part, 2 of all. On two ranks the second stage is a
pipeline whose first half has nothing to train.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from megatron_ext.config.trainable import Trainable
from tests.dist.test_curriculum import BATCH, COMMAND, assert_same_walk, ending, rows
from tests.support.runs import Launcher, Run

MIDDLE = "curriculum.stages.stage_256"
WORDS = [
    *(word for word in COMMAND if not word.startswith("model.")),
    # KDA, KDA, MLA
    "model.num_layers=3",
    "model.full_attention_interval=3",
    "model.hidden_size=32",
    "model.feed_forward_size=64",
    "~curriculum.stages.stage_4k",
    "checkpoint.keep=0",
    "optim.eps=1e-5",  # rounding of gradients near epsilon is amplified at 1e-8
    f"{MIDDLE}.train.trainable=[position,head,'*.mlp.experts.fc?']",
    f"{MIDDLE}.train.frozen_layers=1",
]
RULE = Trainable(("position", "head", "*.mlp.experts.fc?"), 1)
MOMENTS = ("optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq.")
OTHER_LAYOUT = 1e-4  # float32 in another order, over 6 steps


@pytest.fixture(scope="module")
def walked(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("walked") / "run"
    run = launch(launcher, folder)
    assert run.wait() == 0, run.text
    return folder


def launch(launcher: Launcher, folder: Path, *more: str) -> Run:
    words = [*WORDS, f"run.dir={folder}", *more]
    return launcher.start(words, output=folder.with_suffix(".out"))


def stored(folder: Path, step: int) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, by name."""
    path, whole = folder / "checkpoints" / f"step_{step:08d}", folder / "whole.pt"
    dcp_to_torch_save(path, whole)
    content = torch.load(whole, weights_only=False)
    return {name: value for name, value in content.items() if isinstance(value, Tensor)}


def history(folder: Path, step: int) -> list[dict[str, Any]]:
    path = folder / "checkpoints" / f"step_{step:08d}" / "extra.json"
    found: list[dict[str, Any]] = json.loads(path.read_text())["checkpoint"]["history"]
    return found


def parameters(tensors: dict[str, Tensor]) -> list[str]:
    return [name.removeprefix(MOMENTS[0]) for name in tensors if name.startswith(MOMENTS[0])]


def rewound(folder: Path, copy: Path, *, step: int) -> Path:
    """A copy of a run as it was after a step."""
    shutil.copytree(folder, copy)
    (copy / "checkpoints" / "latest").write_text(f"step_{step:08d}\n")
    return copy


def test_frozen_weights_and_moments_stay_bit_for_bit(walked: Path) -> None:
    before, after = stored(walked, 2), stored(walked, 4)
    assert before.keys() == after.keys()
    names = parameters(before)
    frozen = [name for name in names if not RULE.trains(name)]
    assert 20 < len(frozen) < len(names) - 8
    for name in names:
        for key in (name, *(what + name for what in MOMENTS)):
            assert before[key].equal(after[key]) == (name in frozen), key
    assert [part["updates"] for part in history(walked, 6)] == [2, 2, 2]
    text = walked.with_suffix(".out").read_text()
    assert f"frozen: {len(frozen)} tensors" in text


def test_moments_are_restored_or_begin_anew(
    launcher: Launcher, walked: Path, tmp_path: Path
) -> None:
    reset = rewound(walked, tmp_path / "run", step=4)
    run = launch(launcher, reset, "curriculum.on_unfreeze=reset")
    assert run.wait() == 0, run.text
    assert rows(reset)[4]["grad_norm"] == rows(walked)[4]["grad_norm"]  # the same gradients
    kept, anew, old = stored(walked, 5), stored(reset, 5), stored(walked, 4)
    # After one step the two differ by what was there before, times its decay.
    for what, decay in zip(MOMENTS, (0.9, 0.95), strict=True):
        for name in parameters(old):
            left = kept[what + name] - anew[what + name]
            if RULE.trains(name):
                assert left.abs().max() == 0, name
            else:
                torch.testing.assert_close(left, decay * old[what + name], rtol=1e-5, atol=1e-7)
    # The bias correction of each counts its own updates: with zeros the first step is of size lr.
    lr = rows(reset)[4]["lr"]
    frozen = [n for n in parameters(old) if not RULE.trains(n) and old[n].dim() == 1]
    steps = torch.cat([(anew[n] - old[n]).flatten() for n in frozen]).abs()
    assert steps.max() == pytest.approx(lr, rel=1e-2)
    assert [part["reset"] for part in history(reset, 6)] == [False, False, True]


def test_a_run_stopped_in_a_frozen_stage_is_the_uninterrupted_one(
    launcher: Launcher, walked: Path, tmp_path: Path
) -> None:
    """What is carried is covered by checksums too, and lies in the one checkpoint that is left."""
    folder = rewound(walked, tmp_path / "run", step=4)
    for step in (1, 2, 5, 6):
        shutil.rmtree(folder / "checkpoints" / f"step_{step:08d}")
    (carried,) = (folder / "checkpoints" / "step_00000004").glob("carried_*")
    content = bytearray(carried.read_bytes())
    content[len(content) // 2] ^= 1
    carried.write_bytes(content)
    run = launch(launcher, folder, "checkpoint.keep=1")
    assert run.wait() == 0, run.text
    assert f"{carried}: expected" in run.text
    assert "resumes after step 3" in run.text
    assert_same_walk(folder, walked, last=6)


def test_another_layout_in_every_stage_is_one_rank(
    launcher: Launcher, walked: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    layouts = [
        f"{MIDDLE}.parallel.pipeline=2",
        f"{MIDDLE}.parallel.stage_layers=[1,2]",
        f"{MIDDLE}.train.recompute=full",
        "curriculum.stages.stage_1k.parallel.tensor=2",
    ]
    for reason in ("next_stage", "next_stage", "all steps are done"):
        ranks = launcher.start_ranks(
            [*WORDS, *layouts, f"run.dir={folder}"], ranks=2, output=folder.with_suffix(".out")
        )
        assert len({rank.wait() for rank in ranks}) == 1
        assert ending(folder)["reason"] == reason, ranks[0].text
    for mine, theirs in zip(rows(folder), rows(walked), strict=True):
        assert mine["tokens"] == theirs["tokens"] == mine["step"] * BATCH
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=OTHER_LAYOUT)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=OTHER_LAYOUT)
    begin, end = stored(folder, 2), stored(folder, 4)
    for name in parameters(begin):
        for key in (name, *(what + name for what in MOMENTS)):
            assert begin[key].equal(end[key]) == (not RULE.trains(name)), key
    first, last = stored(walked, 1), stored(walked, 6)
    ours = stored(folder, 6)
    far = _distances(parameters(last), lambda n: ours[n] - first[n], lambda n: last[n] - first[n])
    assert max(far.values()) < 10 * OTHER_LAYOUT, max(far.items(), key=lambda item: item[1])


def _distances(
    names: list[str], ours: Callable[[str], Tensor], truth: Callable[[str], Tensor]
) -> dict[str, float]:
    """Relative L2 distance of each tensor."""
    return {n: float((ours(n) - truth(n)).norm() / truth(n).norm()) for n in names}
