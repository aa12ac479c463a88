"""Heat maps of layers: over time, and over the experts of one step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from megatron_ext.observe.depth_health import sublayer_name
from megatron_ext.observe.expert_load import Floats, Integers, relative_load
from megatron_ext.observe.report.svg import WIDTH_INCHES, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

_COLUMNS = 300


def over_time(
    layers: Integers, steps: Integers, values: Floats, *, unit: str, rows: str = "layer"
) -> Figure:
    """Layers or other rows downwards, recorded steps to the right, colour: values [L, S], NaN
    where unknown.

    Of more than 300 steps neighbours share a column, which shows the largest.
    """
    if len(steps) > _COLUMNS:
        parts = np.array_split(np.arange(len(steps)), _COLUMNS)
        values = np.stack([np.fmax.reduce(values[:, part], axis=1) for part in parts], axis=1)
        steps = np.array([steps[part[-1]] for part in parts])
    figure = _figure(len(layers))
    ax = figure.add_subplot()
    picture = ax.imshow(
        values, aspect="auto", interpolation="none", cmap="magma_r", norm=_norm(values)
    )
    bar = figure.colorbar(picture, ax=ax, label=unit, pad=0.02)
    bar.ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    _layer_axis(ax, layers, name=rows)
    shown = _few(len(steps))
    ax.set_xticks(shown, [str(int(steps[i])) for i in shown])
    ax.set_xlabel("step")
    return figure


def experts(layers: Integers, counts: Integers) -> Figure:
    """Layers downwards, experts to the right, colour: load over the layer's mean.

    The colour is symmetric in the logarithm: half the mean is as far from white as twice the mean.
    """
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import MaxNLocator

    load = relative_load(counts)
    loaded = load[np.isfinite(load) & (load > 0)]
    # At least 25 % to each side, lest the noise of an even load looks like a fault; at most 8x.
    widest = float(np.exp(np.abs(np.log(loaded)).max())) if len(loaded) else 1.0
    limit = min(max(widest, 1.25), 8.0)
    figure = _figure(len(layers))
    ax = figure.add_subplot()
    picture = ax.imshow(
        np.clip(load, 1 / limit, limit),  # no tokens at all is the darkest blue too
        aspect="auto",
        interpolation="none",
        cmap="RdBu_r",
        norm=LogNorm(1 / limit, limit),
    )
    bar = figure.colorbar(picture, ax=ax, label="load / mean", pad=0.02)
    marks = [1 / limit, limit**-0.5, 1.0, limit**0.5, limit]
    bar.set_ticks(marks, labels=[f"{mark:.2g}" for mark in marks])
    bar.minorticks_off()
    _layer_axis(ax, layers)
    ax.set_xlabel("expert")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def depth(sublayers: Sequence[int], weights: Floats) -> Figure:
    """Sublayers downwards (`sublayer_name`), sources to the right, colour: mean weights [M, N], NaN
    where there is no such source."""
    from matplotlib.ticker import MaxNLocator

    figure = _figure(len(sublayers))
    ax = figure.add_subplot()
    picture = ax.imshow(
        weights, aspect="auto", interpolation="none", cmap="magma_r", vmin=0, vmax=1
    )
    figure.colorbar(picture, ax=ax, label="weight", pad=0.02)
    shown = _few(len(sublayers))
    ax.set_yticks(shown, [sublayer_name(sublayers[i], last=sublayers[-1]) for i in shown])
    ax.set_ylabel("sublayer")
    ax.set_xlabel("source: 0 is the embedding, the last of a row runs")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.grid(visible=False)
    return figure


def _figure(layers: int) -> Figure:
    # Low enough for a screen, and high enough for the label of the colours.
    return new_figure(height=min(max(1.1 + 0.16 * layers, 1.9), 0.85 * WIDTH_INCHES))


def _norm(values: Floats) -> Normalize:
    """Logarithmic where a straight scale would show the largest values only."""
    from matplotlib.colors import LogNorm, Normalize

    known = values[np.isfinite(values)]
    if known.min() > 0 and known.max() > 20 * known.min():
        return LogNorm(known.min(), known.max())
    return Normalize(known.min(), known.max())


def _layer_axis(ax: Axes, layers: Integers, *, name: str = "layer") -> None:
    shown = _few(len(layers))
    ax.set_yticks(shown, [str(int(layers[i])) for i in shown])
    ax.set_ylabel(name)
    ax.grid(visible=False)


def _few(count: int) -> list[int]:
    """Up to nine positions from the first on, each as far from the next."""
    return list(range(0, count, 1 + (count - 1) // 9))
