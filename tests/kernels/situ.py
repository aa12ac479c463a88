"""The Triton kernels of SiTU-GLU against the formula in float64."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from megatron_ext.ops.situ.reference import situ_glu_reference
from megatron_ext.ops.situ.triton import situ_glu_triton
from tests.kernels.common import DEVICE, TOLERANCE, draw, errors, far_apart

K3 = {"beta": 4.0, "linear_beta": 25.0}
fast, slow = partial(situ_glu_triton, **K3), partial(situ_glu_reference, **K3)
DTYPES = [torch.float32, torch.bfloat16]


def fast_scaled(x, scale):
    return situ_glu_triton(x, scale=scale, **K3)


def slow_scaled(x, scale):
    return situ_glu_reference(x, scale=scale, **K3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 14), (2, 3, 2600), (1, 2), (6,)])
def test_packed_equals_the_formula(shape, dtype):
    found = errors(fast, slow, [4 * draw(*shape, dtype=dtype)])
    assert max(found) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_branches_of_their_own_and_odd_strides(dtype):
    cases = {
        "separate": (draw(5, 7, dtype=dtype), draw(5, 7, dtype=dtype, seed=1)),
        "halves": draw(4, 3, 22, dtype=dtype).chunk(2, -1),
        "transposed": (draw(7, 5, dtype=dtype).t(), draw(5, 3, 7, dtype=dtype)[:, 1]),
        "expanded": (draw(1, 9, dtype=dtype).expand(4, 9), draw(4, 9, dtype=dtype)),
    }
    for name, (gate, up) in cases.items():
        assert max(errors(fast, slow, [gate, up])) < TOLERANCE[dtype], name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [10, 2100])
def test_a_factor_a_row(width, dtype):
    inputs = [4 * draw(3, 2, width, dtype=dtype), draw(3, 2, seed=5).abs()]
    assert max(errors(fast_scaled, slow_scaled, inputs)) < TOLERANCE[dtype]


@pytest.mark.parametrize("bounds", [(None, None), (4.0, None), (None, 25.0)])
def test_branches_without_a_bound(bounds):
    options = dict(zip(("beta", "linear_beta"), bounds, strict=True))
    found = errors(
        partial(situ_glu_triton, **options),
        partial(situ_glu_reference, **options),
        [4 * draw(5, 14)],
    )
    assert max(found) < TOLERANCE[torch.float32]


def test_relative_accuracy_holds_at_every_size():
    size = torch.logspace(-12, 1.5, 400, dtype=torch.float64).float().to(DEVICE)
    gate, up = torch.cat([size, -size]), torch.cat([size.flip(0), size])
    # Elementwise: 1 - exp(-x) must not cancel for small x.
    exact = slow(gate.double(), up.double())
    assert ((fast(gate, up).double() - exact) / exact).abs().max() < 4e-6


@pytest.mark.parametrize("dtype", DTYPES)
def test_huge_inputs_stay_finite_and_bounded(dtype):
    x = torch.tensor([-1e30, -1e4, 0.0, 1e4, 1e30], dtype=dtype, device=DEVICE)
    gate, up = (t.flatten().requires_grad_() for t in torch.meshgrid(x, x, indexing="ij"))
    out = fast(gate, up)
    out.sum().backward()
    for tensor in (out, gate.grad, up.grad):
        assert tensor.isfinite().all()
    assert out.abs().max() <= 100.0


def test_rows_beyond_32_bit_offsets():
    dtype = torch.bfloat16
    assert max(errors(fast, slow, [far_apart(3, 8, dtype)])) < TOLERANCE[dtype]


def test_no_rows():
    x = torch.empty(0, 8, device=DEVICE, requires_grad=True)
    out = fast(x)
    out.sum().backward()
    assert out.shape == (0, 4)
    assert x.grad.shape == (0, 8)
