"""What a report shows, in its order: training, experts, attention, residuals."""

from __future__ import annotations

import numpy as np

from megatron_ext.observe.layer_history import unpack_counts
from megatron_ext.observe.report import heat_maps
from megatron_ext.observe.report.depth_plots import depth_sections
from megatron_ext.observe.report.layer_plots import layers_over_time
from megatron_ext.observe.report.lines import COLOURS, Line, Panel, Plot, draw_lines
from megatron_ext.observe.report.run_data import RunData
from megatron_ext.observe.report.stage_plots import by_length, switches
from megatron_ext.observe.report.svg import style, to_svg

NO_EXPERTS = "No layer of this run is a mixture of experts."
NO_HISTORY = "No loads of single experts were kept: logging.expert_interval was 0."
NO_HEALTH = (
    "Attention was not measured (logging.health_interval was 0), or no layer has what is measured."
)
NO_PREDICTION = "The balancing rule of this run predicts no loads, or has done one step only."


def sections(data: RunData) -> list[tuple[str, list[Plot]]]:
    """Headings with their plots; a plot without data says why."""
    return [
        (
            "Training",
            [
                loss(data),
                sources(data),
                optimizer(data),
                throughput(data),
                *([switches(data)] if data.has("eval/before/loss") else []),
                *([by_length(data)] if data.has_any("eval/retrieval/") else []),
            ],
        ),
        (
            "Experts",
            [
                violation(data),
                violation_over_time(data),
                latest_loads(data),
                bias(data),
                prediction(data),
                lost(data),
            ],
        ),
        ("Attention", [decay(data), decay_by_layer(data), gates(data), state(data)]),
        *depth_sections(data),
    ]


def loss(data: RunData) -> Plot:
    lines = [
        Line("loss", "training", smooth=True),
        Line("eval/loss", "held-out", dots=True),
    ]
    return draw_lines(
        data,
        "loss",
        "Loss",
        [Panel("nats", lines)],
        note="Mean cross-entropy of a token; the number in the legend is the newest.",
        missing="No step had a finite loss.",
    )


def sources(data: RunData) -> Plot:
    trained, held_out = data.names("loss/"), data.names("eval/loss/")
    most = len(COLOURS)
    panels = [
        Panel("training, nats", [Line(n, n.removeprefix("loss/")) for n in trained[:most]]),
        Panel(
            "held-out, nats",
            [Line(n, n.removeprefix("eval/loss/"), dots=True) for n in held_out[:most]],
        ),
    ]
    left_out = max(len(trained), len(held_out)) - most
    more = f"; {left_out} more are not shown" if left_out > 0 else ""
    return draw_lines(
        data,
        "loss-by-source",
        "Loss by source",
        panels,
        note=f"Each data source on its own{more}.",
        missing="No row has the loss of a source.",
    )


def optimizer(data: RunData) -> Plot:
    return draw_lines(
        data,
        "optimizer",
        "Learning rate and gradient norm",
        [
            Panel("rate", [Line("lr", "learning rate")]),
            Panel("norm", [Line("grad_norm", "gradient norm", smooth=True)], log_from=30),
        ],
        note="The norm is that of the whole gradient, before clipping.",
        missing="No row has a finite learning rate or gradient norm.",
    )


def throughput(data: RunData) -> Plot:
    return draw_lines(
        data,
        "throughput",
        "Throughput",
        [
            Panel(
                "tokens/s",
                [Line("tokens_per_second", "all ranks together", smooth=True)],
                counts=True,
                from_zero=True,
            ),
            Panel("%", [Line("mfu", "model FLOPs utilisation", scale=100)], from_zero=True),
            Panel("GiB", [Line("memory_gib", "peak memory of the fullest rank")], from_zero=True),
        ],
        note="Without evaluations and saves. Utilisation needs a GPU whose peak is known.",
        missing="No row has a throughput.",
    )


def violation(data: RunData) -> Plot:
    lines = [
        Line("moe/violation_floor", "chance alone", reference=True),
        Line("moe/max_violation", "worst layer", worst=True),
        Line("moe/max_violation/mean", "mean of layers"),
        Line("balance/predicted_violation", "worst, new bias", worst=True),
    ]
    return draw_lines(
        data,
        "violation",
        "Max violation",
        [Panel("max load / mean - 1", lines, log_from=10)],
        note="Load of the busiest expert. The dashed line is what chance alone gives when every "
        "expert is equally likely. New bias: this batch, had the updated bias been in use.",
        missing=NO_EXPERTS,
    )


def violation_over_time(data: RunData) -> Plot:
    key, title = "violation-over-time", "Max violation of every layer"
    records = [
        (step, experts["layers"], experts["statistics"]["moe/max_violation"])
        for step, experts in data.part("experts")
    ]
    return layers_over_time(
        key,
        title,
        records,
        unit="max load / mean - 1",
        note="Dark rows are layers whose experts are used unevenly.",
        missing=_no_history(data),
    )


def latest_loads(data: RunData) -> Plot:
    key, title = "loads", "Load of every expert"
    records = data.part("experts")
    if not records:
        return Plot(key, title, _no_history(data))
    step, experts = records[-1]
    counts = unpack_counts(experts["counts"])
    with style(salt=key):
        figure = heat_maps.experts(np.array(experts["layers"]), counts)
        svg = to_svg(figure, label=title)
    note = (
        f"Step {step}, {experts['tokens']} tokens, {experts['top_k']} of {counts.shape[1]} experts "
        "a token. Red: more than the mean of the layer, blue: less."
    )
    return Plot(key, title, note, svg, counts.size)


def bias(data: RunData) -> Plot:
    return draw_lines(
        data,
        "bias",
        "Bias of the router",
        [
            Panel(
                "range",
                [
                    Line("balance/bias_range", "worst layer", worst=True),
                    Line("balance/bias_range/mean", "mean of layers"),
                ],
            ),
            Panel(
                "change a step",
                [
                    Line("balance/bias_change", "worst layer", worst=True),
                    Line("balance/bias_change/mean", "mean of layers"),
                ],
                log_from=10,
            ),
        ],
        note="Largest minus smallest bias, and the largest change by one update.",
        missing=NO_EXPERTS,
    )


def prediction(data: RunData) -> Plot:
    lines = [
        Line("moe/violation_floor", "chance alone", reference=True),
        Line("balance/prediction_error", "worst layer", worst=True),
        Line("balance/prediction_error/mean", "mean of layers"),
    ]
    key, title = "prediction", "Predicted and real load"
    if not data.has("balance/prediction_error"):
        has_experts = data.has("moe/max_violation")
        return Plot(key, title, NO_PREDICTION if has_experts else NO_EXPERTS)
    return draw_lines(
        data,
        key,
        title,
        [Panel("max |difference| / mean", lines, log_from=10)],
        note="Load of each expert against what the update before predicted for it.",
        missing=NO_EXPERTS,
    )


def lost(data: RunData) -> Plot:
    lines = [
        Line("moe/dead_fraction", "experts without a token", worst=True, scale=100),
        Line("moe/dropped", "slots dropped", worst=True, scale=100),
        Line("balance/out_of_range", "margins out of range", worst=True, scale=100),
    ]
    return draw_lines(
        data,
        "lost",
        "Unused experts, dropped slots, and load of ranks",
        [
            Panel("% of the worst layer", lines, from_zero=True),
            Panel("max / mean", [Line("moe/rank_load", "expert parallel ranks", worst=True)]),
        ],
        note="All should be near 0, and the load of ranks near 1 (it is 1 without expert "
        "parallelism).",
        missing=NO_EXPERTS,
    )


def decay(data: RunData) -> Plot:
    quantiles = [
        Line("kda/decay_p99", "99th percentile"),
        Line("kda/decay_p50", "median"),
        Line("kda/decay_p01", "1st percentile"),
        Line("kda/decay_mean", "mean", reference=True),
    ]
    saturated = [
        Line("kda/saturated_low", "near the lower bound", worst=True, scale=100),
        Line("kda/saturated_high", "near no decay", worst=True, scale=100),
    ]
    return draw_lines(
        data,
        "decay",
        "Decay of linear attention",
        [
            Panel("kept a token", quantiles, from_zero=True),
            Panel("% of gates, worst layer", saturated, from_zero=True),
        ],
        note="What a channel of the state keeps from a token to the next, over all layers, heads "
        "and channels; and the share of gates within 1 % of an end of their range.",
        missing=NO_HEALTH,
    )


def decay_by_layer(data: RunData) -> Plot:
    records = [
        (step, part["layers"], part["statistics"]["kda/decay_mean"])
        for step, part in data.part("attention")
        if "kda/decay_mean" in part["statistics"]
    ]
    return layers_over_time(
        "decay-by-layer",
        "Mean decay of every layer",
        records,
        unit="kept a token",
        note="Dark rows remember long. Layers of full attention are blank.",
        missing=NO_HEALTH,
    )


def gates(data: RunData) -> Plot:
    def panel(name: str, unit: str) -> Panel:
        lines = [
            Line(name, "mean"),
            Line(f"{name}/min", "lowest layer"),
            Line(f"{name}/max", "highest layer"),
        ]
        return Panel(unit, lines)

    return draw_lines(
        data,
        "gates",
        "Gates of attention",
        [
            panel("kda/beta_mean", "write strength"),
            panel("kda/output_gate_mean", "output, linear"),
            panel("mla/gate_mean", "output, full"),
        ],
        note="Means over tokens, heads and channels, between 0 (shut) and 1 (open). A layer whose "
        "output gate goes to 0 has switched its attention off.",
        missing=NO_HEALTH,
    )


def state(data: RunData) -> Plot:
    return draw_lines(
        data,
        "state",
        "State of linear attention",
        [
            Panel(
                "nats a tile",
                [
                    Line("kda/tile_decay", "strongest, worst layer", worst=True),
                    Line("kda/tile_decay/mean", "mean of layers"),
                ],
            ),
            Panel(
                "norm",
                [
                    Line("kda/state_norm", "largest, worst layer", worst=True),
                    Line("kda/state_norm/mean", "mean of layers"),
                ],
                log_from=10,
            ),
        ],
        note="Decay over 16 tokens, whose inverse overflows in float32 beyond 88 nats; and the "
        "Frobenius norm of a head's state after the last token.",
        missing=NO_HEALTH,
    )


def _no_history(data: RunData) -> str:
    return NO_HISTORY if data.has("moe/max_violation") else NO_EXPERTS
