"""The Triton kernels of the output gate against the formula in float64."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from megatron_ext.ops.gating.reference import head_gate_reference
from megatron_ext.ops.gating.triton import head_gate_triton
from tests.kernels.common import DEVICE, TOLERANCE, draw, errors, far_apart

EPS = 1e-3
DTYPES = [torch.float32, torch.bfloat16]


def fast(o, gate, weight=None):
    return head_gate_triton(o, gate, weight, EPS)


def slow(o, gate, weight=None):
    return head_gate_reference(o, gate, weight, EPS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 5, 3, 8), (1, 19, 5, 6), (3, 2, 40, 128)])
def test_with_and_without_a_norm(shape, dtype):
    batch, length, heads, width = shape
    o, gate = draw(*shape, dtype=dtype), draw(length, batch, heads * width, dtype=dtype, seed=1)
    weight = 1 + 0.1 * draw(width, dtype=dtype, seed=2)
    assert max(errors(fast, slow, [o, gate])) < TOLERANCE[dtype]
    assert max(errors(fast, slow, [o, gate, weight])) < TOLERANCE[dtype]


def test_inputs_in_other_layouts():
    o = draw(3, 5, 7, 8).permute(1, 2, 0, 3)  # [5, 7, 3, 8]: heads outermost, as attention has them
    gate = draw(5, 7, 48)[..., :24].transpose(0, 1)
    assert max(errors(fast, slow, [o, gate, draw(8)])) < TOLERANCE[torch.float32]
    column = draw(24, 7, 5).permute(1, 2, 0)  # neighbours of a head lie apart
    assert max(errors(fast, slow, [o, column, draw(8)])) < TOLERANCE[torch.float32]


def test_rows_beyond_32_bit_offsets():
    o = far_apart(3, 16, torch.bfloat16).view(1, 3, 2, 8)
    gate = draw(3, 1, 16, dtype=torch.bfloat16)
    assert max(errors(fast, slow, [o, gate])) < TOLERANCE[torch.bfloat16]


def test_nothing():
    weight = torch.ones(4, device=DEVICE, requires_grad=True)
    out = partial(fast, weight=weight)(draw(1, 0, 2, 4).requires_grad_(), draw(0, 1, 8))
    out.sum().backward()
    assert not weight.grad.any()
