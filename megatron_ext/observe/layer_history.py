"""`layers.jsonl`: what happened in every layer and expert, every so many steps.

`metrics.jsonl` has a bounded number of keys; the detail behind them goes here. One JSON object a
line:

    {"step": 100, "experts": {"layers": [1, ...], "tokens": 8192, "top_k": 16,
                              "counts": {...}, "statistics": {"moe/max_violation": [...], ...}},
     "attention": {"layers": [0, ...], "statistics": {"kda/decay_mean": [...], ...}},
     "residual": {"sublayers": [1, ...], "entropy": [...], "weights": [[...], ...], "norms": [...]}}

A part is there in the steps in which it was measured. `counts` are the exact loads [layer, expert],
packed: 92 layers of 896 experts take about 150 KB. The file is cut back on resume, as
`metrics.jsonl` is, and a line that a kill tore is passed over.
"""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_ext.observe import registry
from megatron_ext.observe.expert_load import Floats, LoadTable, round_values
from megatron_ext.observe.jsonl import JsonlFile, read_rows

FILE_NAME = "layers.jsonl"


class LayerHistory(JsonlFile):
    """Appends the detail of a step to `layers.jsonl` in the run folder.

    Args:
        folder: the run folder.
        resume_step: the step of the checkpoint that training goes on from, 0 for a new run.
    """

    def __init__(self, folder: Path, *, resume_step: int) -> None:
        super().__init__(folder / FILE_NAME, resume_step=resume_step)

    def write(self, step: int, parts: Mapping[str, Any]) -> None:
        """Append one record: `experts`, `attention`, `residual`, whichever was measured."""
        self.append(step, json.dumps({"step": step, **parts}, allow_nan=False))


def is_due(step: int, *, interval: int, total_steps: int) -> bool:
    """Whether a step is one of those written: the first, the last, and every `interval`-th.

    Depends on nothing but the step, so a resumed run writes the records of an uninterrupted one.
    0 writes none.
    """
    return interval > 0 and (step % interval == 0 or step == 1 or step == total_steps)


def read_history(folder: Path) -> list[dict[str, Any]]:
    """The whole records of a run folder, in the order of steps; empty when there are none."""
    path = folder / FILE_NAME
    return list(read_rows(path)) if path.exists() else []


def expert_record(table: LoadTable, statistics: Mapping[str, Floats]) -> dict[str, Any]:
    """The `experts` part of a record."""
    return {
        "layers": table.layers.tolist(),
        "tokens": int(table.tokens.max()),
        "top_k": table.top_k,
        "counts": pack_counts(table.counts),
        "statistics": {
            name: round_values(values)
            for name, values in statistics.items()
            # A resumed run writes the bytes of one that was not killed.
            if registry.is_reproducible(name)
        },
    }


def pack_counts(counts: NDArray[np.int64]) -> dict[str, Any]:
    """Loads [L, E] as JSON: what exceeds each layer's smallest, in as few bytes as that takes.

    The bytes of equal weight stand together, which compresses better than number after number.
    """
    low = counts.min(axis=1)
    above = counts - low[:, None]
    width = next(n for n in (1, 2, 4, 8) if int(above.max(initial=0)) < 256**n)
    planes = above.astype(f"<u{width}").reshape(-1, 1).view(np.uint8).T
    data = base64.b64encode(zlib.compress(planes.tobytes(), 9)).decode()
    return {"shape": list(counts.shape), "low": low.tolist(), "width": width, "data": data}


def unpack_counts(packed: Mapping[str, Any]) -> NDArray[np.int64]:
    """What `pack_counts` was given.

    Raises:
        ValueError: the record is damaged.
    """
    try:
        shape, width = tuple(packed["shape"]), int(packed["width"])
        data = zlib.decompress(base64.b64decode(packed["data"], validate=True))
        planes = np.frombuffer(data, dtype=np.uint8).reshape(width, -1)
        above = np.ascontiguousarray(planes.T).view(f"<u{width}").reshape(shape)
        low = np.array(packed["low"], dtype=np.int64).reshape(shape[0], 1)
        return above.astype(np.int64) + low
    except (KeyError, TypeError, ValueError, binascii.Error, zlib.error) as error:
        raise ValueError(f"{FILE_NAME}: packed counts are damaged ({error})") from error
