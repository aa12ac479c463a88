"""The Triton kernels of the convolution of q, k and v against the token by token formula."""

from __future__ import annotations

import pytest
import torch

from megatron_ext.config.schema import KdaBackend
from megatron_ext.ops.qkv_conv import by_short_conv
from megatron_ext.ops.qkv_conv.triton import qkv_conv_triton
from tests.kernels.common import DEVICE, TOLERANCE, draw, errors, far_apart

DTYPES = [torch.float32, torch.bfloat16]


def both(**options):
    """The kernel and the formula, with q, k and v as one tensor."""

    def fast(qkv, weight):
        return torch.stack(qkv_conv_triton(qkv, weight, **options))

    def slow(qkv, weight):
        found = by_short_conv(qkv, weight, backend=KdaBackend.reference, **options)
        return torch.stack(found)

    return fast, slow


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "halo", "taps"), [(40, 0, 4), (19, 3, 4), (5, 0, 2), (2, 0, 4)])
def test_rows_of_a_batch(rows, halo, taps, dtype):
    inputs = [draw(rows, 2, 3 * 2 * 10, dtype=dtype), draw(3, 20, taps, seed=1)]
    assert max(errors(*both(heads=2, halo=halo), inputs)) < TOLERANCE[dtype]


@pytest.mark.parametrize("bounds", [[0, 2, 2, 3, 17, 40], [0, 40]])
@pytest.mark.parametrize("halo", [0, 3])
def test_documents_do_not_see_each_other(bounds, halo):
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=DEVICE)
    inputs = [draw(40, 1, 3 * 130), draw(3, 130, 4, seed=1)]
    found = errors(*both(heads=1, halo=halo, cu_seqlens=cu_seqlens), inputs)
    assert max(found) < TOLERANCE[torch.float32]


def test_a_view_and_rows_beyond_32_bit_offsets():
    inputs = [draw(7, 3, 90)[:, :, :60].transpose(0, 1), draw(3, 20, 4, seed=1)]
    assert max(errors(*both(heads=2), inputs)) < TOLERANCE[torch.float32]
    far = far_apart(3, 24, torch.bfloat16).unsqueeze(1)
    assert max(errors(*both(heads=2), [far, draw(3, 8, 3)])) < TOLERANCE[torch.bfloat16]


def test_no_tokens():
    qkv = draw(3, 1, 12).requires_grad_()
    weight = draw(3, 4, 4).requires_grad_()
    out = torch.stack(qkv_conv_triton(qkv, weight, heads=2, halo=3))
    out.sum().backward()
    assert out.shape == (3, 1, 0, 2, 2)
    assert not qkv.grad.any()
    assert not weight.grad.any()
