"""Segments that are computed again: equal to all at once, with memory that does not grow."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_ext.ops.segments import by_segments
from tests.support.memory import PeakMemory


def walk(x: Tensor, state: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """A recurrence, token by token: [s, w], [w] to outputs [s, w] and the last state."""
    outputs = []
    for token in x @ weight:
        state = torch.tanh(state * 0.9 + token)
        outputs.append(state)
    return torch.stack(outputs), state


@pytest.mark.parametrize("size", [1, 4, 5, 11, 30])
def test_segments_with_a_state_equal_the_whole_in_values_and_gradients(size: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(11, 3, dtype=torch.float64, requires_grad=True)
    first = torch.randn(3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(11, 3, dtype=torch.float64)

    def step(number: int, parts: tuple[Tensor, ...], carry: tuple[Tensor, ...]):
        out, state = walk(parts[0], carry[0], weight)
        return out, (state,)

    ours = by_segments(step, (x,), (weight,), size=size, carry=(first,))
    truth, _ = walk(x, first, weight)
    # float64, sums in another order
    torch.testing.assert_close(ours, truth, rtol=1e-12, atol=1e-14)
    leaves = [x, first, weight]
    for got, want in zip(
        torch.autograd.grad(ours, leaves, upstream),
        torch.autograd.grad(truth, leaves, upstream),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


def test_inputs_and_weights_without_a_gradient_get_none() -> None:
    x, mask = torch.randn(6, 2, requires_grad=True), torch.ones(6, 1, dtype=torch.bool)
    frozen = torch.ones(2)
    out = by_segments(
        lambda number, parts, carry: (parts[0] * parts[1] * frozen, ()),
        (x, mask),
        (frozen,),
        size=4,
    )
    out.sum().backward()
    assert torch.equal(x.grad, torch.ones(6, 2))
    assert frozen.grad is None


def test_gradients_of_16_bit_weights_are_added_in_float32() -> None:
    # 1 + 2**-8 is no bfloat16, so adding 2**-9 to 1 hundreds of times in bfloat16 stays at 1.
    weight = torch.zeros((), dtype=torch.bfloat16, requires_grad=True)
    x = torch.cat([torch.ones(1), torch.full((511,), 2.0**-9)]).bfloat16().unsqueeze(1)
    out = by_segments(lambda n, parts, c: (parts[0] * weight, ()), (x,), (weight,), size=1)
    out.float().sum().backward()
    assert weight.grad.item() == 2.0


def test_what_a_step_makes_inside_exists_for_one_segment() -> None:
    weight = torch.randn(16, 16, requires_grad=True)
    inside = []
    for tokens in (64, 256):
        x = torch.randn(tokens, 16, requires_grad=True)
        with PeakMemory() as memory:
            out = by_segments(
                # A hundred times as wide inside.
                lambda n, parts, c: (
                    (parts[0] @ weight).repeat(1, 100).exp().view(-1, 100, 16).sum(1),
                    (),
                ),
                (x,),
                (weight,),
                size=32,
            )
            out.backward(torch.ones_like(out))
        inside.append(memory.peak - 3 * x.nbytes)  # outputs, their gradient, that of the inputs
    assert inside[1] == inside[0]
