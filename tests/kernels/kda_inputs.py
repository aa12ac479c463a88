"""The Triton kernels before a KDA without a norm and gate, against the formulas in float64."""

from __future__ import annotations

import pytest
import torch

from megatron_ext.ops.kda.inputs import kda_inputs_dense, together
from megatron_ext.ops.kda.triton import kda_inputs_triton
from tests.kernels.common import DEVICE, TOLERANCE, draw, errors, far_apart

BOUND = -4.0
SLOPED = {True: lambda *x: x, False: lambda q, k, z, beta, bias: (q, k, z, beta, None, bias)}


def fast(sloped=True):
    def run(*x):
        made = kda_inputs_triton(*SLOPED[sloped](*x), BOUND)
        return together(made).to(x[0].dtype)

    return run


def slow(sloped=True):
    return lambda *x: together(kda_inputs_dense(*SLOPED[sloped](*x), BOUND))


def inputs(batch, length, heads, width, dtype):
    row = (batch, length, heads, width)
    q, k, z = (draw(*row, dtype=dtype, seed=seed) for seed in range(3))
    slope, bias = 0.3 * draw(heads, seed=4), draw(heads, width, seed=5)
    return [q, k, z, draw(*row[:3], dtype=dtype, seed=3), slope, bias]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 5, 3, 8), (2, 70, 2, 6), (1, 150, 1, 128)])
def test_both_gates(shape, dtype):
    given = inputs(*shape, dtype)
    assert max(errors(fast(), slow(), given)) < TOLERANCE[dtype]
    del given[4]
    assert max(errors(fast(False), slow(False), given)) < TOLERANCE[dtype]


def test_inputs_in_other_layouts():
    q, k, z, beta, slope, bias = inputs(3, 20, 2, 8, torch.float32)
    q = draw(20, 3, 2, 24)[..., :8].transpose(0, 1)
    k = draw(3, 2, 20, 8, seed=1).transpose(1, 2)
    z, beta = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (z, beta))
    given = [q, k, z, beta, slope, bias]
    assert max(errors(fast(), slow(), given)) < TOLERANCE[torch.float32]
    holes = draw(3, 20, 2, 12, seed=2)[..., :8]  # its gradient has none
    given = [q, k, holes, beta, slope, bias]
    assert max(errors(fast(), slow(), given)) < TOLERANCE[torch.float32]
    column = z.transpose(2, 3).contiguous().transpose(2, 3)  # neighbours of a head lie apart
    given = [column, column, column, beta, slope, bias]
    assert max(errors(fast(), slow(), given)) < TOLERANCE[torch.float32]


def test_saturated_gates_and_vanishing_vectors():
    q, k, z, beta, slope, bias = inputs(1, 20, 2, 8, torch.float32)
    given = [1e-3 * q, 0 * k, 40 * z, 40 * beta, slope, bias]
    found = kda_inputs_triton(*given, BOUND)
    assert all(x.isfinite().all() for x in found)
    assert found[2].min() >= BOUND
    assert found[2].max() <= 0
    wanted = kda_inputs_dense(*(x.double() for x in given), BOUND)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-6)


def test_rows_beyond_32_bit_offsets():
    q = far_apart(3, 16, torch.bfloat16).view(1, 3, 2, 8)
    _, k, z, beta, slope, bias = inputs(1, 3, 2, 8, torch.bfloat16)
    assert max(errors(fast(), slow(), [q, k, z, beta, slope, bias])) < TOLERANCE[torch.bfloat16]


def test_nothing():
    given = inputs(1, 0, 2, 8, torch.float32)
    given[5].requires_grad_()
    made = kda_inputs_triton(*given, BOUND)
    assert [x.shape for x in made] == [(0, 2, 8), (0, 2, 8), (0, 2, 8), (0, 2)]
    made[2].sum().backward()
    assert given[5].grad.device.type == DEVICE
    assert not given[5].grad.any()
