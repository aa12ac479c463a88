"""Products that add to a gradient, on a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megatron_ext.ops.projections import add_product, project

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def test_gradients_in_bfloat16_are_no_worse_than_autograds() -> None:
    torch.manual_seed(0)
    x = torch.randn(256, 4, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weights = [
        (0.05 * torch.randn(n, 512, device="cuda", dtype=torch.bfloat16)).requires_grad_()
        for n in (768, 16, 128)
    ]
    leaves = [x, *weights]
    upstream = [torch.randn(256, 4, len(w), device="cuda", dtype=torch.bfloat16) for w in weights]
    ours = torch.autograd.grad(project(x, weights), leaves, upstream)
    theirs = torch.autograd.grad([F.linear(x, w) for w in weights], leaves, upstream)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    exact = torch.autograd.grad(
        [F.linear(wide[0], w) for w in wide[1:]], wide, [u.double() for u in upstream]
    )
    for got, other, want in zip(ours, theirs, exact, strict=True):
        assert (got - want).norm() <= 1.05 * (other - want).norm()


def test_a_product_that_adds_copies_nothing() -> None:
    total = torch.randn(1024, 512, device="cuda", dtype=torch.bfloat16)
    a, b = torch.randn_like(total), torch.randn(512, 512, device="cuda", dtype=torch.bfloat16)
    add_product(total, a, b)  # starts cuBLAS
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        assert add_product(total, a, b) is total
        torch.cuda.synchronize()
    kernels = [event.key for event in seen.key_averages()]
    assert kernels
    assert not [name for name in kernels if "elementwise" in name or "Memcpy" in name]
