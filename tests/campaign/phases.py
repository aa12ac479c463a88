"""Kills a rank of a run from inside, in a chosen phase: `Launcher.start(before=...)` calls `arm`.

From inside, so that the phase is the one that was meant, however busy the machine is.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from megatron_ext.checkpoint import checksums, paths, writing
from megatron_ext.checkpoint.save import Checkpointer
from megatron_ext.data.stream import TokenStream
from megatron_ext.train import step


@dataclass(frozen=True)
class Kill:
    """Which process dies when.

    Attributes:
        phase: a name in `PHASES`.
        rank: that dies.
        count: at which occurrence of the phase since the start, from 1.
        point: where in the phase, in [0, 1).
        group: with its helpers, as a cluster kills; else alone, as the kernel does when memory is
            full.
    """

    phase: str
    rank: int
    count: int
    point: float
    group: bool

    @property
    def before(self) -> str:
        """What `Launcher.start` is given."""
        values = ",".join(str(value) for value in asdict(self).values())
        return f"tests.campaign.phases:arm:{values}"


def arm(text: str) -> None:
    """Called in the process of each rank before it starts."""
    phase, rank, count, point, group = text.split(",")
    kill = Kill(phase, int(rank), int(count), float(point), group == "True")
    if int(os.environ.get("RANK", "0")) == kill.rank:
        PHASES[phase](kill)


def _die(kill: Kill, process: int = 0) -> None:
    if kill.group:
        os.killpg(0, signal.SIGKILL)
    os.kill(process or os.getpid(), signal.SIGKILL)


def _wrap(
    owner: Any, name: str, kill: Kill, begin: Callable[[], None], when: Callable[..., bool]
) -> None:
    """Call `begin` at the chosen occurrence of a function, and die at its end at the latest."""
    real, seen = getattr(owner, name), [0]

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        seen[0] += when(*args, **kwargs)
        if seen[0] != kill.count or not when(*args, **kwargs):
            return real(*args, **kwargs)
        begin()
        result = real(*args, **kwargs)
        _die(kill)
        return result

    setattr(owner, name, wrapped)


def _always(*args: Any, **kwargs: Any) -> bool:
    return True


def _timer(kill: Kill, longest: float) -> Callable[[], None]:
    return lambda: threading.Timer(kill.point * longest, _die, [kill]).start()


def _data(kill: Kill) -> None:
    def training(self: TokenStream, *args: Any) -> bool:
        return self.facts["split"] == "train"

    _wrap(TokenStream, "read", kill, lambda: _die(kill) if kill.point < 0.5 else None, training)


def _forward(kill: Kill) -> None:
    """Before a module's forward pass, or at the end of the last backward pass."""
    left = [int(kill.point * 250)]

    def begin() -> None:
        def hook(*_: Any) -> None:
            left[0] -= 1
            if left[0] < 0:
                _die(kill)

        torch.nn.modules.module.register_module_forward_pre_hook(hook)

    def training(*args: Any, forward_only: bool) -> bool:
        return not forward_only

    _wrap(step, "run_passes", kill, begin, training)


def _optimizer(kill: Kill) -> None:
    _wrap(step, "apply_update", kill, _timer(kill, 0.01), _always)


def _save(kill: Kill) -> None:
    """Before the writer is forked: gathering, planning, `extra.json`."""
    _wrap(Checkpointer, "save", kill, _timer(kill, 0.2), _always)


def _in_writer(kill: Kill, victim: Callable[[], int]) -> None:
    real, saves = writing.with_checksums, [0]

    def counted(request: Any, **carried: Any) -> Any:
        saves[0] += 1
        return real(request, **carried)

    write, left = checksums.ChecksumStream.write, [1 + int(kill.point * 60)]

    def writing_one(self: checksums.ChecksumStream, data: Any) -> int:
        left[0] -= 1
        if saves[0] == kill.count and left[0] == 0:
            _die(kill, victim())
        return write(self, data)

    from megatron_ext.checkpoint import save

    save.with_checksums = counted
    checksums.ChecksumStream.write = writing_one


def _writing(kill: Kill) -> None:
    """The run dies while its writer writes."""
    _in_writer(kill, os.getppid)


def _writer(kill: Kill) -> None:
    """The writer dies, and the run lives on to notice."""
    _in_writer(Kill(**{**asdict(kill), "group": False}), os.getpid)


def _finalize(kill: Kill) -> None:
    """Between the steps that make a written folder the latest checkpoint."""
    edges: list[tuple[Any, str]] = [
        (checksums, "write"),
        (os, "fsync"),
        (os, "rename"),
        (paths, "point"),
        (os, "replace"),
        (paths, "prune"),
        (shutil, "rmtree"),
    ]
    number = int(kill.point * 2 * len(edges))
    owner, name = edges[number // 2]

    def begin() -> None:
        real = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if number % 2 == 0:
                _die(kill)
            result = real(*args, **kwargs)
            _die(kill)
            return result

        setattr(owner, name, wrapped)

    _wrap(Checkpointer, "_publish", kill, begin, _always)


PHASES: dict[str, Callable[[Kill], None]] = {
    "data": _data,
    "forward": _forward,
    "optimizer": _optimizer,
    "save": _save,
    "writing": _writing,
    "writer": _writer,
    "finalize": _finalize,
}
