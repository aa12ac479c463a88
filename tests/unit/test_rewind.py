"""Which checkpoint a rewind goes back to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from megatron_ext.checkpoint import paths
from megatron_ext.train.curriculum import WHOLE_RUN
from megatron_ext.train.incident import Rewind, go_back


@pytest.fixture(autouse=True, scope="module")
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def checkpoint(folder: Path, step: int, tokens: int) -> Path:
    """One from before checksums, of its small files alone."""
    path = folder / paths.step_name(step)
    path.mkdir(parents=True)
    extra = {"step": step, "tokens": tokens, paths.RESERVED: {"step": step, "format": 1}}
    (path / paths.EXTRA).write_text(json.dumps(extra))
    (path / paths.COMPLETE).write_text("{}")
    return path


def chosen(folder: Path, *, step: int, first: int) -> Path:
    read: list[Path] = []
    state: Any = SimpleNamespace(
        config=SimpleNamespace(resilience=SimpleNamespace(max_rewinds=1)),
        stage=WHOLE_RUN,
        chunks=[],
        optimizer=None,
        mesh=None,
        step=step,
        position=0,
        windows=[],
        take_over=lambda path, verified: read.append(path),
    )
    go_back(state, folder, Rewind("bad", (first, first + 100)), done=0)
    assert paths.latest(folder) == read[0]
    return read[0]


def test_the_newest_before_the_window(tmp_path: Path) -> None:
    made = {step: checkpoint(tmp_path, step, 100 * step) for step in (2, 4, 6)}
    assert chosen(tmp_path, step=7, first=450) == made[4]


def test_none_that_an_earlier_rewind_left_ahead(tmp_path: Path) -> None:
    """The data left out since then moved the position on, so by position alone it would fit."""
    made = {step: checkpoint(tmp_path, step, 100 * step) for step in (2, 4, 8)}
    assert chosen(tmp_path, step=5, first=1000) == made[4]


@pytest.mark.parametrize("text", ["{", "[]", '{"token": 4, "checkpoint": {"step": 4}}'])
def test_a_damaged_one_does_not_end_the_rewind(text: str, tmp_path: Path) -> None:
    made = {step: checkpoint(tmp_path, step, 100 * step) for step in (2, 4)}
    (made[4] / paths.EXTRA).write_text(text)
    assert chosen(tmp_path, step=7, first=500) == made[2]
