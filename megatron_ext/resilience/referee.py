"""What all ranks do with a step, decided together before the weights are touched."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from megatron_ext.config.operations import HealthAction
from megatron_ext.resilience.agreement import agree
from megatron_ext.resilience.health import GRAVITY, Health, Verdict
from megatron_ext.resilience.requests import Request, Requests


@dataclass(frozen=True)
class Decision:
    """The same on every rank.

    Attributes:
        verdict: on the step; only its words may differ between ranks.
        request: what was asked for from outside, to be done after the step.
    """

    verdict: Verdict
    request: Request


class Referee:
    """Judges every step and passes on requests, in one reduction of four integers a step.

    Args:
        health: judges; takes note of what was decided.
        requests: signals and files; None listens to nothing.
        device: of the ranks' backend.
    """

    def __init__(
        self, health: Health, requests: Requests | None = None, *, device: torch.device
    ) -> None:
        self.health = health
        self._requests = requests
        self._device = device

    def decide(self, *, loss: float, grad_norm: float) -> Decision:
        """Collective, between the gradient norm and the update, where the device is waited for
        anyway: on a GPU it costs the reduction and nothing else."""
        mine = self.health.limited(self.health.judge(loss=loss, grad_norm=grad_norm))
        asked = self._pending()
        gravity, nonfinite, stop, save = agree(
            (GRAVITY.index(mine.action), int(mine.nonfinite), asked.stop, asked.save),
            device=self._device,
        )
        verdict = replace(mine, action=GRAVITY[gravity], nonfinite=bool(nonfinite))
        if verdict.action is not mine.action:
            # Ranks that should have the same numbers do not: a fault of some rank's hardware.
            verdict = replace(verdict, why="another rank found other numbers, and those bad")
        if verdict.action not in (HealthAction.rewind, HealthAction.halt):
            self.health.note(verdict, loss=loss, grad_norm=grad_norm)
        return Decision(verdict, Request(stop=stop, save=save))

    def between_steps(self) -> Request:
        """A request that came while the run was starting or ending. Collective."""
        asked = self._pending()
        stop, save = agree((asked.stop, asked.save), device=self._device)
        return Request(stop=stop, save=save)

    def _pending(self) -> Request:
        return Request() if self._requests is None else self._requests.pending()
