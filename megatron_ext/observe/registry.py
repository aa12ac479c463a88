"""Every number that a run may log: lookup in `metric_table`, and the page made from it.

A name that is not here is refused, so that two parts of the code never log one thing under two
names or two things under one. `docs/metrics.md` is this table, printed by

    python -m megatron_ext.observe.registry > docs/metrics.md

and a test fails when the page is older than the table.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from megatron_ext.observe.metric_table import METRICS, Metric

_EXACT = {metric.name: position for position, metric in enumerate(METRICS) if not metric.is_family}


def find(name: str) -> Metric:
    """The entry that a name belongs to.

    Raises:
        ValueError: the name is not registered; says the nearest one that is.
    """
    return METRICS[_position(name)]


def _position(name: str) -> int:
    if name in _EXACT:
        return _EXACT[name]
    for position, metric in enumerate(METRICS):
        if metric.matches(name):
            return position
    near = difflib.get_close_matches(name, [metric.name for metric in METRICS], n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}? " if near else ""
    raise ValueError(
        f"metric {name}: not registered; {hint}"
        "docs/metrics.md lists what is, and megatron_ext/observe/registry.py takes new ones"
    )


def is_reproducible(name: str) -> bool:
    """Whether a killed and relaunched run writes the same bytes for this name."""
    return find(name).reproducible


def ordered(names: Iterable[str]) -> list[str]:
    """Names in the order of the table, those of one family by alphabet. Refuses unknown names."""
    return sorted(names, key=lambda name: (_position(name), name))


def required_names() -> tuple[str, ...]:
    """What every row of `metrics.jsonl` holds."""
    return tuple(metric.name for metric in METRICS if metric.required)


def markdown() -> str:
    """The table as the page `docs/metrics.md`."""
    lines = [
        "# Metrics",
        "",
        "Every number that a run logs. The names are the same in `metrics.jsonl`, on wandb and in",
        "TensorBoard; a name that is not in this table is refused. This page is generated:",
        "",
        "```sh",
        "python -m megatron_ext.observe.registry > docs/metrics.md",
        "```",
        "",
        "`metrics.jsonl` holds one JSON object a line and a step, keys in the order of this table.",
        "A value that is not finite is `null`. *Every row*: never missing. *Reproducible*: a run",
        "that was killed and relaunched writes the same bytes as one that was not.",
        "",
        "| name | unit | meaning | every row | reproducible |",
        "| --- | --- | --- | --- | --- |",
    ]
    for metric in METRICS:
        required = "yes" if metric.required else ""
        reproducible = "yes" if metric.reproducible else ""
        lines.append(
            f"| `{metric.name}` | {metric.unit} | {metric.meaning} | {required} | {reproducible} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
