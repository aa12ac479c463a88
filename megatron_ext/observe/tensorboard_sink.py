"""TensorBoard events, by the tensorboard package alone: torch's writer would import torch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path


class TensorboardSink:
    """Scalars in `folder/tensorboard`, under the names of the registry.

    Args:
        folder: the run folder.
        resume_step: rows of earlier launches after this step are hidden by TensorBoard.
        warn: called with one line when writing fails. Nothing is ever raised.
    """

    def __init__(self, folder: Path, *, resume_step: int, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._open = False
        try:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.event_file_writer import EventFileWriter

            self._event, self._summary = Event, Summary
            self._writer = EventFileWriter(str(folder / "tensorboard"))
            # The START of a session at a step is how TensorBoard is told that what an earlier file
            # holds from this step on has been taken back.
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(
                Event(wall_time=time.time(), step=resume_step + 1, session_log=start)
            )
            self._open = True
        # A full disk, or a tensorboard whose private parts (there is no public writer without
        # torch) have moved: training goes on without events. So below.
        except Exception as error:
            warn(f"tensorboard: {type(error).__name__}: {error}; no events are written")

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """One row; values that are not finite are left out."""
        if not self._open:
            return
        values = [
            self._summary.Value(tag=name, simple_value=value)
            for name, value in row.items()
            if name != "step" and math.isfinite(value)
        ]
        try:
            self._writer.add_event(
                self._event(wall_time=time.time(), step=step, summary=self._summary(value=values))
            )
        except Exception as error:
            self._open = False
            self._warn(f"tensorboard: {type(error).__name__}: {error}; no more events are written")

    def close(self) -> None:
        """Flush and end."""
        if not self._open:
            return
        self._open = False
        try:
            self._writer.close()
        except Exception as error:
            self._warn(f"tensorboard: {type(error).__name__}: {error} at the end")
