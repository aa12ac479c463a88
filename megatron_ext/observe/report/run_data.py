"""Reads a run folder for the report, also one that a run is still writing to.

Every file but `metrics.jsonl` may be missing. What is there must be whole: a damaged line is an
error that names it, except for a last line that is just being written.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from megatron_ext.errors import DataError
from megatron_ext.observe import registry
from megatron_ext.observe.depth_health import weight_matrix
from megatron_ext.observe.layer_history import FILE_NAME, unpack_counts
from megatron_ext.observe.redact import redact
from megatron_ext.observe.run_files import read_exit

Floats = NDArray[np.float64]
Row = dict[str, Any]


@dataclass(frozen=True)
class RunData:
    """What a run folder says.

    Attributes:
        folder: the run folder.
        rows: of `metrics.jsonl`, at least one, in the order of steps.
        history: of `layers.jsonl`, in the order of steps; may be empty.
        config: `config.yaml` without secrets, empty when there is none.
        run: `run.json`, empty when there is none.
        ending: `exit.json`; None while the run goes on, or after a crash.
    """

    folder: Path
    rows: list[Row]
    history: list[Row]
    config: dict[str, Any]
    run: dict[str, Any]
    ending: dict[str, Any] | None

    def column(self, name: str) -> tuple[Floats, Floats]:
        """Steps and finite values of a metric, [n] each; n is 0 when no row has it."""
        pairs = [
            (row["step"], row[name])
            for row in self.rows
            if isinstance(row.get(name), int | float)  # null: not finite
        ]
        steps, values = zip(*pairs, strict=True) if pairs else ((), ())
        return np.array(steps, dtype=np.float64), np.array(values, dtype=np.float64)

    def has(self, name: str) -> bool:
        """Whether any row has a finite value of a metric."""
        return len(self.column(name)[0]) > 0

    def has_any(self, prefix: str) -> bool:
        """Whether any row has a metric whose name begins so."""
        return any(name.startswith(prefix) for row in self.rows for name in row)

    def last(self, name: str) -> float | None:
        """The newest finite value of a metric."""
        _, values = self.column(name)
        return float(values[-1]) if len(values) else None

    def names(self, prefix: str) -> list[str]:
        """Metrics `prefix<word>` that some row has, by alphabet."""
        found = {name for row in self.rows for name in row if name.startswith(prefix)}
        return sorted(name for name in found if "/" not in name.removeprefix(prefix))

    def part(self, name: str) -> list[tuple[int, dict[str, Any]]]:
        """Steps and records of one part of the history, `experts` for example."""
        return [(record["step"], record[name]) for record in self.history if name in record]


def read_run(folder: Path) -> RunData:
    """Read a run folder.

    Raises:
        DataError: it is none, nothing was logged yet, or a file is damaged.
    """
    path = folder / "metrics.jsonl"
    if not path.exists():
        there = "has no metrics.jsonl" if folder.is_dir() else "does not exist"
        raise DataError(
            f"{folder}: {there}; give the folder of a run (run.dir, by default runs/<run.name>) "
            "that has done a step"
        )
    rows = _read(path, required=registry.required_names())
    if not rows:
        raise DataError(f"{path}: no step is complete yet; try again after the first one")
    history_path = folder / FILE_NAME
    history = _read(history_path, required=("step",)) if history_path.exists() else []
    for record in history:
        _check(history_path, record)
    return RunData(
        folder=folder,
        rows=rows,
        history=history,
        config=_mapping(folder / "config.yaml"),
        run=_mapping(folder / "run.json"),
        ending=read_exit(folder),
    )


def _read(path: Path, *, required: Iterable[str]) -> list[Row]:
    rows: list[Row] = []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        if not line.endswith(b"\n"):
            break  # the last line, and the run is in the middle of it, or was killed there
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(
                f"{path}: line {number} is damaged ({error}). Relaunching the run drops it; "
                "or delete the line"
            ) from error
        missing = [name for name in required if not isinstance(row, dict) or name not in row]
        if missing:
            raise DataError(
                f"{path}: line {number} has no {', '.join(missing)}; it was not written by this "
                "version of the program. Use the version that trained the run"
            )
        step = row["step"]
        last = rows[-1]["step"] if rows else 0
        if not isinstance(step, int) or step <= last:
            raise DataError(
                f"{path}: line {number} is of step {step}, after step {last}; each step stands "
                "once, in order. Relaunching the run drops it; or delete the line"
            )
        rows.append(row)
    return rows


def _check(path: Path, record: Row) -> None:
    try:
        for name in ("experts", "attention"):
            if name in record:
                part = record[name]
                sizes = {len(part["layers"]), *map(len, part["statistics"].values())}
                if name == "experts":
                    sizes.add(len(unpack_counts(part["counts"])))
                if len(sizes) != 1:
                    raise ValueError(f"{name}: lists of {sorted(sizes)} layers")
        if "residual" in record:
            weight_matrix(record["residual"])
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise DataError(
            f"{path}: the record of step {record['step']} is damaged ({error}); delete the line"
        ) from error


def _mapping(path: Path) -> dict[str, Any]:
    """A YAML or JSON file (which is YAML too), without secrets; empty when there is none."""
    if not path.exists():
        return {}
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (ValueError, yaml.YAMLError) as error:
        raise DataError(
            f"{path}: damaged ({error}). Relaunching the run writes it anew; or delete it"
        ) from error
    return redact(value) if isinstance(value, dict) else {}
