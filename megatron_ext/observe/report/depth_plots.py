"""Plots of attention residuals: what each sublayer reads, and how large the sources are."""

from __future__ import annotations

import numpy as np

from megatron_ext.observe.depth_health import weight_matrix
from megatron_ext.observe.report import heat_maps
from megatron_ext.observe.report.layer_plots import layers_over_time
from megatron_ext.observe.report.lines import Line, Panel, Plot, draw_lines
from megatron_ext.observe.report.run_data import RunData
from megatron_ext.observe.report.svg import style, to_svg

NO_DEPTH = "Weights over depth were not measured (logging.health_interval was 0)."


def depth_sections(data: RunData) -> list[tuple[str, list[Plot]]]:
    """The section of attention residuals; none for a run that has a residual of another kind."""
    kind = (data.config.get("residual") or {}).get("kind")
    if kind not in ("block", "full") and not data.part("residual"):
        return []
    plots = [depth_weights(data), depth_over_time(data), source_norms(data)]
    return [("Attention residuals", plots)]


def depth_weights(data: RunData) -> Plot:
    """The newest matrix: sublayers x sources."""
    key, title = "depth-weights", "Weights over depth"
    records = data.part("residual")
    if not records:
        return Plot(key, title, NO_DEPTH)
    step, record = records[-1]
    weights = weight_matrix(record)
    with style(salt=key):
        svg = to_svg(heat_maps.depth(record["sublayers"], weights), label=title)
    note = (
        f"Step {step}, mean over tokens. 3a: attention of layer 3, 3f: its feed-forward, out: the "
        "mix after the last layer. A new model weighs all of its sources alike."
    )
    return Plot(key, title, note, svg, int(np.isfinite(weights).sum()))


def depth_over_time(data: RunData) -> Plot:
    def spread(name: str) -> list[Line]:
        return [
            Line(name, "mean"),
            Line(f"{name}/min", "lowest sublayer"),
            Line(f"{name}/max", "highest sublayer"),
        ]

    return draw_lines(
        data,
        "depth-entropy",
        "Entropy of the weights over depth",
        [
            Panel("entropy / maximum", spread("residual/entropy")),
            Panel("weight of the embedding", spread("residual/embedding_weight"), from_zero=True),
            Panel(
                "weight of the running sum",
                [
                    *spread("residual/running_weight"),
                    Line("residual/output_weight", "at the output", reference=True),
                ],
                from_zero=True,
            ),
        ],
        note="1: all sources weigh the same; 0: every token reads one. A running sum without "
        "weight is a layer that the next one does not hear.",
        missing=NO_DEPTH,
    )


def source_norms(data: RunData) -> Plot:
    return layers_over_time(
        "source-norms",
        "Norm of every source",
        [
            (step, list(range(len(record["norms"]))), record["norms"])
            for step, record in data.part("residual")
        ],
        unit="root mean square",
        rows="source",
        note="After the last layer. 0 is the embedding, then the sums of finished blocks (or "
        "outputs of sublayers), last the sum that runs.",
        missing=NO_DEPTH,
    )
