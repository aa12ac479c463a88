"""Plots of metrics over steps: one to three panels of lines below one another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from megatron_ext.observe.console import human_count
from megatron_ext.observe.report.run_data import Floats, RunData
from megatron_ext.observe.report.svg import new_figure, style, to_svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#2563eb", "#d97706", "#059669", "#7c3aed", "#db2777", "#0891b2", "#65a30d", "#b91c1c")
GREY = "#7b8794"
_POINTS = 400  # of a line: more than a screen has, and 10 kB
# In points: what a legend has beside a label, and the width of a panel.
_HANDLE, _LEGEND = 38, 270


@dataclass(frozen=True)
class Plot:
    """A figure of the page, or why there is none.

    Attributes:
        key: name in the page, letters and `-`.
        title: heading.
        note: what is seen, or why nothing is.
        svg: `<svg>` element; empty when there is nothing to draw.
        points: numbers that were drawn.
    """

    key: str
    title: str
    note: str
    svg: str = ""
    points: int = 0


@dataclass(frozen=True)
class Line:
    """One metric in a panel.

    Attributes:
        metric: registered name.
        label: in the legend.
        worst: where several steps share a point, the largest counts instead of their mean.
        dots: seldom measured: every value is a dot.
        smooth: a running mean is drawn over the values.
        reference: grey and dashed, what the others are compared with.
        scale: factor, such as 100 for percent.
    """

    metric: str
    label: str
    worst: bool = False
    dots: bool = False
    smooth: bool = False
    reference: bool = False
    scale: float = 1.0


@dataclass(frozen=True)
class Panel:
    """Lines with a common y axis.

    Attributes:
        unit: label of the axis.
        log_from: the axis is logarithmic where values span more than so many times.
        counts: values are written as `98.3k`.
        from_zero: the axis begins at 0, for shares whose smallness is the news.
    """

    unit: str
    lines: Sequence[Line]
    log_from: float = float("inf")
    counts: bool = False
    from_zero: bool = False


def draw_lines(
    data: RunData,
    key: str,
    title: str,
    panels: Sequence[Panel],
    *,
    note: str,
    missing: str,
) -> Plot:
    """Draw those panels of which the run has numbers.

    Args:
        note: below the figure.
        missing: why there is no figure, where no panel has numbers.
    """
    found = [
        (panel, lines)
        for panel in panels
        if (lines := [line for line in panel.lines if data.has(line.metric)])
    ]
    if not found:
        return Plot(key, title, missing)
    from matplotlib.ticker import MaxNLocator

    with style(salt=key):
        figure = new_figure(height=0.8 + 1.4 * len(found))
        axes = figure.subplots(len(found), 1, sharex=True, squeeze=False)[:, 0]
        points = sum(
            _panel(ax, data, panel, lines) for ax, (panel, lines) in zip(axes, found, strict=True)
        )
        axes[-1].set_xlabel("step")
        axes[-1].xaxis.set_major_locator(MaxNLocator("auto", integer=True))
        return Plot(key, title, note, to_svg(figure, label=title), points)


def _panel(ax: Axes, data: RunData, panel: Panel, lines: Sequence[Line]) -> int:
    points, seen = 0, []
    colours = iter(COLOURS)
    for line in lines:
        steps, values = data.column(line.metric)
        values = values * line.scale
        seen.append(values)
        colour = GREY if line.reference else next(colours)
        x, y = thin(steps, values, worst=line.worst)
        points += len(x)
        newest = human_count(values[-1]) if panel.counts else f"{values[-1]:.4g}"
        label = f"{line.label} {newest}"
        smoothed = line.smooth and len(x) > 40
        ax.plot(
            x,
            y,
            color=colour,
            label=None if smoothed else label,
            alpha=0.35 if smoothed else 1.0,
            linestyle="--" if line.reference else "-",
            # A single value, or few, would be no line to be seen.
            marker="o" if line.dots or len(x) < 3 else None,
            markersize=3,
        )
        if smoothed:
            ax.plot(x, running_mean(y, len(y) // 20), color=colour, label=label)
    together = np.concatenate(seen)
    positive = together[together > 0]
    if len(positive) == len(together) and positive.max() > panel.log_from * positive.min():
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        ax.yaxis.set_minor_formatter(_two_and_five)
    elif np.abs(together).max() < 1e-3:
        # Not a common power of ten above the axis, where the legend is.
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    if panel.counts:
        ax.yaxis.set_major_formatter(lambda value, _: human_count(value))
    if panel.from_zero:
        ax.set_ylim(bottom=0, top=None if together.max() > 0 else 1)
    ax.set_ylabel(panel.unit)
    # Above the panel: inside it would cover lines.
    columns = legend_columns([str(line.get_label()) for line in ax.get_legend_handles_labels()[0]])
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, borderpad=0)
    return points


def legend_columns(labels: Sequence[str]) -> int:
    """Into how many columns a legend goes without being wider than its panel."""
    from matplotlib import rcParams
    from matplotlib.textpath import TextPath

    size = rcParams["legend.fontsize"]
    widths = sorted(
        (TextPath((0, 0), label, size=size).get_extents().width + _HANDLE for label in labels),
        reverse=True,
    )
    return max([n for n in (1, 2, len(labels)) if sum(widths[:n]) <= _LEGEND], default=1)


def _two_and_five(value: float, _: float) -> str:
    """Labels between powers of ten: all nine would touch each other."""
    text = f"{value:g}"
    return text if text.strip("0.")[:1] in ("2", "5") else ""


def thin(
    x: Floats, y: Floats, *, worst: bool = False, points: int = _POINTS
) -> tuple[Floats, Floats]:
    """At most so many points: each the mean (or the largest) of its neighbours, the last x."""
    if len(x) <= points:
        return x, y
    parts = np.array_split(np.arange(len(x)), points)
    return (
        np.array([x[part[-1]] for part in parts]),
        np.array([y[part].max() if worst else y[part].mean() for part in parts]),
    )


def running_mean(y: Floats, width: int) -> Floats:
    """Mean over so many values before and after each, fewer at the ends."""
    total = np.concatenate([[0.0], np.cumsum(y)])
    index = np.arange(len(y))
    low, high = np.maximum(index - width, 0), np.minimum(index + width + 1, len(y))
    return (total[high] - total[low]) / (high - low)
