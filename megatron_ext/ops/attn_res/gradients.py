"""The gradient of a source that many mixes read, added up where it lies.

Autograd adds the gradients that each reader gives: three passes over memory for each but the first.
A kernel that knows of the sum adds to it while it writes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

NAME = "_gradient_sum"


class GradientSum:
    """What readers have added up so far in a backward pass."""

    def __init__(self) -> None:
        self._total: Tensor | None = None
        self._pass = -1

    @property
    def total(self) -> Tensor | None:
        """None before the first reader of this pass, whatever an earlier one has left: a pass that
        asks for other gradients, or one that failed, does not get to `_Collect`."""
        return self._total if self._pass == _this_pass() else None

    @total.setter
    def total(self, total: Tensor | None) -> None:
        self._total, self._pass = total, _this_pass()


def _this_pass() -> int:
    # No public name; torch.utils.checkpoint tells passes apart by it too.
    return torch._C._current_graph_task_id()


def with_gradient_sum(source: Tensor) -> Tensor:
    """The same tensor, for readers that add to `gradient_sum` of it and return no gradient.

    Readers that return one, as any operator does, are counted too.
    """
    if not source.requires_grad or not torch.is_grad_enabled():
        return source
    sum_here = GradientSum()
    out: Tensor = _Collect.apply(source, sum_here)  # type: ignore[no-untyped-call]  # torch has no types
    setattr(out, NAME, sum_here)
    return out


def gradient_sum(source: Tensor) -> GradientSum | None:
    """The sum that a reader may add to; None: it returns its gradient."""
    found: GradientSum | None = getattr(source, NAME, None)
    return found


class _Collect(torch.autograd.Function):
    """Runs backward once all readers have, whether or not one of them returned a gradient."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, sum_here: GradientSum) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.sum_here, ctx.shape = sum_here, source.shape
        return source.view_as(source)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        total, ctx.sum_here.total = ctx.sum_here.total, None
        returned = grads[0]
        if total is None:
            return returned, None
        total = total.view(ctx.shape)
        return (total if returned is None else total.add_(returned)), None
