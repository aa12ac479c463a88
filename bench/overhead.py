"""What watching a run costs: python bench/overhead.py [--bare 30] [--json FILE] [key=value ...]

Other words are overrides as for pretrain.py. Bare steps, with nothing around them, are timed first;
then, in the same process and of the same configuration, a run as pretrain.py makes it, with its
metrics, health checks and judging of losses. A run's time a step is what passes between two of its
rows; saves and evaluations are left out. One rank.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from common import Row, finish

from megatron_ext.config.compose import compose
from megatron_ext.observe.layer_history import is_due
from megatron_ext.observe.metrics import Metrics
from megatron_ext.parallel import runtime
from megatron_ext.train.main import train
from megatron_ext.train.state import build_state
from megatron_ext.train.step import train_step

WARM_UP = 5


def bare_step(words: list[str], *, steps: int) -> float:
    """Median seconds from the end of one step to that of the next, with nothing in between."""
    config = compose(words, world_size=1)
    state = build_state(config, runtime.start(config.run))
    for _ in range(WARM_UP):
        train_step(state)
    marks = [time.perf_counter()]
    for _ in range(steps):
        train_step(state)
        marks.append(time.perf_counter())
    runtime.stop()
    return statistics.median(b - a for a, b in pairwise(marks))


def watched_steps(words: list[str]) -> dict[int, float]:
    """Seconds from row to row of a whole run, by step."""
    marks: dict[int, float] = {}
    plain = Metrics.step

    def marked(self: Metrics, step: int, *args: Any, **keywords: Any) -> Any:
        result = plain(self, step, *args, **keywords)
        marks[step] = time.perf_counter()
        return result

    with patch.object(Metrics, "step", marked):  # rows have no time of day
        train(compose(words, world_size=1))
    return {step: marks[step] - marks[step - 1] for step in marks if step - 1 in marks}


def rows(bare: float, watched: dict[int, float], *, interval: int, total: int) -> list[Row]:
    """Beside the bare step: plain steps, those whose health is measured, and the mean of both."""
    kept = {step: seconds for step, seconds in watched.items() if step > WARM_UP}
    due = {step for step in kept if is_due(step, interval=interval, total_steps=total)}
    plain = statistics.median(seconds for step, seconds in kept.items() if step not in due)
    found: list[Row] = [{"step": "bare", "s": bare, "more": None}]
    found.append({"step": "of a run", "s": plain, "more": f"{100 * (plain / bare - 1):.2f} %"})
    # The last step's row comes before its save and evaluation, like any other.
    if due and interval:
        measured = statistics.median(kept[step] for step in due)
        mean = plain + (measured - plain) / interval
        found.append({"step": "health measured", "s": measured, "more": None})
        found.append(
            {
                "step": f"mean, one in {interval} measured",
                "s": mean,
                "more": f"{100 * (mean / bare - 1):.2f} %",
            }
        )
    return found


def main() -> None:
    """Times both, prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bare", type=int, default=30, help="bare steps")
    parser.add_argument("--json", type=Path, help="also write the table there")
    options, words = parser.parse_known_args()
    runtime.quiet()
    with tempfile.TemporaryDirectory() as name:
        words = ["train.steps=120", *words, f"run.dir={name}/run"]
        words += ["checkpoint.interval=0", "evaluate.interval_tokens=0"]
        bare = bare_step(words, steps=options.bare)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        watched = watched_steps(words)
        config = compose(words, world_size=1)
        table = rows(
            bare,
            watched,
            interval=config.logging.health_interval,
            total=config.train.steps,
        )
        finish({"what watching a run costs": table}, json_file=options.json)


if __name__ == "__main__":
    main()
