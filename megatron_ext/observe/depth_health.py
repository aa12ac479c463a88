"""Attention residuals: from the mixes of a measured step to a bounded number of metrics.

Shapes: M mixes, N sources of the one that reads most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_ext.observe.expert_load import Floats, round_values

if TYPE_CHECKING:  # torch takes seconds, and a report does not need it
    from megatron_ext.ops.attn_res.health import MixHealth


def depth_metrics(mixes: Sequence[MixHealth]) -> dict[str, float]:
    """The keys of a step's row; as many for a model of any depth."""
    last = mixes[-1]
    spreads = {
        "residual/entropy": [mix.entropy for mix in mixes],
        "residual/embedding_weight": [mix.weights[0] for mix in mixes],
        "residual/running_weight": [mix.weights[-1] for mix in mixes],
        # The mix after the last layer reads every source of the model.
        "residual/source_norm": last.norms,
    }
    found = {"residual/output_weight": last.weights[-1]}
    for name, values in spreads.items():
        found[name] = float(np.mean(values))
        found[f"{name}/min"] = float(np.min(values))
        found[f"{name}/max"] = float(np.max(values))
    return found


def depth_record(mixes: Sequence[MixHealth]) -> dict[str, Any]:
    """The `residual` part of a record in `layers.jsonl`.

    `weights` has a list a mix, shorter for early ones; `norms` those of all sources at the end.
    """
    return {
        "sublayers": [mix.sublayer for mix in mixes],
        "entropy": round_values([mix.entropy for mix in mixes]),
        "weights": [round_values(mix.weights) for mix in mixes],
        "norms": round_values(mixes[-1].norms),
    }


def weight_matrix(record: Mapping[str, Any]) -> Floats:
    """The weights of a `residual` part, [M, N]; NaN where a mix has no such source.

    Raises:
        ValueError: the lists of the record do not fit each other.
    """
    rows, sublayers = record["weights"], record["sublayers"]
    widest = len(record["norms"])
    if not len(rows) == len(sublayers) == len(record["entropy"]):
        raise ValueError(f"residual: {len(sublayers)} sublayers, {len(rows)} rows of weights")
    if not rows or max(map(len, rows)) != widest:
        raise ValueError(f"residual: rows of weights of {sorted(map(len, rows))}, {widest} norms")
    matrix = np.full((len(rows), widest), np.nan)
    for place, row in enumerate(rows):
        matrix[place, : len(row)] = [np.nan if value is None else value for value in row]
    return matrix


def sublayer_name(sublayer: int, *, last: int) -> str:
    """`3a` is the attention of layer 3, `3f` its feed-forward; `out` the mix after the last."""
    return "out" if sublayer == last else f"{sublayer // 2}{'af'[sublayer % 2]}"
