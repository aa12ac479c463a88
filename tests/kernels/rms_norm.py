"""The Triton kernels of the RMS norm against the formula in float64."""

from __future__ import annotations

import pytest
import torch

from megatron_ext.ops.rms_norm import triton as kernels
from megatron_ext.ops.rms_norm.reference import rms_norm_reference
from tests.kernels.common import DEVICE, TOLERANCE, draw, errors, far_apart

EPS = 1e-3
DTYPES = [torch.float32, torch.bfloat16]


def fast(x, weight):
    return kernels.rms_norm_triton(x, weight, EPS)


def slow(x, weight):
    return rms_norm_reference(x, weight, EPS)


def both(x, weight):
    """The norm and the input as one tensor, each with an upstream gradient of its own."""
    return torch.cat(kernels.rms_norm_residual_triton(x, weight, EPS))


def slow_both(x, weight):
    return torch.cat([rms_norm_reference(x, weight, EPS), x])


def weights(width, dtype):
    return 1 + 0.1 * draw(width, dtype=dtype, seed=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 2, 24), (1, 512), (77, 128), (3, 7168), (67, 1), (2, 9000)])
def test_alone_and_with_the_gradient_of_the_residual(shape, dtype):
    x, weight = draw(*shape, dtype=dtype), weights(shape[-1], dtype)
    assert max(errors(fast, slow, [x, weight])) < TOLERANCE[dtype]
    assert max(errors(both, slow_both, [x, weight])) < TOLERANCE[dtype]


@pytest.mark.parametrize("width", [48, 9000])
def test_programs_of_many_turns_sum_to_the_same(width, monkeypatch):
    monkeypatch.setattr(
        kernels,
        "launch_settings",
        lambda kernel, _: (
            {"ELEMENTS": 128} | ({"PROGRAMS": 3} if "back" in kernel else {}) | {"num_warps": 4}
        ),
    )
    x, weight = draw(17, width), weights(width, torch.float32)
    assert max(errors(both, slow_both, [x, weight])) < TOLERANCE[torch.float32]
    first, again = (
        torch.autograd.grad(both(a, w).sin().sum(), [a, w]) for a, w in leaves(x, weight)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def leaves(*given):
    return [[x.detach().requires_grad_() for x in given] for _ in range(2)]


def test_inputs_in_other_layouts_and_dtypes():
    weight = weights(24, torch.float32)
    split = draw(5, 2, 40)[..., :24]
    apart = draw(24, 5, 2).permute(1, 2, 0)  # neighbours of a row lie apart
    for x in (split, apart, draw(2, 5, 24).transpose(0, 1)):
        assert max(errors(both, slow_both, [x, weight])) < TOLERANCE[torch.float32]
    half = draw(5, 24, dtype=torch.bfloat16)
    assert max(errors(both, slow_both, [half, weight])) < TOLERANCE[torch.bfloat16]
    assert max(errors(both, slow_both, [draw(5, 24).half(), weight])) < 2**-9


def test_rows_beyond_32_bit_offsets():
    x = far_apart(3, 16, torch.bfloat16)
    weight = weights(16, torch.bfloat16)
    assert max(errors(both, slow_both, [x, weight])) < TOLERANCE[torch.bfloat16]


def test_nothing():
    x = draw(0, 8).requires_grad_()
    weight = torch.ones(8, device=DEVICE, requires_grad=True)
    both(x, weight).sum().backward()
    assert x.grad.shape == (0, 8)
    assert not weight.grad.any()


def test_one_gradient_of_the_two():
    (x, weight), _ = leaves(draw(5, 8), weights(8, torch.float32))
    normed, same = kernels.rms_norm_residual_triton(x, weight, EPS)
    assert same.data_ptr() == x.data_ptr()
    assert torch.equal(torch.autograd.grad(same.sum(), x, retain_graph=True)[0], torch.ones_like(x))
    # An expanded gradient has strides of zero.
    found = torch.autograd.grad(normed.sum(), [x, weight])
    wanted = torch.autograd.grad(slow(x.double(), weight).sum(), [x, weight])
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
