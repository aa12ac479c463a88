"""The Triton kernels of the cross-entropy against plain torch in float64."""

from __future__ import annotations

import pytest
import torch

from megatron_ext.ops.cross_entropy import cross_entropy_reference
from megatron_ext.ops.cross_entropy.chunked import (
    DENSE,
    Passes,
    add_product,
    gradients_dense,
    linear_cross_entropy_chunked,
    sums_dense,
)
from megatron_ext.ops.cross_entropy.triton import gradients_triton, sums_triton
from tests.kernels.common import DEVICE, TOLERANCE, draw

DTYPES = [torch.float32, torch.bfloat16]
WIDTHS = [1, 96, 4096, 5000, 10001]
TRITON = Passes(sums_triton, gradients_triton, add_product)


def labels(tokens, width):
    """Some of another rank, some at both ends."""
    generator = torch.Generator().manual_seed(5)
    local = torch.randint(-1, width, (tokens,), generator=generator)
    local[:3] = torch.tensor([-1, 0, width - 1])
    return local.to(DEVICE)


def sums(run, logits, local, dtype):
    made = [torch.zeros(len(logits), device=DEVICE, dtype=dtype) for _ in range(3)]
    run(logits, local, *made)
    return [made[0], made[1], torch.where(local >= 0, made[2], 0)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("spread", [1.0, 1e3])
def test_sums(dtype, width, spread):
    logits, local = spread * draw(7, width, dtype=dtype), labels(7, width)
    logits[4] -= 2e4 * spread  # below what a maximum could begin with by mistake
    found = sums(sums_triton, logits.clone(), local, torch.float32)
    wanted = sums(sums_dense, logits.double(), local, torch.float64)
    assert torch.equal(found[0].double(), wanted[0])
    assert torch.equal(found[2].double(), wanted[2])
    torch.testing.assert_close(found[1].double(), wanted[1], rtol=3e-6, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_gradients_lie_where_the_logits_did(dtype, width):
    logits, local, upstream = draw(7, width, dtype=dtype), labels(7, width), draw(7, seed=3)
    upstream[5] = 0.0
    log_sum = logits.double().logsumexp(-1)
    given = logits.clone()
    found = gradients_triton(given, local, log_sum.float(), upstream)
    assert found.data_ptr() == given.data_ptr()
    wanted = gradients_dense(logits.double(), local, log_sum, upstream.double())
    assert ((found.double() - wanted).norm() / wanted.norm()) < TOLERANCE[dtype]
    assert not found[5].any()
    # Of a label of this rank the row sums to nothing, else to the upstream gradient.
    missing = torch.where(local < 0, upstream, 0).double()
    torch.testing.assert_close(found.double().sum(-1), missing, rtol=0, atol=6 * TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_whole_in_chunks(dtype):
    hidden, weight = draw(50, 32, dtype=dtype) / 3, draw(300, 32, dtype=dtype, seed=1)
    target = labels(50, 300)
    results = []
    for run in (
        lambda h, w: linear_cross_entropy_chunked(h, w, target, 16, None, TRITON),
        lambda h, w: linear_cross_entropy_chunked(h, w, target, 16, None, DENSE),
        lambda h, w: cross_entropy_reference(h.double(), w.double(), target),
    ):
        h, w = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
        losses = run(h, w)
        upstream = draw(50, seed=4).to(losses.dtype)
        results.append([losses.detach(), *torch.autograd.grad(losses, [h, w], upstream)])
    for ours, dense, exact in zip(*results, strict=True):
        error, plain = (
            ((x.double() - exact.double()).norm() / exact.double().norm()).item()
            for x in (ours, dense)
        )
        assert error < 1.5 * max(plain, TOLERANCE[torch.float32])
    again = linear_cross_entropy_chunked(hidden, weight, target, 16, None, TRITON)
    assert torch.equal(again, results[0][0])


def test_a_logit_that_is_not_a_number_shows():
    logits, local = draw(3, 70), labels(3, 70)
    logits[1, 60] = float("nan")
    total = sums(sums_triton, logits, local, torch.float32)[1]
    assert total.isnan().tolist() == [False, True, False]
