"""No configuration makes an object: `_target_` is a key like any other that does not exist."""

from __future__ import annotations

import contextlib
import re
import shutil
from pathlib import Path

import pytest
from hydra.utils import instantiate

from megatron_ext.config.compose import CONFIGS, compose, hydra_command
from megatron_ext.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    return tmp_path / "victim"


@pytest.fixture
def configs(tmp_path: Path) -> Path:
    folder = tmp_path / "configs"
    shutil.copytree(CONFIGS, folder, ignore=shutil.ignore_patterns("local"))
    (folder / "local").mkdir()
    return folder


def test_the_trap_works_where_objects_are_made(victim: Path) -> None:
    instantiate({"_target_": "os.mkdir", "path": str(victim)})
    assert victim.exists()


@pytest.mark.parametrize(
    "text",
    [
        "# @package _global_\nmodel: {TRAP}\n",
        "# @package _global_\ncurriculum: {stages: {stage_1: {train: {TRAP}}}}\n",
        "# @package _global_\nhydra: {callbacks: {trap: {TRAP}}}\n",
        "# @package hydra\ncallbacks: {trap: {TRAP}}\n",
        "# @package hydra\nlauncher: {TRAP}\n",
    ],
)
def test_a_file_cannot(text: str, configs: Path, victim: Path) -> None:
    trap = text.replace("TRAP", f"_target_: os.mkdir, path: {victim}")
    (configs / "local" / "default.yaml").write_text(trap)
    with pytest.raises(ConfigError, match="_target_: no such key"):
        compose([], config_dir=configs)
    # Hydra's own inspection would run its callbacks. Stages it prints as they are.
    with contextlib.suppress(ConfigError):
        hydra_command(["--cfg", "job"], config_dir=configs)
    assert not victim.exists()


@pytest.mark.parametrize("key", ["model", "hydra.callbacks.trap", "curriculum.stages.a", "new"])
def test_a_command_line_cannot(key: str, victim: Path) -> None:
    words = [f"+{key}._target_=os.mkdir", f"+{key}.path={victim}"]
    # Of a stage, `group=option` is a choice of a group, and there is none of that name.
    with pytest.raises(ConfigError, match=r"_target_(\.group)?: "):
        compose(words)
    with contextlib.suppress(ConfigError):
        hydra_command(["--cfg", "job", *words])
    assert not victim.exists()


def test_no_code_of_ours_would() -> None:
    files = [*(ROOT / "megatron_ext").rglob("*.py"), *(ROOT / "launch").glob("*.py")]
    files.append(ROOT / "pretrain.py")
    found = [file for file in files if re.search(r"\binstantiate\b|_target_", file.read_text())]
    assert len(files) > 200
    assert found == []
