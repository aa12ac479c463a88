"""What a person watches: header lines, one row a step within 120 columns, evaluations, warnings.

On a terminal a progress bar stands below the rows. Elsewhere (a log file, a pipe) the same rows are
plain lines without colour, each flushed.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

WIDTH = 120
# The estimate of the time left looks at the last steps only: the first one compiles and allocates.
_RECENT_STEPS = 20


def human_count(value: float) -> str:
    """Three or four characters and a decimal suffix: `950`, `98.3k`, `1.25M`, `2.00T`."""
    if not math.isfinite(value):
        return "-"
    for limit, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        # 999.95k would print as 1000.0k: the next suffix starts where rounding reaches it.
        if abs(value) >= limit * 0.99995:
            scaled = value / limit
            return f"{scaled:.1f}{suffix}" if abs(scaled) >= 9.995 else f"{scaled:.2f}{suffix}"
    return f"{value:.0f}" if float(value).is_integer() or abs(value) >= 100 else f"{value:.1f}"


def human_seconds(value: float) -> str:
    """`0:00:42` below a day, `3d04h` from there on, `-` when unknown."""
    if not math.isfinite(value) or value < 0:
        return "-"
    seconds = round(value)
    if seconds >= 86400:
        return f"{seconds // 86400}d{seconds % 86400 // 3600:02d}h"
    return f"{seconds // 3600}:{seconds % 3600 // 60:02d}:{seconds % 60:02d}"


def human_lr(value: float) -> str:
    """`3.0e-4`: as one writes it, without the second digit of the exponent."""
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa}e{int(exponent)}" if exponent else mantissa


def step_row(
    step: int, values: Mapping[str, float], *, total_steps: int, seconds_left: float
) -> str:
    """One row of at most 120 columns.

    Args:
        step: optimizer step, from 1.
        values: metrics by registered name; of those only the ones for a person are shown.
        total_steps: steps of the whole run.
        seconds_left: estimate; infinite when unknown.
    """
    share = 100 * step / total_steps if total_steps else 100.0
    fields = [f"step {step}/{total_steps}", f"{share:.1f}%"]
    # Name, text, and whether the row is useless without it: what is not goes first where 120
    # columns are too few, from the right.
    optional: list[str] = []

    def add(name: str, text: str, *, keep: bool) -> None:
        if math.isfinite(values.get(name, math.nan)) or keep:
            fields.append(text)
            if not keep:
                optional.append(text)

    loss, norm = values.get("loss", math.nan), values.get("grad_norm", math.nan)
    add("loss", f"loss {loss:.3f}", keep=True)
    add("grad_norm", f"gnorm {norm:.2f}" if norm < 1000 else f"gnorm {norm:.1e}", keep=True)
    add("lr", f"lr {human_lr(values.get('lr', math.nan))}", keep=True)
    # The load of the busiest expert of any layer over the mean of that layer.
    violation = values.get("moe/max_violation", math.nan)
    add("moe/max_violation", f"imb {1 + violation:.2f}", keep=False)
    add("tokens", f"tok {human_count(values.get('tokens', math.nan))}", keep=False)
    add(
        "tokens_per_second",
        f"{human_count(values.get('tokens_per_second', math.nan))} tok/s",
        keep=False,
    )
    add("mfu", f"MFU {100 * values.get('mfu', math.nan):.1f}%", keep=False)
    add("memory_gib", f"mem {values.get('memory_gib', math.nan):.1f}G", keep=False)
    fields.append(f"eta {human_seconds(seconds_left)}")
    while len("  ".join(fields)) > WIDTH and optional:
        fields.remove(optional.pop())
    return "  ".join(fields)[:WIDTH]


def evaluation_rows(step: int, tokens: int, values: Mapping[str, float]) -> list[str]:
    """`eval` lines of at most 120 columns: the loss, its perplexity, then one loss a source."""
    loss = values.get("eval/loss", math.nan)
    # exp overflows above 709; a loss like that has no perplexity worth reading.
    perplexity = human_count(math.exp(loss)) if loss < 700 else "-"
    row = f"eval step {step}  tok {human_count(tokens)}  loss {loss:.4f}  ppl {perplexity}"
    rows = []
    prefix = "eval/loss/"
    for name in sorted(name for name in values if name.startswith(prefix)):
        text = f"{name.removeprefix(prefix)} {values[name]:.4f}"
        if len(row) + 2 + len(text) > WIDTH:
            rows.append(row)
            row = "    "
        row += ("" if row == "    " else "  ") + text
    return [text[:WIDTH] for text in [*rows, row]]


class Console:
    """Prints for a person; keeps no numbers besides the times of recent steps.

    Args:
        total_steps: steps of the whole run.
        interval: a row every so many steps (the first and the last always).
        start_step: the step that training goes on from.
        stream: where to print; default: standard output.
        terminal: whether to draw a progress bar; default: whether the stream is a terminal.
    """

    def __init__(
        self,
        *,
        total_steps: int,
        interval: int = 1,
        start_step: int = 0,
        stream: TextIO | None = None,
        terminal: bool | None = None,
    ) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._total_steps = total_steps
        self._interval = max(1, interval)
        self._first_step = start_step + 1
        self._recent: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._terminal = self._stream.isatty() if terminal is None else terminal

    def header(self, lines: Iterable[str]) -> None:
        """Lines as they are: versions, layout, parameters, data."""
        for line in lines:
            self._print(line)

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """The row of a step, and the bar on a terminal."""
        seconds = values.get("step_seconds", math.nan)
        if math.isfinite(seconds):
            self._recent.append(seconds)
        left = math.inf
        if self._recent:
            left = sum(self._recent) / len(self._recent) * max(0, self._total_steps - step)
        if (
            step % self._interval == 0
            or step == self._first_step
            or step >= self._total_steps
            or not math.isfinite(values.get("loss", math.nan))
        ):
            self._print(step_row(step, values, total_steps=self._total_steps, seconds_left=left))
        self._advance(step)

    def evaluation(self, step: int, tokens: int, values: Mapping[str, float]) -> None:
        """The rows of an evaluation."""
        for row in evaluation_rows(step, tokens, values):
            self._print(row)

    def warn(self, text: str) -> None:
        """One line that should not be overlooked, and stops nothing."""
        self._print(f"warning: {text}")

    def close(self) -> None:
        """Take the bar away and leave the terminal as it was. More than once is fine."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        self._terminal = False

    def _print(self, text: str) -> None:
        if self._progress is not None:
            # Markup and highlighting off: a path with brackets is text, not style.
            self._progress.console.print(
                text, markup=False, highlight=False, soft_wrap=True, emoji=False
            )
        else:
            print(text, file=self._stream, flush=True)

    def _advance(self, step: int) -> None:
        if not self._terminal:
            return
        if self._progress is None:
            self._start_bar(step)
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=step)

    def _start_bar(self, step: int) -> None:
        # Imported here: 0.1 s that a run without a terminal does not need.
        from rich.console import Console as RichConsole
        from rich.progress import BarColumn, Progress, TextColumn

        self._progress = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=60),
            TextColumn("{task.percentage:.1f}%"),
            console=RichConsole(file=self._stream),
            # Lines of other libraries must come out as they are, not through the bar.
            redirect_stdout=False,
            redirect_stderr=False,
            transient=True,
        )
        self._task = self._progress.add_task("steps", total=self._total_steps, completed=step)
        self._progress.start()
