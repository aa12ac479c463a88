"""A run that is killed at any moment and relaunched by the same command is the run that was not.

Every column of `metrics.jsonl` except times, what follows from them, and memory is byte-identical,
and so is every tensor of the last checkpoint.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from megatron_ext.observe.registry import is_reproducible
from tests.support import wandb_offline
from tests.support.runs import Launcher, Run, kill_tree, torchrun

STEPS = 6
# Two layers, one of each kind; saves after steps 2 and 4 go on in the background.
TINY = [
    "data=sample",
    "run.device=cpu",
    "data.sequence_length=32",
    "train.batch_tokens=256",
    "train.micro_batch_size=2",
    "model.num_layers=2",
    "model.full_attention_interval=2",
    "model.hidden_size=32",
    "model.feed_forward_size=64",
    "evaluate.tokens=128",
    "evaluate.interval_tokens=512",
    "checkpoint.interval=2",
    "optim.schedule=constant",
]
COMMAND = [*TINY, f"train.steps={STEPS}"]
# Another layout sums float32 in another order, over two steps of training.
OTHER_LAYOUT = 1e-5


@pytest.fixture(scope="module")
def uninterrupted(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    run = launch(launcher, [*COMMAND, f"run.dir={folder}"])
    assert run.wait() == 0, run.text
    return folder


def launch(launcher: Launcher, words: list[str]) -> Run:
    (folder,) = (Path(word.removeprefix("run.dir=")) for word in words if "run.dir=" in word)
    return launcher.start(words, output=folder.with_suffix(".out"))


def reproducible_rows(folder: Path) -> list[str]:
    """The lines of `metrics.jsonl` as text, without the columns that may differ."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    # Cut out of the text, not parsed and printed again: bytes are what is compared.
    cut = re.compile(r'"([^"]+)": ([^,}]+)(, |(?=}))')
    return [
        cut.sub(lambda match: match[0] if is_reproducible(match[1]) else "", line) for line in lines
    ]


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the last checkpoint, by logical name: weights and Adam's moments."""
    assert (folder / "checkpoints" / "latest").read_text() == f"step_{STEPS:08d}\n"
    return tensors_of(folder)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """As `tensors`, whatever the last step."""
    name = (folder / "checkpoints" / "latest").read_text().strip()
    whole = folder.parent / "whole.pt"
    dcp_to_torch_save(folder / "checkpoints" / name, whole)
    content = torch.load(whole, weights_only=False)
    return flatten(content, "")


def flatten(content: Any, prefix: str) -> dict[str, torch.Tensor]:
    if isinstance(content, torch.Tensor):
        return {prefix: content}
    if not isinstance(content, dict):
        return {}
    return {
        key: value
        for name, part in content.items()
        for key, value in flatten(part, f"{prefix}/{name}").items()
    }


def assert_same_run(folder: Path, reference: Path) -> None:
    assert reproducible_rows(folder) == reproducible_rows(reference)
    ours, theirs = tensors(folder), tensors(reference)
    assert ours.keys() == theirs.keys()
    assert sum("exp_avg_sq" in name for name in ours) > 10
    different = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert different == []


def row_count(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.parametrize("seed", [0, 1])
def test_a_killed_and_relaunched_run_is_the_uninterrupted_one(
    seed: int, launcher: Launcher, uninterrupted: Path, tmp_path: Path
) -> None:
    """Kills at random: somewhere in the first steps, in the middle of a save, anywhere else."""
    chance, folder = random.Random(seed), tmp_path / "run"
    words = [*COMMAND, f"run.dir={folder}"]

    def kill(moment: str) -> int:
        run, wanted = launch(launcher, words), row_count(folder) + chance.randint(0, 2)

        def reached() -> bool:
            if moment == "save":
                return any(folder.glob(f"checkpoints/.step_*.{run.pid}.tmp"))
            return row_count(folder) >= wanted

        code = run.kill_when(
            reached, after=chance.uniform(0, 0.1), whole_group=chance.random() < 0.5
        )
        assert code in (-9, 0), run.text  # a kill may come a moment too late
        assert not (folder / "exit.json").exists() or code == 0
        return code

    codes = [kill(moment) for moment in ("anywhere", "save", "anywhere")]
    assert codes[:2] == [-9, -9]
    last = launch(launcher, words)
    assert last.wait() == 0, last.text
    assert json.loads((folder / "exit.json").read_text())["step"] == STEPS
    assert not list(folder.glob("checkpoints/.step_*.tmp"))
    assert_same_run(folder, uninterrupted)


def test_the_comparison_sees_a_small_difference(
    launcher: Launcher, uninterrupted: Path, tmp_path: Path
) -> None:
    """Negative control: the last two steps with a slightly different optimizer."""
    folder = tmp_path / "run"
    shutil.copytree(uninterrupted, folder)
    (folder / "checkpoints" / "latest").write_text("step_00000004\n")
    run = launch(launcher, [*COMMAND, f"run.dir={folder}", "optim.beta2=0.9501"])
    assert run.wait() == 0, run.text
    ours, theirs = reproducible_rows(folder), reproducible_rows(uninterrupted)
    assert ours[:4] == theirs[:4]
    assert ours[-1] != theirs[-1]
    with pytest.raises(AssertionError):
        assert_same_run(folder, uninterrupted)


def wait_for(process: subprocess.Popen[bytes], output: Path) -> None:
    assert process.wait(timeout=300) == 0, output.read_text()


def test_two_ranks_killed_and_relaunched_are_two_ranks_uninterrupted(tmp_path: Path) -> None:
    """Data parallel, with sharded optimizer state; the whole tree of processes is killed."""
    folders = [tmp_path / "whole" / "run", tmp_path / "killed" / "run"]
    whole, killed = folders
    output = tmp_path / "out"
    for folder in folders:
        folder.parent.mkdir()
    wait_for(torchrun([*COMMAND, f"run.dir={whole}"], ranks=2, output=output), output)
    process = torchrun([*COMMAND, f"run.dir={killed}"], ranks=2, output=output)
    # After the first checkpoint, so that the relaunch has something to load.
    while not (killed / "checkpoints" / "latest").exists():
        assert process.poll() is None, output.read_text()
        time.sleep(0.01)
    kill_tree(process)
    assert not (killed / "exit.json").exists()
    wait_for(torchrun([*COMMAND, f"run.dir={killed}"], ranks=2, output=output), output)
    assert "resumes after step" in output.read_text()
    assert_same_run(killed, whole)


def test_a_run_of_one_rank_goes_on_with_tensor_parallelism(
    uninterrupted: Path, tmp_path: Path
) -> None:
    folder, output = tmp_path / "run", tmp_path / "out"
    shutil.copytree(uninterrupted, folder)
    (folder / "checkpoints" / "latest").write_text("step_00000004\n")
    words = [*COMMAND, f"run.dir={folder}", "parallel.tensor=2"]
    wait_for(torchrun(words, ranks=2, output=output), output)
    assert "resumes after step 4" in output.read_text()
    expected, found = rows(uninterrupted), rows(folder)
    assert [row["step"] for row in found] == list(range(1, STEPS + 1))
    for mine, theirs in zip(found[4:], expected[4:], strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=OTHER_LAYOUT)
        assert mine["tokens"] == theirs["tokens"]
    assert found[-1]["eval/loss"] == pytest.approx(expected[-1]["eval/loss"], rel=OTHER_LAYOUT)


def test_a_finished_run_says_the_two_ways_on_and_both_work(
    launcher: Launcher, uninterrupted: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(uninterrupted, folder)
    words = [*COMMAND, f"run.dir={folder}"]
    before = (folder / "metrics.jsonl").read_bytes()
    run = launch(launcher, words)
    assert run.wait() == 0
    ways = re.findall(r"python pretrain.py (.*?)(?: {2,}\(.*)?$", run.text, re.MULTILINE)
    assert len(ways) == 2, run.text
    assert (folder / "metrics.jsonl").read_bytes() == before
    assert json.loads((folder / "exit.json").read_text())["code"] == 0

    longer = launch(launcher, ways[0].split())
    assert longer.wait() == 0, longer.text
    assert [row["step"] for row in rows(folder)] == list(range(1, STEPS + STEPS // 2 + 1))
    assert (folder / "metrics.jsonl").read_bytes().startswith(before)

    anew = launch(launcher, ways[1].split())
    assert anew.wait() == 0, anew.text
    assert reproducible_rows(folder) == reproducible_rows(uninterrupted)
    assert len(rows(tmp_path / "run.1")) == STEPS + STEPS // 2
    ids = [json.loads((path / "run.json").read_text())["run_id"] for path in sorted_runs(tmp_path)]
    assert len(set(ids)) == 2


def test_another_model_of_the_same_shapes_is_refused_and_the_end_is_on_record(
    launcher: Launcher, uninterrupted: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(uninterrupted, folder)
    words = [*TINY, f"train.steps={STEPS + 2}", f"run.dir={folder}", "model.kda.lower_bound=-2"]
    run = launch(launcher, words)
    assert run.wait() == 20, run.text
    assert "model.kda.lower_bound: was -5.0, is -2.0" in run.text
    # Not the exit code of the launch before.
    assert json.loads((folder / "exit.json").read_text())["code"] == 20


def sorted_runs(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir())


def test_evaluation_and_generation_read_the_run(
    launcher: Launcher, uninterrupted: Path, tmp_path: Path
) -> None:
    words = [*COMMAND, f"run.dir={uninterrupted}"]
    evaluation = launcher.start([*words, "run.mode=evaluate"], output=tmp_path / "evaluate.out")
    assert evaluation.wait() == 0, evaluation.text
    assert f"loss {rows(uninterrupted)[-1]['eval/loss']:.4f}" in evaluation.text
    more = ["run.mode=generate", "generate.prompt='def '", "generate.max_new_tokens=8"]
    generation = launcher.start([*words, *more], output=tmp_path / "generate.out")
    assert generation.wait() == 0, generation.text
    assert "def " in generation.text


def test_wandb_keeps_one_run_over_a_relaunch(launcher: Launcher, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = [*TINY, f"run.dir={folder}", "logging.wandb=offline", "checkpoint.asynchronous=false"]
    for steps in (2, 4):
        run = launch(launcher, [*words, f"train.steps={steps}"])
        assert run.wait() == 0, run.text
    launches = [wandb_offline.read(path) for path in sorted(folder.glob("wandb/offline-run-*"))]
    expected = json.loads((folder / "run.json").read_text())["run_id"]
    assert [launch["run_id"] for launch in launches] == [expected, expected]
    assert [[row["_step"] for row in launch["history"]] for launch in launches] == [[1, 2], [3, 4]]
    assert [launch["exit_code"] for launch in launches] == [0, 0]
    losses = [row["loss"] for launch in launches for row in launch["history"]]
    assert losses == [row["loss"] for row in rows(folder)]


def test_a_loss_that_is_not_finite_halts_the_run(launcher: Launcher, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = [*COMMAND, f"run.dir={folder}", "optim.lr=1e30", "checkpoint.interval=1"]
    run = launch(launcher, [*words, "checkpoint.asynchronous=false"])
    assert run.wait() == 40, run.text
    end = json.loads((folder / "exit.json").read_text())
    assert end["code"] == 40
    assert f"step {end['step'] + 1}" in end["reason"]
    assert len(rows(folder)) == end["step"]
    saved = [path.name for path in sorted((folder / "checkpoints").glob("step_*"))]
    assert saved == [f"step_{step:08d}" for step in range(1, end["step"] + 1)]
