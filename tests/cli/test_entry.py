"""`pretrain.py` itself: quick, quiet, tidy, thin. Each test starts one process at most."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
ENTRY = REPOSITORY / "pretrain.py"


def run(
    *words: str, cwd: Path, rank: int = 0, launcher: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    launcher = launcher or {"RANK": str(rank), "WORLD_SIZE": str(rank + 1)}
    environment = {**os.environ, **launcher}
    command = [sys.executable, str(ENTRY), *words]
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_the_entry_point_stays_thin() -> None:
    text = ENTRY.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 80
    assert 'if __name__ == "__main__":' in text


def test_a_wrong_command_line_is_answered_without_torch_and_writes_nothing(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv.pop(1)); import pretrain\n"
        "code = pretrain.main(['train.stepz=1', 'parallel.tensor=3'])\n"
        "heavy = {'torch', 'megatron', 'numpy', 'fla'} & set(sys.modules)\n"
        "sys.exit(code if not heavy else 1)\n"
    )
    command = [sys.executable, "-c", code, str(REPOSITORY)]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 20, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("2 problems in the configuration:\n  1. train.stepz: no such key")
    assert "\n  2. parallel.tensor=3: must divide" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_only_the_first_rank_reports(tmp_path: Path) -> None:
    done = run("train.stepz=1", cwd=tmp_path, rank=1)
    assert (done.returncode, done.stdout, done.stderr) == (20, "", "")


def test_the_ranks_that_srun_starts_are_counted(tmp_path: Path) -> None:
    launcher = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}
    launcher |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    done = run("parallel.tensor=4", cwd=tmp_path, launcher=launcher)
    assert done.returncode == 20
    assert "ranks=2: must be a multiple of tensor 4" in done.stderr


def test_help(tmp_path: Path) -> None:
    done = run("--help", cwd=tmp_path)
    assert done.returncode == 0
    assert "experiment=NAME, or +experiment=NAME" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 120


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--cfg", "job", "+experiment=gated_hybrid"], "attention: gated"),
        (["--info", "defaults", "model=mini"], "model/mini"),
    ],
)
def test_hydras_inspection_prints_and_writes_nothing(
    words: list[str], expected: str, tmp_path: Path
) -> None:
    done = run(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_inspection_reports_mistakes_as_a_run_does(tmp_path: Path) -> None:
    done = run("--cfg", "job", "train.stepz=1", cwd=tmp_path)
    assert done.returncode == 20
    assert "did you mean train.steps?" in done.stderr


def test_a_sweep_checks_every_job_before_the_first_starts(tmp_path: Path) -> None:
    done = run("-m", "parallel.tensor=1,3", cwd=tmp_path)
    assert done.returncode == 20
    assert "parallel.tensor=3: must divide" in done.stderr
    assert list(tmp_path.iterdir()) == []
