"""Profiles of chosen steps: a trace for a viewer, a table of the dearest kernels, and on a GPU
where its memory was allocated. Other steps cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from megatron_ext.config.operations import ProfileOptions

FOLDER = "profile"
ROWS = 40  # of the table
MEMORY_EVENTS = 1_000_000  # allocations that a snapshot remembers, some 300 bytes each


class Profiler:
    """Watches the steps that the options name, on the ranks that they name.

    Writes `profile/step_<step>/rank_<rank>.trace.json.gz` (for Perfetto or chrome://tracing),
    `.kernels.txt` and, on a GPU, `.memory.pickle` (for pytorch.org/memory_viz) in the run folder.

    Args:
        folder: the run folder.
        options: steps and ranks.
        rank: this one.
        device: what it computes with.
        passes: layers of this rank times its micro-batches in a step.
    """

    def __init__(
        self,
        folder: Path,
        *,
        options: ProfileOptions,
        rank: int,
        device: torch.device,
        passes: int,
    ) -> None:
        self._folder = folder / FOLDER
        self._steps = frozenset(options.steps)
        self._here = rank in options.ranks
        self._memory = options.memory and device.type == "cuda"
        self._rank = rank
        self._on_gpu = device.type == "cuda"
        self._passes = passes
        self._kernels = 0

    def due(self, step: int) -> bool:
        """Whether some rank profiles this step; the same on every rank."""
        return step in self._steps

    @contextmanager
    def watching(self, step: int) -> Iterator[None]:
        """Around a step. What it writes, it writes at the end, which takes seconds for a long step.

        A step that raises leaves no trace, but the snapshot of its memory: of one that ran out of
        memory, that is what one wants to see.
        """
        self._kernels = 0
        if not (self.due(step) and self._here):
            yield
            return
        folder = self._folder / f"step_{step:08d}"
        folder.mkdir(parents=True, exist_ok=True)
        stem = folder / f"rank_{self._rank:05d}"
        activities = [ProfilerActivity.CPU]
        if self._on_gpu:
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.synchronize()  # what the step before has left is not this one's
        if self._memory:
            torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
        try:
            with profile(activities=activities) as recorded:
                yield
                if self._on_gpu:
                    torch.cuda.synchronize()
        finally:
            if self._memory:
                torch.cuda.memory._dump_snapshot(f"{stem}.memory.pickle")
                torch.cuda.memory._record_memory_history(enabled=None)
        recorded.export_chrome_trace(f"{stem}.trace.json.gz")
        self._kernels = count_kernels(recorded.events(), on_gpu=self._on_gpu)
        averages = recorded.key_averages()
        order = "self_device_time_total" if self._on_gpu else "self_cpu_time_total"
        table = averages.table(sort_by=order, row_limit=ROWS, max_name_column_width=80)
        what = "kernels on the GPU" if self._on_gpu else "operators on the CPU"
        stem.with_name(f"{stem.name}.kernels.txt").write_text(
            f"step {step}, rank {self._rank}: {self._kernels} {what}, {self.kernels:.1f} a layer "
            f"and micro-batch\n{table}\n"
        )

    @property
    def kernels(self) -> float:
        """Kernels a layer and micro-batch of the step just watched; 0 where it was not, and on
        a pipeline stage without layers."""
        return self._kernels / self._passes if self._passes else 0.0

    def place(self, step: int) -> str:
        """Where the files of a step are, relative to the run folder."""
        return f"{FOLDER}/step_{step:08d}/"


def count_kernels(events: list[FunctionEvent], *, on_gpu: bool) -> int:
    """Kernels that ran on a GPU, copies left out; on a CPU operators that are no part of another.

    Args:
        events: as `torch.profiler.profile.events` gives them.
        on_gpu: which of the two.
    """
    if on_gpu:
        return sum(
            event.device_type == DeviceType.CUDA
            and not event.is_user_annotation
            and not event.name.startswith(("Memcpy", "Memset"))
            for event in events
        )
    return sum(
        event.name.startswith("aten::")
        and not (event.cpu_parent is not None and event.cpu_parent.name.startswith("aten::"))
        for event in events
    )
