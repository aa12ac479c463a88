"""The examples of using our layers in another script, on one and on two ranks."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = ("plug_in.py", "plug_in_router.py")


def printed(example: str, *, ranks: int) -> list[list[float]]:
    """The numbers of each step: its loss, and for the router the load of the busiest expert."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(ranks), str(EXAMPLES / example)),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = re.findall(r"^step \d+ (loss .+)$", done.stdout, re.M)
    return [[float(word) for word in line.split()[1::2]] for line in lines]


@pytest.mark.parametrize("example", NAMES)
def test_plug_in_trains_the_same_on_one_and_two_ranks(example: str) -> None:
    one, two = printed(example, ranks=1), printed(example, ranks=2)
    assert len(one) == 10
    assert one[-1][0] < one[0][0] - 1.0
    assert one[-1][-1] < one[0][-1], (
        "the loss falls, and where there are experts, the busiest's load"
    )
    for ours, truth in zip(two, one, strict=True):
        # Same initial weights; float32 sums in another order, amplified by ten Adam steps.
        assert ours == pytest.approx(truth, rel=1e-5)


@pytest.mark.parametrize("example", NAMES)
def test_plug_in_is_short_and_needs_neither_hydra_nor_our_training(example: str) -> None:
    tree = ast.parse((EXAMPLES / example).read_text())
    code_lines = {
        line
        for node in tree.body
        if not isinstance(node, ast.Import | ast.ImportFrom)
        and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for line in range(node.lineno, node.end_lineno + 1)
    }
    assert len(code_lines) <= 60
    modules = [node.module for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert not [name for name in modules if "hydra" in name or "megatron_ext.train" in name]
