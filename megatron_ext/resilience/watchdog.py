"""A thread on every rank that notices when training stands still, says who waits for whom, and ends
the run with exit code 50, so that a launcher can start it again.

Ranks tell each other through files in the run folder, not through torch: where a rank hangs, its
network cannot be relied on. What a rank was doing is read off its main thread's stack, and with
NCCL, whose collectives run behind Python's back, off NCCL's flight recorder too.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from megatron_ext.observe.run_files import replace_file, write_exit

EXIT_CODE = 50
FOLDER = "hang"
# Frames between a collective and whoever wanted it.
_PASSED = re.compile(r"contextlib\.py$|[/\\]torch[/\\]")
# Ranks notice within moments of each other; then one of them sums up what all of them wrote.
GATHER_SECONDS = 5.0


class Watchdog:
    """Watches while it is entered as a context manager.

    Args:
        folder: the run folder, seen by every rank.
        rank: this one.
        world_size: number of ranks.
        limit_seconds: longest time without a `beat`; 0: does nothing.
        gather_seconds: how long to wait for the other ranks' reports.
        end: called with the exit code at last; default: ends the process at once.
    """

    def __init__(
        self,
        folder: Path,
        *,
        rank: int,
        world_size: int,
        limit_seconds: float,
        gather_seconds: float = GATHER_SECONDS,
        end: Callable[[int], None] = os._exit,
    ) -> None:
        self._folder = folder / FOLDER
        self._run_folder = folder
        self._rank = rank
        self._world_size = world_size
        self._limit = limit_seconds
        self._gather = gather_seconds
        self._end = end
        self._main = threading.main_thread().ident
        self._step = 0
        self._doing = "starting"
        self._last = time.monotonic()
        self._leave = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if self._limit > 0:
            (self._folder / _name(self._rank)).unlink(missing_ok=True)
            self._last = time.monotonic()
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._leave.set()
        if self._thread is not None:
            self._thread.join()

    def beat(self, step: int, doing: str) -> None:
        """Something was finished; `doing` comes next. Costs nothing."""
        self._step, self._doing, self._last = step, doing, time.monotonic()

    @property
    def doing(self) -> str:
        """What the last `beat` said, in words."""
        return f"after step {self._step}, {self._doing}"

    def _watch(self) -> None:
        # Checked ten times in a limit: late by a tenth at most.
        while not self._leave.wait(self._limit / 10):
            if time.monotonic() - self._last > self._limit:
                self._report()
                return

    def _report(self) -> None:
        """Write down where this rank stands; then, on the first rank that did, sum up and end."""
        self._folder.mkdir(parents=True, exist_ok=True)
        frame = sys._current_frames().get(self._main or 0)
        stack = traceback.format_stack(frame) if frame is not None else ["(no stack)\n"]
        report = {
            "rank": self._rank,
            "host": os.uname().nodename,
            "process": os.getpid(),
            "step": self._step,
            "doing": self._doing,
            "place": place(frame),
            "nccl": nccl_collectives(),
            "stack": stack,
        }
        replace_file(self._folder / _name(self._rank), json.dumps(report, indent=1).encode())
        with (self._folder / f"rank_{self._rank:05d}.stacks").open("w") as file:
            faulthandler.dump_traceback(file=file, all_threads=True)
        if self._leave.wait(self._gather):
            return  # it goes on after all
        reports = read_reports(self._folder, self._world_size)
        if min(reports) == self._rank:
            words = summary(reports, self._world_size, seconds=self._limit)
            print(words, file=sys.stderr, flush=True)
            write_exit(self._run_folder, code=EXIT_CODE, reason=words, step=self._step)
        else:
            # The first process that ends makes the launcher end the others: not before the summary.
            time.sleep(self._gather)
        self._end(EXIT_CODE)


def _name(rank: int) -> str:
    return f"rank_{rank:05d}.json"


def read_reports(folder: Path, world_size: int) -> dict[int, dict[str, Any]]:
    """The reports of ranks that wrote one, by rank."""
    reports = {}
    for rank in range(world_size):
        try:
            reports[rank] = json.loads((folder / _name(rank)).read_text())
        except (OSError, ValueError):
            continue
    return reports


def place(frame: FrameType | None) -> str:
    """Where a thread stands, in words: the collective and who called it, or the innermost line.

    Returns:
        `all_reduce of rank 0 1 (megatron_ext/train/step.py:190 summed_passes)`, or
        `not in a collective: time.py:10 work`.
    """
    innermost = frame
    collective = ""
    while frame is not None:
        file, function = frame.f_code.co_filename, frame.f_code.co_name
        if file.endswith("distributed_c10d.py"):
            # The outermost of torch's functions: what was called, not what it is made of.
            name = "several collectives" if function == "_coalescing_manager" else function
            collective = name + _group_words(frame.f_locals.get("group"))
        elif collective and not _PASSED.search(file):
            return f"{collective} ({_short(file)}:{frame.f_lineno} {function})"
        frame = frame.f_back
    if collective:
        return collective
    if innermost is None:
        return "unknown"
    code = innermost.f_code
    return f"not in a collective: {_short(code.co_filename)}:{innermost.f_lineno} {code.co_name}"


def _group_words(group: Any) -> str:
    if group is None:
        return " of all ranks"
    import torch.distributed as dist

    try:
        ranks = dist.get_process_group_ranks(group)
    except (ValueError, KeyError, RuntimeError):
        return ""
    shown = " ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")
    return f" of rank{'s' if len(ranks) > 1 else ''} {shown}"


def _short(file: str) -> str:
    return os.sep.join(file.split(os.sep)[-3:])


def nccl_collectives() -> list[str]:
    """NCCL's collectives that were begun and not finished, oldest first; empty without NCCL."""
    import torch

    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", None)
    if dump is None or not torch.cuda.is_available():
        return []
    try:
        content = json.loads(dump(includeCollectives=True, onlyActive=True))
    except (RuntimeError, TypeError, ValueError):  # another version's recorder
        return []
    entries = content.get("entries", []) if isinstance(content, dict) else []
    return [
        f"{entry.get('profiling_name')} number {entry.get('collective_seq_id')} of group "
        f"{entry.get('process_group')}, {entry.get('state')}"
        for entry in entries[:4]
    ]


def summary(reports: Mapping[int, Mapping[str, Any]], world_size: int, *, seconds: float) -> str:
    """Who waits where, ranks of one place together, and who never came."""
    places: dict[str, list[int]] = {}
    for rank, report in sorted(reports.items()):
        began = "; ".join(report.get("nccl") or ())
        text = f"step {report['step'] + 1}, {report['doing']}: {report['place']}"
        places.setdefault(text + (f" [{began}]" if began else ""), []).append(rank)
    lines = [f"nothing was finished for {seconds:g} s:"]
    for text, ranks in sorted(places.items(), key=lambda item: len(item[1])):
        hosts = sorted({str(reports[rank]["host"]) for rank in ranks})
        shown = f" on {', '.join(hosts)}" if len(hosts) <= 4 else f" on {len(hosts)} hosts"
        lines.append(f"  {_ranks(ranks)}{shown}: {text}")
    silent = [rank for rank in range(world_size) if rank not in reports]
    if silent:
        lines.append(f"  {_ranks(silent)}: no report; stopped, dead or without the run folder")
    suspects = silent or [
        rank
        for text, ranks in places.items()
        if "not in a collective" in text and "[" not in text
        for rank in ranks
    ]
    if suspects and len(suspects) < world_size:
        lines.append(f"  {_ranks(sorted(suspects))} never arrived where the others wait")
    lines.append(f"stacks of every thread: {FOLDER}/ in the run folder")
    return "\n".join(lines)


def _ranks(ranks: list[int]) -> str:
    """`rank 3`, `ranks 0-2 5`."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    shown = [str(a) if a == b else f"{a}-{b}" for a, b in spans[:8]]
    more = " ..." if len(spans) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {' '.join(shown)}{more}"
