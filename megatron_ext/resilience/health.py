"""Is this step sound? Judged from its loss and gradient norm, before the weights are touched.

A spike is measured against the last sound steps by median and median absolute deviation, which a
few outliers do not move (Rousseeuw and Croux 1993: 1.4826 MAD estimates a standard deviation).
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_ext.config.operations import HealthAction, ResilienceOptions

# From harmless to grave: ranks agree on the gravest that any of them found.
GRAVITY = (
    HealthAction.ignore,
    HealthAction.warn,
    HealthAction.skip,
    HealthAction.rewind,
    HealthAction.halt,
)
# Losses of a converged model hardly scatter: below this share of the median nothing is a spike.
SMALLEST_DEVIATION = 0.01


@dataclass(frozen=True)
class Verdict:
    """What to do with a step, and why in words; `ignore` with no words for a sound one.

    `nonfinite` says that a number is not finite, so that it pays to look for the first such one.
    """

    action: HealthAction
    why: str
    nonfinite: bool = False


SOUND = Verdict(HealthAction.ignore, "")


class Health:
    """The recent past of a run, and what it says about the next step.

    The same numbers give the same verdicts, and `state` goes into the checkpoint, so that a resumed
    run judges as an uninterrupted one.

    Args:
        options: policies and thresholds.
    """

    def __init__(self, options: ResilienceOptions) -> None:
        self._options = options
        self._losses: deque[float] = deque(maxlen=options.window_steps)
        self._norms: deque[float] = deque(maxlen=options.window_steps)
        self.skips_in_a_row = 0
        self.skipped = 0
        self.spikes = 0

    def judge(self, *, loss: float, grad_norm: float) -> Verdict:
        """The gravest finding. Changes nothing."""
        options = self._options
        if not math.isfinite(loss):
            return Verdict(options.nonfinite, f"the loss is {loss}", nonfinite=True)
        if not math.isfinite(grad_norm):
            why = f"the gradient norm is {grad_norm}"
            return Verdict(options.nonfinite, why, nonfinite=True)
        findings = [SOUND, *self._loss_spike(loss), *self._norm_spike(grad_norm)]
        return max(findings, key=lambda finding: GRAVITY.index(finding.action))

    def _loss_spike(self, loss: float) -> list[Verdict]:
        options = self._options
        if not self._enough(self._losses):
            return []
        middle = statistics.median(self._losses)
        spread = 1.4826 * statistics.median(abs(value - middle) for value in self._losses)
        limit = middle + options.loss_deviations * max(spread, SMALLEST_DEVIATION * abs(middle))
        if loss <= limit:
            return []
        words = f"the loss {loss:.4f} is above {limit:.4f} (median {middle:.4f} of recent steps)"
        return [Verdict(options.loss_spike, words)]

    def _norm_spike(self, norm: float) -> list[Verdict]:
        options = self._options
        if not self._enough(self._norms):
            return []
        middle = statistics.median(self._norms)
        if norm <= options.norm_factor * middle:
            return []
        words = f"the gradient norm {norm:.3g} is above {options.norm_factor:g} x {middle:.3g}"
        return [Verdict(options.norm_spike, f"{words}, the median of recent steps")]

    def _enough(self, values: deque[float]) -> bool:
        return 2 * len(values) >= self._options.window_steps

    def limited(self, verdict: Verdict) -> Verdict:
        """A skip too many becomes a halt."""
        most = self._options.max_skips
        if verdict.action is HealthAction.skip and self.skips_in_a_row >= most:
            why = f"{verdict.why}; {most} steps in a row were skipped before"
            return replace(verdict, action=HealthAction.halt, why=why)
        return verdict

    def note(self, verdict: Verdict, *, loss: float, grad_norm: float) -> None:
        """Take a step into account that was done, or skipped."""
        if verdict.action is HealthAction.skip:
            self.skips_in_a_row += 1
            self.skipped += 1
            return
        self.skips_in_a_row = 0
        self.spikes += verdict.action is HealthAction.warn
        self._losses.append(loss)
        self._norms.append(grad_norm)

    def begin_stage(self) -> None:
        """Measure no step of a stage against those of the one before, of another length or data."""
        self._losses.clear()
        self._norms.clear()

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as plain JSON."""
        return {
            "losses": list(self._losses),
            "norms": list(self._norms),
            "skips_in_a_row": self.skips_in_a_row,
            "skipped": self.skipped,
            "spikes": self.spikes,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` gave; an empty one (an older checkpoint) starts anew."""
        for name, values in (("losses", self._losses), ("norms", self._norms)):
            values.clear()
            values.extend(float(value) for value in state.get(name, ()))
        for name in ("skips_in_a_row", "skipped", "spikes"):
            setattr(self, name, int(state.get(name, 0)))
