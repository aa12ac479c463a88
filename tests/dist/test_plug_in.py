"""The example of using our attention in another script, on one and on two ranks."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "plug_in.py"


def losses(ranks: int) -> list[float]:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(ranks), str(EXAMPLE)),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [float(loss) for loss in re.findall(r"^step \d+ loss (\S+)$", done.stdout, re.M)]


def test_plug_in_trains_the_same_on_one_and_two_ranks():
    one, two = losses(1), losses(2)
    assert len(one) == 10
    assert one[-1] < one[0] - 1.0
    # Same initial weights; float32 sums in another order, amplified by ten Adam steps.
    assert two == pytest.approx(one, rel=1e-5)


def test_plug_in_is_short_and_needs_neither_hydra_nor_our_training():
    tree = ast.parse(EXAMPLE.read_text())
    code_lines = {
        line
        for node in tree.body
        if not isinstance(node, ast.Import | ast.ImportFrom)
        and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for line in range(node.lineno, node.end_lineno + 1)
    }
    assert len(code_lines) <= 40
    modules = [node.module for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert not [name for name in modules if "hydra" in name or "megatron_ext.train" in name]
