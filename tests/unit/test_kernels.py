"""Triton kernels run on a CPU, in Triton's interpreter, and compile for the GPUs they are for."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[1] / "kernels"
OTHERS = ("common.py", "compile_main.py")
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs the package triton"
)


@needs_triton
def test_kernels_equal_their_formulas_in_the_interpreter() -> None:
    # A process of its own: Triton reads the variable once, when it is imported.
    files = sorted(str(path) for path in KERNELS.glob("*.py") if path.name not in OTHERS)
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "--tb=short", *files],
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        cwd=KERNELS.parents[1],
        text=True,
        capture_output=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-1000:]


@needs_triton
def test_kernels_compile_for_hopper_without_spilling_registers() -> None:
    environment = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_main"],
        env=environment,
        cwd=KERNELS.parents[1],
        text=True,
        capture_output=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-1000:]
