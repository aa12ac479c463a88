"""KDA by segments on ranks that hold consecutive parts of a sequence: `ops.segments` whose first
state comes from the ranks before, by `exchange`.

A rank's own state and transition take a first walk over its segments, without outputs. In the
backward pass every segment runs again twice: for the gradient of the first state, which the ranks
before need, and, with the gradient of the last state, which the ranks behind give, for all others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_ext.ops.kda.exchange import first_state, last_gradient
from megatron_ext.ops.segments import (
    Step,
    Tensors,
    run_segments,
    segment_bounds,
    segment_gradients,
)

#: As `Step`, from (tail, state[, transition]) to the same after the segment, without an output.
StateStep = Callable[[int, Tensors, Tensors], Tensors]


def context_segments(
    step: Step,
    states: StateStep,
    inputs: Tensors,
    weights: Tensors,
    *,
    tail: Tensor,
    state: Tensor,
    size: int,
    continued: bool,
    passing: bool,
    group: dist.ProcessGroup,
) -> Tensor:
    """`by_segments` with a carry of (tail, state). Collective, and so is its backward pass.

    Args:
        step: is not collective.
        states: the same without an output, for a state from zero and a transition from one.
        inputs, weights, size: as for `by_segments`; of this rank.
        tail: what the first segment gets of the rank before, with its gradient.
        state: zeros, in the shape of a state [b, H, K, V].
        continued: the first document began on an earlier rank.
        passing: it goes on behind all of this rank's tokens, or ends with them.
        group: ranks in the order of the sequence.

    Returns:
        [s, ...], as `step` gives it. Gradients of weights are this rank's share.
    """
    out: Tensor = _ContextSegments.apply(  # type: ignore[no-untyped-call]  # torch's
        step, states, size, (len(inputs), len(weights)), continued, passing, group,
        *inputs, *weights, tail, state,
    )  # fmt: skip
    return out


class _ContextSegments(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        step: Step,
        states: StateStep,
        size: int,
        counts: tuple[int, int],
        continued: bool,
        passing: bool,
        group: dist.ProcessGroup,
        *tensors: Tensor,
    ) -> Tensor:
        *used, tail, state = tensors
        inputs = tuple(used[: counts[0]])
        walked: Tensors = (tail, state)
        if passing:
            eye = torch.eye(state.shape[-2], dtype=state.dtype, device=state.device)
            walked = (tail, state, eye.expand(*state.shape[:2], -1, -1).contiguous())
        for number, (start, end) in enumerate(segment_bounds(len(inputs[0]), size)):
            walked = states(number, tuple(x[start:end] for x in inputs), walked)
        transition = walked[2] if passing else None
        received = first_state(walked[1], transition, group=group)
        first = received if continued else torch.zeros_like(received)
        out, carries, _ = run_segments(step, inputs, (tail, first), size=size)
        ctx.options = step, size, counts, continued, passing, group
        ctx.save_for_backward(
            *used, *(x for carry in carries for x in carry), *((transition,) if passing else ())
        )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        step, size, counts, continued, passing, group = ctx.options
        saved = list(ctx.saved_tensors)
        transition = saved.pop() if passing else None
        used = sum(counts)
        handed = saved[used:]
        carries = [(handed[i], handed[i + 1]) for i in range(0, len(handed), 2)]
        tail, state = carries[0]

        def gradients(wanted: list[bool], d_carry: Tensors | None) -> list[Tensor | None]:
            return segment_gradients(
                step,
                tuple(saved[: counts[0]]),
                tuple(saved[counts[0] : used]),
                carries,
                grads[0],
                size=size,
                wanted=wanted,
                d_carry=d_carry,
            )

        own = None
        if continued:
            own = gradients([False] * used, None)[-1]
        d_state = last_gradient(
            torch.zeros_like(state) if own is None else own, transition, group=group
        )
        wanted = list(ctx.needs_input_grad[7 : 7 + used])
        found = gradients(wanted, (torch.zeros_like(tail), d_state))
        return *(None,) * 7, *found[:-1], None
