"""The small Triton kernels of KDA's own backend, against plain torch in float64."""

from __future__ import annotations

import itertools

import pytest
import torch

from megatron_ext.ops.kda.gate import NORM_EPS, normalise
from megatron_ext.ops.kda.own_kernels import unit_rows, values_backward
from megatron_ext.ops.kda.triton import kda_inputs_backward, kda_inputs_triton
from tests.kernels.common import DEVICE, TOLERANCE, draw, interpret_half_products

interpret_half_products()
HALF = torch.bfloat16


def relative(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_unit_rows_of_views(dtype):
    both = draw(2, 37, 3, 4, 16, dtype=dtype)  # of one tensor, as the convolution gives them
    q, k = both[:, :, 0], both[:, :, 2]
    made = unit_rows(q, k)
    for x, unit, inverse in zip((q, k), made[:2], made[2:], strict=True):
        assert unit.is_contiguous()
        assert relative(unit, normalise(x.double())) < TOLERANCE[dtype]
        length = (x.double().square().sum(-1) + NORM_EPS).sqrt()
        assert relative(inverse, 1 / length) < TOLERANCE[torch.float32]


def test_gradients_of_normed_rows_are_those_of_raw_ones():
    q, k, z = (draw(2, 37, 3, 16, seed=seed) for seed in range(3))
    rest = (z, draw(2, 37, 3, seed=3), 0.3 * draw(3, seed=4), draw(3, 16, seed=5))
    made = kda_inputs_triton(q, k, *rest, -5.0)
    grads = tuple(draw(*x.shape, seed=6) for x in made)
    raw = kda_inputs_backward((q, k, *rest), grads, -5.0)
    *units, of_q, of_k = unit_rows(q, k)
    found = kda_inputs_backward((*units, *rest), grads, -5.0, inverses=(of_q, of_k))
    for a, b in zip(found, raw, strict=True):
        assert relative(a, b.double()) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("offsets", [None, (0, 1, 64, 64, 130)])
def test_gradient_of_new_values(offsets):
    batch = 2 if offsets is None else 1
    qk, grad = draw(batch, 130, 2, 64, dtype=HALF), draw(batch, 130, 2, 16, dtype=HALF, seed=1)
    pieces = [(row, a, min(a + 64, 130)) for row in range(batch) for a in range(0, 130, 64)]
    where = {"cu_seqlens": None, "chunk_indices": None}
    if offsets is not None:
        spans = list(itertools.pairwise(offsets))
        pieces = [(0, i, min(i + 64, b)) for a, b in spans for i in range(a, b, 64)]
        places = [(n, c) for n, (a, b) in enumerate(spans) for c in range(-(-(b - a) // 64))]
        tensors = [torch.tensor(x, device=DEVICE) for x in (offsets, places)]
        where = dict(zip(where, tensors, strict=True))
    want = torch.zeros_like(grad).double()
    for row, begin, end in pieces:
        square = qk[row, begin:end, :, : end - begin].double().transpose(0, 1).tril()
        part = square.transpose(1, 2) @ grad[row, begin:end].double().transpose(0, 1)
        want[row, begin:end] = part.transpose(0, 1)
    assert relative(values_backward(qk, grad, **where), want) < TOLERANCE[HALF]
