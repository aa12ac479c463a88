"""Requests from outside to stop or to save: signals to any rank, files in the run folder.

A request is only noted here. All ranks agree on it at the edge of a step (`agreement`), so no rank
stops or saves alone, and a rank whose peer has died never gets to save.
"""

from __future__ import annotations

import contextlib
import signal
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

STOP, SAVE = "stop", "save"
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
# How a request to stop travels between ranks: the number of the signal, or this.
STOP_FILE = 1000


@dataclass(frozen=True)
class Request:
    """What is wanted; numbers, so that ranks can agree by their maximum.

    Attributes:
        stop: 0, the number of a signal, or `STOP_FILE`.
        save: 1 if a save was asked for.
    """

    stop: int = 0
    save: int = 0


def stop_reason(stop: int) -> str:
    """The words of `exit.json` for a request to stop."""
    return "stop file" if stop == STOP_FILE else signal.Signals(stop).name


class Requests:
    """Listens while it is entered as a context manager; the old handlers come back afterwards.

    SIGTERM (clusters, torchrun), SIGUSR1 (our launchers, ahead of a time limit) and SIGINT (Ctrl-C)
    ask to save and stop. SIGTERM and SIGUSR1 may come again, and do (SLURM signals torchrun and its
    ranks, and torchrun its ranks once more): nothing changes. A second SIGINT is a person who will
    not wait: it raises KeyboardInterrupt at once, and nothing is saved.
    """

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._signal = 0
        self._interrupts = 0
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Self:
        for number in SIGNALS:
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            # None: a handler that was not installed from Python cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                raise KeyboardInterrupt
        self._signal = self._signal or number

    def watch(self, folder: Path) -> None:
        """Look for the files `stop` and `save` in the run folder too; one rank does. Those that an
        earlier launch has left are removed; where this one looks already, they are for it."""
        if folder != self._folder:
            self._folder = folder
            self.clear(STOP, SAVE)

    def pending(self) -> Request:
        """What was asked for until now, as far as this rank knows."""
        stop, save = self._signal, 0
        if self._folder is not None:
            save = int((self._folder / SAVE).exists())
            if not stop and (self._folder / STOP).exists():
                stop = STOP_FILE
        return Request(stop=stop, save=save)

    def clear(self, *names: str) -> None:
        """Remove the named request files, which have been acted on."""
        if self._folder is not None:
            for name in names:
                with contextlib.suppress(OSError):
                    (self._folder / name).unlink(missing_ok=True)
