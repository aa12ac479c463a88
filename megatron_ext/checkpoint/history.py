"""Which parameters were trained when: how many updates the moments of each have seen.

Adam's bias correction counts the updates of a parameter's moments. A parameter that rested has seen
fewer than the run has made, and one whose moments were reset fewer still; so each such set of
parameters has a parameter group with a step count of its own, which is that of the run less `late`.
No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_ext.config.trainable import Trainable

KEY = "history"  # in what a checkpoint says of itself


@dataclass(frozen=True)
class Segment:
    """A stretch of training under one rule.

    Attributes:
        rule: what was trained.
        reset: whether parameters that rested just before began with moments of zero.
        updates: made in it.
    """

    rule: Trainable
    reset: bool = False
    updates: int = 0


@dataclass(frozen=True)
class History:
    """Segments in order; empty before training."""

    segments: tuple[Segment, ...] = ()

    @classmethod
    def read(cls, ours: Mapping[str, Any]) -> History:
        """Of what a checkpoint says of itself; before there was a choice, all was trained."""
        saved = ours.get(KEY)
        if saved is None:
            return cls((Segment(Trainable(), updates=int(ours["optimizer_step"])),))
        return cls(
            tuple(
                Segment(
                    Trainable(tuple(entry["trainable"]), int(entry["frozen_layers"])),
                    reset=bool(entry["reset"]),
                    updates=int(entry["updates"]),
                )
                for entry in saved
            )
        )

    def written(self, *, total: int) -> list[dict[str, Any]]:
        """As plain JSON, when the run has made `total` updates."""
        *before, last = self.segments
        last = replace(last, updates=total - sum(segment.updates for segment in before))
        return [
            {
                "trainable": list(segment.rule.names),
                "frozen_layers": segment.rule.frozen_layers,
                "reset": segment.reset,
                "updates": segment.updates,
            }
            for segment in (*before, last)
        ]

    def then(self, rule: Trainable, *, reset: bool) -> History:
        """With training under `rule` from here on."""
        if self.segments and self.segments[-1].rule == rule:
            return self
        return History((*self.segments, Segment(rule, reset=reset)))

    @property
    def rule(self) -> Trainable:
        """What is trained now."""
        return self.segments[-1].rule if self.segments else Trainable()

    def late(self, parameter: str) -> int:
        """Updates of the run that the moments of a parameter have not seen."""
        total = seen = 0
        rested = False
        for segment in self.segments:
            trained = segment.rule.trains(parameter)
            if trained and rested and segment.reset:
                seen = 0
            seen += segment.updates if trained else 0
            total += segment.updates
            rested = not trained
        return total - seen

    def keeps(self, parameter: str) -> bool:
        """Whether a checkpoint of now holds moments of a parameter, trained or not."""
        return any(segment.rule.trains(parameter) for segment in self.segments)

    def begins_anew(self, parameter: str, saved: History) -> bool:
        """Whether the moments of a parameter are zeros after loading a checkpoint.

        Args:
            saved: the history in the checkpoint, of which this one is the continuation.
        """
        if not saved.keeps(parameter):
            return True
        changed = len(self.segments) > len(saved.segments)
        return changed and self.segments[-1].reset and not saved.rule.trains(parameter)
