"""How much of a step a rank waits for the others, without stopping the device for it.

megatron-core calls `timers(name).start()` and `.stop()` of its configuration around the messages
between pipeline stages and around the reduction of gradients. `WaitClock` stands there. On a GPU it
notes events in the stream and reads them once the step has waited for the device anyway; on a CPU,
whose communication blocks, the clock of the host will do.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_ext.resilience.stragglers import RankTimes, Stragglers, probe_seconds
from megatron_ext.train.state import TrainState
from megatron_ext.train.step import LOSSES

# All but the first are megatron-core's names. What else it times contains these, or is work.
WAITS = frozenset(
    {
        LOSSES,
        "all-grads-sync",
        "non-tensor-parallel-grads-all-reduce",
        "embedding-grads-all-reduce",
        "forward-recv",
        "forward-send",
        "forward-send-forward-recv",
        "forward-send-backward-recv",
        "forward-backward-send-forward-backward-recv",
        "backward-recv",
        "backward-send",
        "backward-send-backward-recv",
        "backward-send-forward-recv",
    }
)


class WaitClock:
    """Adds up what is timed under the names of `WAITS`, between `begin` and `end`.

    Args:
        device: of the ranks' backend.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._running = False
        self._marks: list[Any] = []

    def begin(self) -> None:
        """From here on it counts."""
        self._running, self._marks = True, []

    def end(self) -> float:
        """Seconds since `begin`. The device must have been waited for since the last `stop`."""
        self._running = False
        pairs = zip(self._marks[::2], self._marks[1::2], strict=True)
        if self._on_gpu:
            return sum(first.elapsed_time(last) for first, last in pairs) / 1000
        return float(sum(last - first for first, last in pairs))

    def __call__(self, name: str, log_level: int = 0) -> WaitClock | _Nothing:
        """megatron-core's way to a timer. The waits of a rank do not overlap: one timer does."""
        return self if self._running and name in WAITS else _NOTHING

    def start(self, barrier: bool = False) -> None:
        """A wait begins. A barrier would hide who waits: there is none."""
        self._mark()

    def stop(self, barrier: bool = False) -> None:
        """It ends."""
        self._mark()

    def _mark(self) -> None:
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())


class _Nothing:
    """The timer of what is not counted."""

    def start(self, barrier: bool = False) -> None:
        """Nothing."""

    def stop(self, barrier: bool = False) -> None:
        """Nothing."""


_NOTHING = _Nothing()


class StragglerWatch:
    """Call `begin` before every training step and `end` after it.

    With one rank, and without `logging.rank_interval`, both do nothing.

    Args:
        state: whose steps are timed.
        folder: the run folder; rank 0 leaves the last table there.
    """

    def __init__(self, state: TrainState, folder: Path) -> None:
        self._state, self._folder = state, folder
        self._every = state.config.logging.rank_interval
        self._on = self._every > 0 and state.runtime.world_size > 1
        self._clock = WaitClock(state.runtime.device)
        self._seconds = torch.zeros(3, dtype=torch.float64)  # work, data, wait
        self._steps = 0
        self._warm = False
        self._hosts: list[str] = []
        state.tc.timers = self._clock if self._on else None
        if self._on:
            names: list[Any] = [None] * state.runtime.world_size
            dist.all_gather_object(names, os.uname().nodename)
            self._hosts = names

    def begin(self) -> None:
        """A step begins."""
        if self._on:
            self._clock.begin()

    def end(self, values: dict[str, float]) -> Stragglers | None:
        """A step is done.

        Args:
            values: of the step, with this rank's own times.

        Returns:
            Every `logging.rank_interval` steps the table, on every rank; then it is collective.
        """
        if not self._on:
            return None
        wait, data = self._clock.end(), values["data/wait_seconds"]
        # The first step of a launch compiles and allocates: it says nothing of the others.
        if self._warm:
            work = values["step_seconds"] - wait - data
            self._seconds += torch.tensor([work, data, wait], dtype=torch.float64)
            self._steps += 1
        self._warm = True
        step = self._state.step
        if step % self._every or not self._steps:
            return None
        found = self._gather(step)
        self._seconds.zero_()
        self._steps = 0
        if self._state.runtime.rank == 0:
            found.write(self._folder)
        return found

    def _gather(self, step: int) -> Stragglers:
        runtime, config = self._state.runtime, self._state.config
        stage = float(self._state.mesh.pp.rank())
        means = (self._seconds / self._steps).tolist()
        own = torch.tensor(
            [stage, *means, probe_seconds(runtime.device)],
            dtype=torch.float64,
            device=runtime.device,
        )
        table = own.new_empty(runtime.world_size * len(own))
        dist.all_gather_into_tensor(table, own)
        rows = table.view(runtime.world_size, -1).tolist()
        times = [
            RankTimes(rank, host, int(row[0]), *row[1:])
            for rank, (host, row) in enumerate(zip(self._hosts, rows, strict=True))
        ]
        excess = config.resilience.straggler_excess
        return Stragglers(step - self._steps + 1, step, excess, times)
