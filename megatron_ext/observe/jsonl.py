"""`metrics.jsonl`: one JSON object a step, each step once, on disk as soon as the step is done."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from megatron_ext.observe import registry
from megatron_ext.observe.run_files import replace_file


def encode(row: Mapping[str, float], *, stage: str = "") -> str:
    """One row as JSON, keys in the order of the registry, without the newline.

    The name of a stage, the only text, stands after the step.

    Floats are written by `repr`, the shortest text that reads back as the same float64: equal
    numbers give equal bytes. A value that is not finite becomes `null`, since NaN is not JSON.
    """
    plain: dict[str, float | int | str | None] = {}
    for name in registry.ordered([*row, "stage"] if stage else row):
        if name == "stage":
            plain[name] = stage
            continue
        value = float(row[name])
        if not math.isfinite(value):
            plain[name] = None
        else:
            plain[name] = int(row[name]) if registry.find(name).integer else value
    return json.dumps(plain, allow_nan=False)


def read_rows(path: Path) -> list[dict[str, float | None]]:
    """The rows of a file, without a last line that a kill tore."""
    return [row for _, row in _read_lines(path)]


def _read_lines(path: Path) -> list[tuple[bytes, dict[str, float | None]]]:
    """Whole lines with what they say; a line that is no JSON object with a step is left out."""
    lines = []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        # A line without its newline may be a number cut short (`12` of `123`): not to be trusted.
        if line.endswith(b"\n") and isinstance(row, dict) and isinstance(row.get("step"), int):
            lines.append((line, row))
    return lines


def lacks(path: Path, step: int, name: str) -> bool:
    """Whether the row of a step is there and has no value of a name."""
    rows = read_rows(path) if path.exists() else []
    return any(row["step"] == step and name not in row for row in rows)


def cut_back(path: Path, *, resume_step: int) -> int:
    """Keep the rows up to a step, as they are; drop later ones, torn ones and doubles.

    Done by replacing the file, so that a kill in the middle leaves the old one whole.

    Args:
        path: the file; it need not exist.
        resume_step: last step to keep; 0 keeps none.

    Returns:
        The last step in the file now, 0 when it has no rows.
    """
    if not path.exists():
        return 0
    kept: list[bytes] = []
    last = 0
    for line, row in _read_lines(path):
        step = row["step"]
        if step is not None and last < step <= resume_step:
            kept.append(line)
            last = int(step)
    data = b"".join(kept)
    if data != path.read_bytes():
        replace_file(path, data)
    return last


class JsonlFile:
    """Appends lines to a file of steps. Each is flushed to the operating system.

    Args:
        path: the file; cut back to `resume_step` if it is there, else made with the first line.
        resume_step: the step of the checkpoint that training goes on from, 0 for a new run.
    """

    def __init__(self, path: Path, *, resume_step: int) -> None:
        self._path = path
        self.last_step = cut_back(path, resume_step=resume_step)
        self._file: TextIO | None = None

    def append(self, step: int, line: str) -> None:
        """Add the JSON object of one step, without its newline.

        Raises:
            ValueError: the step is not after the last one.
        """
        if step <= self.last_step:
            raise ValueError(
                f"{self._path.name}: step {step} was given after step {self.last_step}; "
                "each step is written once, in order"
            )
        if self._file is None:
            self._file = self._path.open("a", encoding="utf-8", newline="\n")
        self._file.write(line + "\n")
        self._file.flush()
        self.last_step = step

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class JsonlSink(JsonlFile):
    """Appends rows to `metrics.jsonl`.

    Args:
        path, resume_step: as for `JsonlFile`.
        stage: named in every row; "" without a curriculum.
    """

    def __init__(self, path: Path, *, resume_step: int, stage: str = "") -> None:
        super().__init__(path, resume_step=resume_step)
        self._stage = stage

    def write(self, row: Mapping[str, float]) -> None:
        """Append one row.

        Raises:
            ValueError: the step is not after the last one, or a name is not registered.
        """
        self.append(int(row["step"]), encode(row, stage=self._stage))

    def complete(self, step: int, values: Mapping[str, float]) -> None:
        """Add values to the last row, in one step: a reader sees the old row or the new.

        Nothing where the last row is of another step, since the file has lost that one.
        """
        self.close()
        self._file = None
        lines = _read_lines(self._path) if self._path.exists() else []
        if not lines or lines[-1][1]["step"] != step:
            return
        row = {
            name: math.nan if value is None else value
            for name, value in lines[-1][1].items()
            if name != "stage"
        }
        text = encode({**row, **values}, stage=self._stage) + "\n"
        kept = b"".join(line for line, _ in lines[:-1])
        replace_file(self._path, kept + text.encode())
