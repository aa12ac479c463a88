"""SiTU-GLU against its formula, its bound and its derivative."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_ext.ops.situ import situ_glu, situ_glu_reference

K3 = {"beta": 4.0, "linear_beta": 25.0}


def test_one_value_by_hand() -> None:
    gate, up = torch.tensor([1.5], dtype=torch.float64), torch.tensor([-2.0], dtype=torch.float64)
    want = 4 * math.tanh(1.5 / 4) / (1 + math.exp(-1.5)) * 25 * math.tanh(-2.0 / 25)
    assert abs(situ_glu(gate, up, **K3).item() - want) < 1e-14


@pytest.mark.parametrize(
    ("beta", "linear_beta"), [(3.0, 11.0), (None, 11.0), (3.0, None), (None, None)]
)
def test_values_and_gradients_equal_the_formula(
    beta: float | None, linear_beta: float | None
) -> None:
    results = []
    for function in (situ_glu, situ_glu_reference):
        generator = torch.Generator().manual_seed(0)
        leaves = [
            (8 * torch.randn(50, 7, generator=generator, dtype=torch.float64)).requires_grad_()
            for _ in range(2)
        ]
        out = function(*leaves, beta=beta, linear_beta=linear_beta)
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for a, b in zip(*results, strict=True):
        # The same elementary functions in another order, in float64.
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_one_tensor_and_a_factor_a_row_equal_the_formula() -> None:
    results = []
    for function in (situ_glu, situ_glu_reference):
        generator = torch.Generator().manual_seed(0)
        both = 4 * torch.randn(5, 3, 14, generator=generator, dtype=torch.float64)
        scale = torch.rand(5, 3, generator=generator, dtype=torch.float64)
        leaves = [both.requires_grad_(), scale.requires_grad_()]
        out = function(both, scale=scale, **K3)
        separate = function(*both.chunk(2, -1), **K3) * scale.unsqueeze(-1)
        torch.testing.assert_close(out, separate, rtol=1e-12, atol=1e-12)
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_gradcheck() -> None:
    leaves = tuple(torch.randn(6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda g, u: situ_glu(g, u, **K3), leaves)


def test_without_bounds_it_is_swiglu_and_the_limit_of_large_ones() -> None:
    gate, up = torch.randn(2, 50, dtype=torch.float64)
    free = situ_glu(gate, up, beta=None, linear_beta=None)
    torch.testing.assert_close(free, torch.nn.functional.silu(gate) * up, rtol=1e-14, atol=1e-14)
    # b tanh(x/b) = x - x^3/(3 b^2) + ...
    torch.testing.assert_close(
        situ_glu(gate, up, beta=1e6, linear_beta=1e6), free, rtol=1e-10, atol=0
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_huge_inputs_stay_finite_and_bounded(dtype: torch.dtype) -> None:
    x = torch.tensor([-1e4, 1e4, -1e30, 1e30, 0.0], dtype=dtype)
    gate, up = (t.flatten().requires_grad_() for t in torch.meshgrid(x, x, indexing="ij"))
    out = situ_glu(gate, up, **K3)
    out.sum().backward()
    assert out.dtype == dtype
    for tensor in (out, gate.grad, up.grad):
        assert tensor.isfinite().all()
    assert out.abs().max() <= 100.0


def test_bfloat16_is_computed_in_float32() -> None:
    gate, up = torch.randn(1000).bfloat16(), torch.randn(1000).bfloat16()
    exact = situ_glu_reference(gate.double(), up.double(), **K3)
    # One rounding of the result to 8 bits: at most 2^-8 of each element.
    torch.testing.assert_close(situ_glu(gate, up, **K3).double(), exact, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "dtype", "beta", "message"),
    [
        ((3,), torch.float32, 4.0, "equal shapes"),
        ((2,), torch.float64, 4.0, "equal shapes and dtypes"),
        ((2,), torch.float32, 0.0, "allowed > 0"),
    ],
)
def test_wrong_arguments_are_errors(
    shape: tuple[int, ...], dtype: torch.dtype, beta: float, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        situ_glu(torch.zeros(2), torch.zeros(shape, dtype=dtype), beta=beta, linear_beta=25.0)


def test_odd_widths_and_misfitting_factors_are_errors() -> None:
    with pytest.raises(ValueError, match="2F"):
        situ_glu(torch.zeros(2, 3), **K3)
    with pytest.raises(ValueError, match="scale"):
        situ_glu(torch.zeros(2, 4), scale=torch.ones(3), **K3)
