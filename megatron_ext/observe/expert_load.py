"""How evenly experts are used: from the loads of a step to a bounded number of metrics.

Shapes: L expert layers, E experts, k experts a token. All of it is arithmetic on the counts of the
global batch, so it is the same in every layout (`moe/rank_load` alone asks for the layout).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megatron_ext.observe.metric_table import TOP_LAYERS

if TYPE_CHECKING:  # torch takes seconds, and a report of a finished run does not need it
    from torch import Tensor

    from megatron_ext.ops.quantile.load import LayerLoad

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

# Where small values are the bad ones.
_SMALLEST_IS_WORST = ("moe/load_entropy",)


@dataclass(frozen=True)
class LoadTable:
    """The loads of all expert layers in one step, on the host, in the order of the layers.

    Attributes:
        layers: int64 [L], 0-based numbers.
        top_k: experts a token.
        tokens: int64 [L], valid tokens of the global batch.
        counts: int64 [L, E], tokens that each expert was given.
        bias: float64 [L, E], in use during the step.
        new_bias: float64 [L, E].
        predicted: float64 [L, E], loads that the new bias would have given; NaN where the rule
            makes no such promise.
        out_of_range: int64 [L], margins outside the histogram.
        dropped: int64 [L], slots that no expert took.
    """

    layers: Integers
    top_k: int
    tokens: Integers
    counts: Integers
    bias: Floats
    new_bias: Floats
    predicted: Floats
    out_of_range: Integers
    dropped: Integers

    @classmethod
    def gather(cls, loads: Sequence[LayerLoad]) -> LoadTable:
        """Fetch the records of a step (at least one) from their device, in one copy."""
        from megatron_ext.ops.quantile.load import to_host

        loads = sorted(to_host(loads), key=lambda load: load.layer)
        unknown = np.full(loads[0].counts.shape, math.nan)

        def stack(tensors: Iterable[Tensor]) -> Floats:
            return np.stack([tensor.double().numpy() for tensor in tensors])

        def stack_integers(tensors: Iterable[Tensor]) -> Integers:
            return np.stack([tensor.long().numpy() for tensor in tensors])

        return cls(
            layers=np.array([load.layer for load in loads], dtype=np.int64),
            top_k=loads[0].top_k,
            tokens=stack_integers(load.tokens for load in loads),
            counts=stack_integers(load.counts for load in loads),
            bias=stack(load.bias for load in loads),
            new_bias=stack(load.new_bias for load in loads),
            predicted=np.stack(
                [
                    unknown if load.predicted is None else load.predicted.double().numpy()
                    for load in loads
                ]
            ),
            out_of_range=stack_integers(load.out_of_range for load in loads),
            dropped=stack_integers(load.dropped for load in loads),
        )


def violation_floor(*, tokens: int, top_k: int, num_experts: int) -> float:
    """Largest violation expected from chance alone: sqrt(2 ln E / (tokens * k / E)).

    The load of an expert that each token picks with probability k/E has mean m = tokens * k / E and
    a standard deviation near sqrt(m); the largest of E normal numbers is near sqrt(2 ln E) standard
    deviations.
    """
    mean = tokens * top_k / num_experts
    return math.sqrt(2 * math.log(num_experts) / mean) if mean else math.nan


def relative_load(counts: NDArray[np.generic]) -> Floats:
    """Load of each expert over the mean of its layer, [L, E]; NaN for a layer without tokens."""
    wide = counts.astype(np.float64)
    with np.errstate(invalid="ignore"):
        return wide / wide.mean(axis=1, keepdims=True)


def layer_statistics(
    table: LoadTable, *, expert_parallel: int, expected: Floats | None = None
) -> dict[str, Floats]:
    """One number a layer and statistic, [L], by metric name; NaN where there is none.

    Args:
        table: one step.
        expert_parallel: ranks over which the experts of a layer are spread, each with E / ranks in
            a row.
        expected: [L, E], what the step before predicted; None when that is not known.
    """
    layers, num_experts = table.counts.shape
    load = relative_load(table.counts)
    share = load / num_experts
    with np.errstate(divide="ignore", invalid="ignore"):
        # 0 ln 0 = 0
        bits = np.where(share > 0, share * np.log(np.where(share > 0, share, 1.0)), 0.0 * share)
        entropy = -bits.sum(axis=1) / math.log(num_experts) if num_experts > 1 else np.ones(layers)
        slots = table.tokens * float(table.top_k)
        dropped = table.dropped / slots
        outside = table.out_of_range / (table.tokens * float(num_experts))
    ranks = table.counts.reshape(layers, expert_parallel, -1).sum(axis=2)
    statistics = {
        "moe/max_violation": load.max(axis=1) - 1,
        "moe/load_cv": load.std(axis=1),
        "moe/load_entropy": entropy,
        "moe/dead_fraction": (table.counts == 0).mean(axis=1),
        "moe/max_share": share.max(axis=1),
        "moe/rank_load": relative_load(ranks).max(axis=1),
        "moe/dropped": dropped,
        "balance/bias_range": table.bias.max(axis=1) - table.bias.min(axis=1),
        "balance/bias_change": np.abs(table.new_bias - table.bias).max(axis=1),
        "balance/out_of_range": outside,
        # Of equal loads the mean is rounded.
        "balance/predicted_violation": (relative_load(table.predicted).max(axis=1) - 1).round(12),
    }
    if expected is not None:
        error = np.abs(load - relative_load(expected)).max(axis=1)
        statistics["balance/prediction_error"] = error
    return statistics


def over_layers(layers: Integers, statistics: Mapping[str, Floats]) -> dict[str, float]:
    """Worst, mean and where for every statistic, whatever the number of layers.

    Layers whose value is NaN do not count; a statistic that no layer has gives no key. Among equals
    the first layer is named.
    """
    result: dict[str, float] = {}
    for name, values in statistics.items():
        known = ~np.isnan(values)
        if not known.any():
            continue
        seen, where = values[known], layers[known]
        worst = int(seen.argmin() if name in _SMALLEST_IS_WORST else seen.argmax())
        result[name] = float(seen[worst])
        result[f"{name}/mean"] = float(seen.mean())
        result[f"{name}/layer"] = float(where[worst])
    return result


def round_values(values: Sequence[float] | Floats) -> list[float | None]:
    """Numbers for a record: six digits, None where there is no value."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]


class ExpertLoad:
    """Turns the loads of one step after the other into metrics; keeps the last prediction.

    Args:
        expert_parallel: see `layer_statistics`.
    """

    def __init__(self, *, expert_parallel: int = 1) -> None:
        self._expert_parallel = expert_parallel
        self._expected: Floats | None = None

    def statistics(self, table: LoadTable) -> dict[str, Floats]:
        """`layer_statistics` of the next step. Call it once a step, in order."""
        expected, self._expected = self._expected, table.predicted
        return layer_statistics(table, expert_parallel=self._expert_parallel, expected=expected)

    @staticmethod
    def metrics(table: LoadTable, statistics: Mapping[str, Floats]) -> dict[str, float]:
        """The keys of a step's row: a number that does not depend on layers or experts."""
        result = over_layers(table.layers, statistics)
        result["moe/violation_floor"] = violation_floor(
            tokens=int(table.tokens.max()), top_k=table.top_k, num_experts=table.counts.shape[1]
        )
        violation = statistics["moe/max_violation"]
        order = np.argsort(-violation, kind="stable")
        for place, index in enumerate(order[:TOP_LAYERS], start=1):
            if place > 1 and not math.isnan(violation[index]):
                result[f"moe/top/{place}/max_violation"] = float(violation[index])
                result[f"moe/top/{place}/layer"] = float(table.layers[index])
        return result
