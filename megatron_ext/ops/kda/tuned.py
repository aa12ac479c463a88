"""Kernel variants of fla that were chosen before, so that no run spends minutes on choosing.

`python -m megatron_ext.ops.kda.tune` writes one folder a kind of GPU. A GPU without one is tuned by
fla at the first call of each shape, as always.
"""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent / "fla_configs"


def folder(gpu: str) -> Path:
    """Where the choices for a GPU lie, by torch's name for it. It need not exist."""
    return HERE / re.sub(r"[^0-9A-Za-z]+", "_", gpu).strip("_")


def variables(gpu: str) -> dict[str, str]:
    """Environment variables that make fla take the choices; to be set before it is imported.

    An exact shape is taken first, then one that differs in numbers only (more tokens, fewer heads).
    Empty for a GPU that was never tuned.
    """
    place = folder(gpu)
    return {"FLA_CONFIG_DIR": str(place), "FLA_CACHE_MODE": "fuzzy"} if place.is_dir() else {}
