"""Launch settings of our Triton kernels: chosen once, committed, read from a table.

Triton's autotuner compiles every candidate at the first call of every process: seconds to minutes
before the first step, and another choice on another rank. `bench/launch_settings.py` times the
candidates and writes the table. Those of `qkv_conv` were timed so on an H200, the others are
estimates.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from torch import Tensor

TABLE = Path(__file__).parent / "launch.json"


@cache
def launch_settings(kernel: str, size: int) -> dict[str, int]:
    """Keyword arguments of a launch.

    Args:
        kernel: name in the table.
        size: width of a row. The table has entries for sizes up to a limit, in rising order, and
            a last one without a limit.
    """
    for entry in read_table()[kernel]:
        limit = entry["up_to"]
        if limit is None or size <= limit:
            return {name: value for name, value in entry.items() if name != "up_to"}
    raise KeyError(f"{TABLE.name}: {kernel} has no entry without a limit")


def read_table() -> dict[str, list[dict[str, int]]]:
    """Every kernel's entries."""
    table: dict[str, list[dict[str, int]]] = json.loads(TABLE.read_text())
    return table


def rows_of(x: Tensor) -> Tensor:
    """x [..., D] as [rows, D] with neighbours in memory along D: a view where there is one."""
    rows = x.unsqueeze(0) if x.dim() == 1 else x.flatten(0, -2)
    return rows if rows.stride(-1) == 1 else rows.contiguous()
