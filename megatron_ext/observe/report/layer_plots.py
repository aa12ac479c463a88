"""Heat maps of one number a layer over the steps in which it was recorded."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_ext.observe.report import heat_maps
from megatron_ext.observe.report.lines import Plot
from megatron_ext.observe.report.svg import style, to_svg


def layers_over_time(
    key: str,
    title: str,
    records: Sequence[tuple[int, list[int], list[float | None]]],
    *,
    unit: str,
    note: str,
    missing: str,
    rows: str = "layer",
) -> Plot:
    """A heat map of one number a layer, or other row, and record: `records` has step, layers,
    values."""
    layers = sorted({layer for _, names, _ in records for layer in names})
    values = np.full((len(layers), len(records)), np.nan)
    for column, (_, names, numbers) in enumerate(records):
        for layer, number in zip(names, numbers, strict=True):
            values[layers.index(layer), column] = np.nan if number is None else number
    if not np.isfinite(values).any():
        return Plot(key, title, missing)
    with style(salt=key):
        steps = np.array([step for step, _, _ in records])
        figure = heat_maps.over_time(np.array(layers), steps, values, unit=unit, rows=rows)
        return Plot(key, title, note, to_svg(figure, label=title), int(np.isfinite(values).sum()))
