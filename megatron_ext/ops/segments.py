"""A function of a long row of tokens, segment by segment, each computed again in the backward pass.

    y_i, c_{i+1} = step(i, x_i, c_i)

with x_i the i-th segment of the inputs and c a tuple of tensors that one segment hands to the next,
empty for functions of single tokens. What stays for the backward pass are the inputs and the c_i;
what `step` keeps inside exists for one segment at a time. Gradients of weights are added over
segments in float32 or wider. First derivatives only.

Shapes: s tokens, along the first axis of every input and output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Tensors = tuple[Tensor, ...]
#: (number of the segment, its part of each input, what the segment before hands on) to its output,
#: and what it hands on. Uses the weights that the caller lists, and gives the same every time.
Step = Callable[[int, Tensors, Tensors], tuple[Tensor, Tensors]]


def segment_bounds(tokens: int, size: int) -> list[tuple[int, int]]:
    """First token and end of each segment; the last one may be shorter."""
    return [(start, min(start + size, tokens)) for start in range(0, tokens, size)]


def by_segments(
    step: Step,
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    *,
    size: int,
    carry: Sequence[Tensor] = (),
) -> Tensor:
    """The outputs of all segments, one after the other.

    Where `step` is collective, all its ranks must have as many segments, hence tokens; then this is
    collective too, and so is its backward pass, which runs `step` again from the last segment to
    the first.

    Args:
        step: see above. It runs twice in training: without gradients, then with them.
        inputs: each [s, ...], s >= 1, any dtype.
        weights: what `step` uses besides, and gets gradients.
        size: tokens of a segment.
        carry: what the first segment gets.

    Returns:
        [s, ...], as `step` gives it.
    """
    out: Tensor = _BySegments.apply(  # type: ignore[no-untyped-call]  # torch's
        step, size, len(inputs), len(weights), *inputs, *weights, *carry
    )
    return out


class _BySegments(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, step: Step, size: int, inputs: int, weights: int, *tensors: Tensor
    ) -> Tensor:
        given, carry = tensors[:inputs], tensors[inputs + weights :]
        out, carries, _ = run_segments(step, given, carry, size=size)
        ctx.options = step, size, inputs, weights
        ctx.save_for_backward(*tensors[: inputs + weights], *(x for c in carries for x in c))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        step, size, inputs, weights = ctx.options
        saved = ctx.saved_tensors
        wanted = ctx.needs_input_grad[4:]
        handed = saved[inputs + weights :]
        count = len(wanted) - inputs - weights
        carries = [handed[i : i + count] for i in range(0, len(handed), count or 1)]
        found = segment_gradients(
            step,
            saved[:inputs],
            saved[inputs : inputs + weights],
            carries,
            grads[0],
            size=size,
            wanted=wanted[: inputs + weights],
        )
        return None, None, None, None, *found


@torch.no_grad()
def run_segments(
    step: Step, inputs: Tensors, carry: Tensors, *, size: int
) -> tuple[Tensor, list[Tensors], Tensors]:
    """Forward, without gradients: the outputs, what each segment got from the one before, and what
    the last one hands on."""
    tokens = inputs[0].shape[0]
    out, carries = None, []
    for number, (start, end) in enumerate(segment_bounds(tokens, size)):
        carries.append(carry)
        part, carry = step(number, tuple(x[start:end] for x in inputs), carry)
        if out is None:
            out = part.new_empty(tokens, *part.shape[1:])
        out[start:end] = part
    assert out is not None
    return out, carries, carry


def segment_gradients(
    step: Step,
    inputs: Tensors,
    weights: Tensors,
    carries: Sequence[Tensors],
    d_out: Tensor,
    *,
    size: int,
    wanted: Sequence[bool],
    d_carry: Tensors | None = None,
) -> list[Tensor | None]:
    """Gradients of inputs, weights and the first carry, each segment being computed again.

    Args:
        step, inputs, weights, size: as for `by_segments`.
        carries: from `run_segments`; empty for a function without.
        d_out: gradient of the outputs [s, ...].
        wanted: of which inputs, then weights, a gradient is needed.
        d_carry: gradient of what the last segment hands on; None: zero.

    Returns:
        One entry for each input, weight and carried tensor; None where it is not wanted.
    """
    count = len(inputs)
    d_inputs = [
        torch.empty_like(x) if need else None for x, need in zip(inputs, wanted, strict=False)
    ]
    d_weights = [
        torch.zeros_like(w, dtype=torch.promote_types(w.dtype, torch.float32)) if need else None
        for w, need in zip(weights, wanted[count:], strict=True)
    ]
    bounds = segment_bounds(inputs[0].shape[0], size)
    for number, (start, end) in reversed(list(enumerate(bounds))):
        parts = tuple(
            x[start:end].detach().requires_grad_(need)
            for x, need in zip(inputs, wanted, strict=False)
        )
        carry = tuple(x.detach().requires_grad_() for x in (carries[number] if carries else ()))
        with torch.enable_grad():
            out, handed_on = step(number, parts, carry)
        if d_carry is None:
            d_carry = tuple(torch.zeros_like(x) for x in handed_on)
        targets = [
            *(x for x in parts if x.requires_grad),
            *(w for w, d in zip(weights, d_weights, strict=True) if d is not None),
            *carry,
        ]
        pairs = [
            pair
            for pair in zip((out, *handed_on), (d_out[start:end], *d_carry), strict=True)
            if pair[0].requires_grad
        ]
        found = iter(
            torch.autograd.grad(
                [x for x, _ in pairs], targets, [d for _, d in pairs], allow_unused=True
            )
        )
        for d_input in d_inputs:
            if d_input is not None:
                value = next(found)
                d_input[start:end] = 0 if value is None else value
        for d_weight in d_weights:
            if d_weight is not None and (value := next(found)) is not None:
                d_weight += value
        d_carry = tuple(
            torch.zeros_like(x) if value is None else value
            for x, value in zip(carry, found, strict=True)
        )
    narrow = [None if d is None else d.to(w.dtype) for w, d in zip(weights, d_weights, strict=True)]
    return [*d_inputs, *narrow, *(d_carry or ())]
