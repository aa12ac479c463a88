"""Attention residuals in float64: any cut into stages gives one rank's loss and every gradient.

Blocks of one layer, longer than the model, with a short last one; every sublayer a source; cuts
inside blocks, stages without layers, full recomputation, beside tensor and expert parallelism.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.support.layout_cases import FLOAT64
from tests.support.layout_compare import launch, read, worst

# Sums in another order in float64, through six layers and three backward passes; 1e-13 was seen.
EXACT = 1e-10
TRUTHS = [case for case in FLOAT64 if case.count("_") == 1]
SPLIT = [case for case in FLOAT64 if case not in TRUTHS]
FAULTS = ("float64_size1_pp2_vpp2:lost_kept_gradient", "float64_full_tp2_sp:lost_query_sum")


def ranks_of(case: str) -> int:
    """How many ranks a layout takes by its name; experts are spread over what there is."""
    sizes = [int(part[2:]) for part in case.split("_") if part[:2] in ("tp", "pp", "cp", "ep")]
    return math.prod(sizes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("float64")
    (folder / "overrides.json").write_text(json.dumps(["run.device=cpu"]))
    cases = [*TRUTHS, *SPLIT, *FAULTS]
    for ranks in sorted({ranks_of(case.partition(":")[0]) for case in cases}):
        launch(folder, [c for c in cases if ranks_of(c.partition(":")[0]) == ranks], ranks=ranks)
    return folder


def distance(folder: Path, case: str) -> float:
    """The largest relative one of loss and gradients from one rank."""
    ours: dict[str, Any] = read(folder, case)
    truth = read(folder, "_".join(case.partition(":")[0].split("_")[:2]))
    assert len(truth["gradient"]) > 100
    gradient, name = worst(ours["gradient"], truth["gradient"])
    print(f"{case}: {gradient:.1e} {name}")
    return max(gradient, abs(ours["loss"] - truth["loss"]) / truth["loss"])


@pytest.mark.parametrize("case", SPLIT)
def test_a_cut_changes_neither_loss_nor_gradients(folder: Path, case: str) -> None:
    assert distance(folder, case) <= EXACT


@pytest.mark.parametrize("case", FAULTS)
def test_a_seeded_fault_is_seen(folder: Path, case: str) -> None:
    assert not distance(folder, case) <= EXACT
