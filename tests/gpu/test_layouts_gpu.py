"""Layouts on NCCL train the model that one rank trains; see `tests/dist/test_layouts.py`.

Ranks beyond the number of GPUs share them: this shows correctness, and nothing about speed.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.layout_cases import SPLIT, truth_of
from tests.support.layout_compare import compare, compare_faulty, is_equal, launch, read, table

# The first test of each folder waits for its launches: a quarter of a minute a case.
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
ONE = ("one", "one_block")
TWO = ("ep2", "tp2_sp", "cp2", "pp2_vpp2_block")
FOUR = ("tp2_sp_cp2",)
# All at once, saved in eight ranks and taken up again by four and by one; 896 experts in two.
EVERYTHING = {
    "one_everything": 1,
    SPLIT: 8,
    "tp2_sp_dp2_ep2_everything_resumed": 4,
    "one_everything_resumed": 1,
    "one_many": 1,
    "ep2_many": 2,
}
FAULT = "cp2:lost_state"
# A rank that waits in vain ends within minutes, and the others with it.
CUDA = ["run.device=cuda", "run.timeout_seconds=180"]
EXACT = [*CUDA, "model.kda.backend=dense", "residual.backend=dense"]

# What a bf16 run on a GPU uses; nothing may fall back. fla is made for heads of 64 or more.
FAST = [
    *CUDA,
    "run.precision=bf16",
    "model.kda.head_dim=64",
    "model.kda.value_dim=64",
    "model.kda.require=true",
    "model.experts.require=true",
    "model.kernels.require=true",
    "residual.require=true",
]
# Of the first step, from equal weights: sums of bfloat16 numbers in another order.
FAST_LOSS, FAST_NORM = 1e-3, 3e-2


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exact")
    (folder / "overrides.json").write_text(json.dumps(EXACT))
    launch(folder, ONE, ranks=1, on_gpu=True)
    launch(folder, (*TWO, FAULT), ranks=2, on_gpu=True)
    launch(folder, FOUR, ranks=4, on_gpu=True)
    return folder


def test_layouts_equal_one_rank_in_float32(
    exact: Path, record_property: Callable[[str, object], None]
) -> None:
    rows = {case: compare(exact, case) for case in (*TWO, *FOUR)}
    record_property("table", table(rows))
    different = {case: row for case, row in rows.items() if not is_equal(row)}
    assert not different, "\n" + table(different)


def test_a_seeded_fault_is_seen(exact: Path) -> None:
    row = compare(exact, "cp2") | compare_faulty(exact, FAULT)
    assert not is_equal(row), table({FAULT: row})


def test_everything_at_once_equals_one_rank(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    (tmp_path / "overrides.json").write_text(json.dumps(EXACT))
    for case, ranks in EVERYTHING.items():
        launch(tmp_path, [case], ranks=ranks, on_gpu=True)
    rows = {case: compare(tmp_path, case) for case in EVERYTHING if case != truth_of(case)}
    record_property("table", table(rows))
    different = {case: row for case, row in rows.items() if not is_equal(row)}
    assert not different, "\n" + table(different)


@pytest.mark.skipif(importlib.util.find_spec("fla") is None, reason="needs the package fla-core")
def test_the_first_step_of_fast_kernels_follows_one_rank(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    (tmp_path / "overrides.json").write_text(json.dumps(FAST))
    launch(tmp_path, ONE, ranks=1, on_gpu=True)
    launch(tmp_path, TWO, ranks=2, on_gpu=True)
    rows = {}
    for case in TWO:
        ours, truth = read(tmp_path, case), read(tmp_path, truth_of(case))
        rows[case] = tuple(
            abs(ours[key][0] - truth[key][0]) / truth[key][0] for key in ("loss", "grad_norm")
        )
    lines = [f"{case:<20}{a:9.1e}{b:9.1e}" for case, (a, b) in rows.items()]
    record_property("table", "\n".join(["bf16, first step: loss, norm of the gradient", *lines]))
    for case, (loss, norm) in rows.items():
        assert loss <= FAST_LOSS, case
        assert norm <= FAST_NORM, case
