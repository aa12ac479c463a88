"""What the watchdog reads off a process, and how it sums up many."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_ext.observe.run_files import read_exit
from megatron_ext.resilience import watchdog
from megatron_ext.resilience.watchdog import Watchdog, place, summary
from tests.support.one_rank import one_rank


class Looking:
    """Is pickled inside a collective, and looks at the stack there, as the watchdog would."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __reduce__(self) -> tuple[type, tuple[()]]:
        self.seen.append(place(inspect.currentframe()))
        return (Looking, ())


def test_a_stack_says_which_collective_waits() -> None:
    looking = Looking()
    with one_rank():
        dist.broadcast_object_list([looking])
    assert looking.seen[0].startswith("broadcast_object_list of rank 0 (")
    assert "test_watchdog.py:" in looking.seen[0]
    here = place(inspect.currentframe())
    assert here.startswith("not in a collective: tests/unit/test_watchdog.py:")


def report(step: int, where: str, *, host: str = "a", nccl: tuple[str, ...] = ()) -> dict[str, Any]:
    return {
        "step": step,
        "doing": "training step",
        "place": where,
        "host": host,
        "nccl": nccl,
    }


def test_the_rank_that_never_arrived_is_named() -> None:
    waits = "all_reduce of all ranks (step.py:1 f)"
    reports = {rank: report(4, waits, host=f"h{rank // 2}") for rank in range(4)}
    words = summary(reports, 6, seconds=60)
    assert "ranks 0-3 on h0, h1: step 5, training step: all_reduce" in words
    assert "ranks 4-5: no report" in words
    assert "ranks 4-5 never arrived where the others wait" in words
    reports[1] = report(4, "not in a collective: time.py:1 sleep")
    assert "rank 1 never arrived" in summary(reports, 4, seconds=60)
    # NCCL: Python waits for the device, whatever it is that the device waits for.
    on_gpu = {
        rank: report(4, "not in a collective: x", nccl=("nccl:all_reduce",)) for rank in (0, 1)
    }
    words = summary(on_gpu, 2, seconds=60)
    assert "[nccl:all_reduce]" in words
    assert "never arrived" not in words


def test_it_ends_the_run_once_nothing_moves_and_not_before(tmp_path: Path) -> None:
    codes: list[int] = []
    with Watchdog(
        tmp_path, rank=0, world_size=1, limit_seconds=0.2, gather_seconds=0.0, end=codes.append
    ) as dog:
        for step in range(10):
            dog.beat(step, "training step")
            assert not dog._leave.wait(0.05)
        assert codes == []
        dog._thread.join(30)  # type: ignore[union-attr]
    assert codes == [watchdog.EXIT_CODE]
    found = read_exit(tmp_path) or {}
    assert (found["code"], found["step"]) == (50, 9)
    assert (tmp_path / "hang" / "rank_00000.stacks").stat().st_size > 0


def test_no_limit_no_watchdog(tmp_path: Path) -> None:
    with Watchdog(tmp_path, rank=0, world_size=1, limit_seconds=0) as dog:
        assert dog._thread is None
