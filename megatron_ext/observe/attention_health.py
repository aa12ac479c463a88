"""How attention layers are: from the records of a measured step to a bounded number of metrics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_ext.observe.expert_load import Floats, over_layers, round_values

if TYPE_CHECKING:  # torch takes seconds, and a report does not need it
    from megatron_ext.ops.kda.health import LayerHealth

# Metric by the name in a record: what is bad at one end, and what may be bad at either.
WORST = {
    "saturated_low": "kda/saturated_low",
    "saturated_high": "kda/saturated_high",
    "tile_decay": "kda/tile_decay",
    "state_norm": "kda/state_norm",
}
SPREAD = {
    "decay_mean": "kda/decay_mean",
    "beta_mean": "kda/beta_mean",
    "output_gate_mean": "kda/output_gate_mean",
    "attention_gate_mean": "mla/gate_mean",
}
PERCENTILES = {"kda/decay_p01": 1.0, "kda/decay_p50": 50.0, "kda/decay_p99": 99.0}


def health_statistics(records: Sequence[LayerHealth]) -> dict[str, Floats]:
    """One number a layer and statistic by metric name, in the order of the records; NaN where a
    layer has none."""
    from megatron_ext.ops.kda.health import decay_percentile

    statistics = {
        metric: np.array([record.values.get(name, math.nan) for record in records])
        for name, metric in (WORST | SPREAD).items()
    }
    for metric, percent in PERCENTILES.items():
        values = [decay_percentile(record.rates, percent) for record in records]
        statistics[metric] = np.array(values)
    return {name: values for name, values in statistics.items() if not np.isnan(values).all()}


def health_metrics(
    records: Sequence[LayerHealth], statistics: dict[str, Floats]
) -> dict[str, float]:
    """The keys of a step's row: a number that does not depend on the layers."""
    from megatron_ext.ops.kda.health import decay_percentile

    layers = np.array([record.layer for record in records], dtype=np.int64)
    worst = {name: values for name, values in statistics.items() if name in WORST.values()}
    result = over_layers(layers, worst)
    for name in SPREAD.values():
        if name in statistics:
            values = statistics[name]
            # Layers have equally many tokens, heads and channels: the mean of their means is that
            # of all.
            result[name] = float(np.nanmean(values))
            result[f"{name}/min"] = float(np.nanmin(values))
            result[f"{name}/max"] = float(np.nanmax(values))
    counted = [record.rates for record in records if record.rates]
    if counted:
        together = tuple(map(sum, zip(*counted, strict=True)))
        for name, percent in PERCENTILES.items():
            result[name] = decay_percentile(together, percent)
    return result


def health_record(records: Sequence[LayerHealth], statistics: dict[str, Floats]) -> dict[str, Any]:
    """The `attention` part of a record in `layers.jsonl`."""
    return {
        "layers": [record.layer for record in records],
        "statistics": {name: round_values(values) for name, values in statistics.items()},
    }
