"""Which rank holds the others up: the table of what each did with its time, and whom it names.

Where ranks exchange data inside layers (tensor, context and expert parallelism) they go at the
pace of the slowest, and none of them seems to wait. Hence a probe beside the times: a fixed piece
of work without communication, which a throttled or broken device takes longer for.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from megatron_ext.observe.run_files import replace_file

FILE = "ranks.json"
SHOWN = 5  # slow ranks that a warning lists
PROBES = 3  # the fastest counts: the others were disturbed


@dataclass(frozen=True)
class RankTimes:
    """One rank's times, in seconds, the mean of the steps since the last table.

    Attributes:
        host: its name.
        stage: pipeline stage; stages have other work, so ranks are compared within one.
        work: of a step, neither waiting for ranks nor for data.
        data: of a step, waiting for data.
        wait: of a step, waiting for other ranks, or sending to them.
        probe: of a fixed matrix product.
    """

    rank: int
    host: str
    stage: int
    work: float
    data: float
    wait: float
    probe: float


@dataclass(frozen=True)
class Slow:
    """A rank that is slower than its like: by `own` and `probe`, times the median."""

    times: RankTimes
    own: float
    probe: float


@dataclass(frozen=True)
class Stragglers:
    """The table of some steps; the same on every rank.

    Attributes:
        first, last: the steps, both included.
        excess: a rank is named when it takes this share more than the median.
    """

    first: int
    last: int
    excess: float
    times: Sequence[RankTimes]

    def compared(self) -> list[Slow]:
        """Every rank against the median of its stage, by rank; against that of all ranks where a
        stage is one rank only. Of an even number the lower one: of two ranks the faster."""
        stages = defaultdict(list)
        for row in self.times:
            stages[row.stage].append(row)
        alone = any(len(rows) == 1 for rows in stages.values())
        own = {
            stage: statistics.median_low(
                row.work + row.data for row in (self.times if alone else rows)
            )
            for stage, rows in stages.items()
        }
        probe = statistics.median_low(row.probe for row in self.times)
        return [
            Slow(row, _ratio(row.work + row.data, own[row.stage]), _ratio(row.probe, probe))
            for row in self.times
        ]

    def slow(self) -> list[Slow]:
        """Those to name, the slowest first."""
        limit = 1 + self.excess
        named = [row for row in self.compared() if max(row.own, row.probe) > limit]
        return sorted(named, key=lambda row: max(row.own, row.probe), reverse=True)

    def metrics(self) -> dict[str, float]:
        """As `straggler/...`; a bounded number whatever the number of ranks."""
        rows = self.compared()
        own, probe = (max(rows, key=key) for key in (lambda r: r.own, lambda r: r.probe))
        step = [row.work + row.data + row.wait for row in self.times]
        wait = [row.wait / total for row, total in zip(self.times, step, strict=True) if total > 0]
        return {
            "straggler/ratio": own.own,
            "straggler/rank": float(own.times.rank),
            "straggler/probe_ratio": probe.probe,
            "straggler/probe_rank": float(probe.times.rank),
            "straggler/wait_share": statistics.median(wait) if wait else math.nan,
            "straggler/wait_share/min": min(wait, default=math.nan),
        }

    def warning(self) -> str:
        """The slow ranks as text, one a line; empty when there is none."""
        named = self.slow()
        if not named:
            return ""
        lines = [f"slow ranks in steps {self.first} to {self.last} (seconds a step):"]
        lines += [_line(row) for row in named[:SHOWN]]
        if len(named) > SHOWN:
            lines.append(f"  and {len(named) - SHOWN} more, see {FILE}")
        hosts = sorted({row.times.host for row in named})
        if len(hosts) <= 3 < len({row.host for row in self.times}):
            lines.append(f"  all on {', '.join(hosts)}")
        return "\n".join(lines)

    def write(self, folder: Path) -> None:
        """All ranks as `ranks.json` in the run folder; the table before is replaced."""
        record = {
            "first_step": self.first,
            "last_step": self.last,
            "ranks": [
                {**asdict(row.times), "ratio": row.own, "probe_ratio": row.probe}
                for row in self.compared()
            ],
        }
        replace_file(folder / FILE, (json.dumps(record, indent=1) + "\n").encode())


def _ratio(value: float, median: float) -> float:
    return value / median if median > 0 else 1.0


def _line(row: Slow) -> str:
    times = row.times
    text = (
        f"  rank {times.rank} on {times.host}: {row.own:.2f} x the median: working "
        f"{times.work:.3f}, waiting for data {times.data:.3f}, for ranks {times.wait:.3f}"
    )
    return text + f"; a matrix product alone takes {row.probe:.2f} x the median"


def probe_seconds(device: torch.device) -> float:
    """Time of a fixed piece of work on this device alone: 0.5 TFLOP in bf16 on a GPU (1 ms on an
    H200), 0.1 GFLOP in float32 on a CPU. Waits for the device."""
    gpu = device.type == "cuda"
    size, products = (2048, 32) if gpu else (256, 4)
    dtype = torch.bfloat16 if gpu else torch.float32
    x = torch.full((size, size), 1 / size, device=device, dtype=dtype)
    out = torch.empty_like(x)
    found = []
    with torch.no_grad():
        for _ in range(PROBES + 1):  # the first wakes the device up
            if gpu:
                torch.cuda.synchronize(device)
            begin = time.perf_counter()
            for _ in range(products):
                torch.matmul(x, x, out=out)
            if gpu:
                torch.cuda.synchronize(device)
            found.append(time.perf_counter() - begin)
    return min(found[1:])
