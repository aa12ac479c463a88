"""Plots of a curriculum and of the evaluation by length."""

from __future__ import annotations

from megatron_ext.observe.console import human_count
from megatron_ext.observe.report.lines import Line, Panel, Plot, draw_lines
from megatron_ext.observe.report.run_data import RunData

LENGTHS = 6  # of a curriculum of four stages, each with four times its length


def switches(data: RunData) -> Plot:
    """Stages of a curriculum: what a switch costs."""
    lines = [
        Line("eval/before/loss", "before the stage", dots=True),
        Line("eval/loss", "after", dots=True),
        Line("eval/before/apart/loss", "before, documents apart", dots=True),
        Line("eval/apart/loss", "after, documents apart", dots=True),
    ]
    violation = Line("moe/max_violation", "worst layer", worst=True)
    return draw_lines(
        data,
        "switches",
        "Before and after each stage",
        [Panel("held-out, nats", lines), Panel("max load / mean - 1", [violation], log_from=10)],
        note="Held-out loss in the length of each stage, before its first step (drawn there) and "
        "after its last; documents apart: without the others in a sequence.",
        missing="No stage has begun.",
    )


def by_length(data: RunData) -> Plot:
    """Keys found again, at the longest lengths."""
    prefix = "eval/retrieval/"
    lengths = sorted(
        {
            int(name.removeprefix(prefix).split("/")[0])
            for row in data.rows
            for name in row
            if name.startswith(prefix)
        }
    )
    panels = [
        Panel(
            f"{human_count(length)}, nats",
            [
                Line(f"{prefix}{length}/{depth}", label, dots=True)
                for depth, label in (("0", "0 %"), ("50", "50 %"), ("100", "100 %"))
            ]
            + [Line(f"{prefix}{length}/absent", "absent", dots=True, reference=True)],
        )
        for length in lengths[-LENGTHS:]
    ]
    missing = "Nothing was measured by length (evaluate.lengths, evaluate.length_factors)."
    if not panels:
        return Plot("retrieval", "Keys found again", missing)
    return draw_lines(
        data,
        "retrieval",
        "Keys found again",
        panels,
        note="Loss a token of a key that stands at a depth of a text, and where it is absent: what "
        f"guessing costs. The longest {LENGTHS} lengths.",
        missing=missing,
    )
