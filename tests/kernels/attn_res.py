"""The mix over depth."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_ext.ops.attn_res import depth_mix_reference
from megatron_ext.ops.attn_res.gradients import with_gradient_sum
from megatron_ext.ops.attn_res.triton import depth_mix_triton
from tests.kernels.common import DEVICE, TOLERANCE, draw, errors

EPS = 1e-5


def inputs(count: int, *shape: int, dtype: torch.dtype) -> list[Tensor]:
    """Query, key and norm weights, then sources of growing size, as sums over depth are."""
    width = shape[-1]
    # Small enough that no source takes all: its gradients would be differences of equal numbers.
    vectors = [
        0.1 * draw(width, seed=1),
        1 + 0.1 * draw(width, seed=2),
        1 + 0.1 * draw(width, seed=3),
    ]
    return [*vectors, *((1 + j) * draw(*shape, dtype=dtype, seed=9 + j) for j in range(count))]


def run(function, norm: bool):
    def call(query: Tensor, key: Tensor, weight: Tensor, *sources: Tensor) -> Tensor:
        out = function(sources, query, key, eps=EPS, norm_weight=weight if norm else None)
        return out if norm else out + 0 * weight.sum().to(out.dtype)

    return call


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    ("count", "shape"),
    [
        (1, (3, 2, 8)),
        (3, (5, 1, 100)),
        (8, (7, 64)),
        (9, (3, 40)),
        (12, (2, 33)),
        (16, (2, 2, 130)),
        (9, (2, 2500)),  # several walks of a program
    ],
    ids=str,
)
def test_depth_mix_and_gradients(
    count: int, shape: tuple[int, ...], norm: bool, dtype: torch.dtype
) -> None:
    tensors = inputs(count, *shape, dtype=dtype)
    weights, *sources = tensors[:3], *tensors[3:]
    ordered = [*sources, *weights]  # the first one's dtype is that of the result

    def first_sources(function):
        call = run(function, norm)
        return lambda *x: call(*x[count:], *x[:count])

    found = errors(first_sources(depth_mix_triton), first_sources(depth_mix_reference), ordered)
    if not norm:
        found.pop()  # of the norm's weight: zero
    # With one source the weights are 1 and have no gradient: zero by zero.
    seen = [error for error in found if error == error]
    assert len(seen) == len(found) or count == 1
    assert max(seen) <= 4 * TOLERANCE[dtype]


def test_depth_mix_is_the_mean_for_a_query_of_zeros() -> None:
    sources = [draw(4, 40, seed=j) for j in range(5)]
    out = depth_mix_triton(
        sources, torch.zeros(40, device=DEVICE), torch.ones(40, device=DEVICE), eps=EPS
    )
    torch.testing.assert_close(out, torch.stack(sources).mean(0), atol=1e-6, rtol=0)


def test_depth_mix_has_the_same_bits_every_time() -> None:
    tensors = [x.requires_grad_() for x in inputs(4, 2500, 32, dtype=torch.bfloat16)]

    def grads() -> list[Tensor]:
        query, key, norm, *sources = tensors
        out = depth_mix_triton(sources, query, key, eps=EPS, norm_weight=norm)
        return list(torch.autograd.grad(out.float().square().sum(), tensors))

    if DEVICE == "cuda":  # in the interpreter programs run one after the other
        assert all(torch.equal(a, b) for a, b in zip(grads(), grads(), strict=True))


@pytest.mark.parametrize("count", [4, 9])
@pytest.mark.parametrize("norm", [False, True])
def test_readers_add_gradients_up_where_they_lie(norm: bool, count: int) -> None:
    """Three mixes of sources of which two are finished, and one reader of another kind."""
    tensors = [x.requires_grad_() for x in inputs(count, 9, 2, 100, dtype=torch.float32)]

    def grads(collect) -> list[Tensor]:
        query, key, weight, *sources = tensors
        sources = [*map(collect, sources[:2]), *sources[2:]]
        out = 3 * sources[1].sin()
        for turn in (1, 2, 3):
            first = 0 if turn < 3 else 1  # the last one reads a part only
            mixed = depth_mix_triton(
                sources[first:], turn * query, key, eps=EPS, norm_weight=weight if norm else None
            )
            out = out + turn * mixed.sin()
        wanted = tensors if norm else [*tensors[:2], *tensors[3:]]
        return list(torch.autograd.grad(out.square().sum(), wanted))

    for got, want in zip(grads(with_gradient_sum), grads(lambda x: x), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)


def test_what_a_pass_for_other_gradients_left_is_in_no_sum() -> None:
    """It runs readers, and ends before their sum is collected; so does one that fails."""
    query, key, _, source, other = (
        x.requires_grad_() for x in inputs(2, 9, 24, dtype=torch.float32)
    )

    def loss(finished: Tensor) -> Tensor:
        inner = depth_mix_triton([finished, other], query, key, eps=EPS)
        return depth_mix_triton([finished, inner], query, key, eps=EPS).square().sum()

    (want,) = torch.autograd.grad(loss(2 * source), source)
    out = loss(with_gradient_sum(2 * source))
    torch.autograd.grad(out, query, retain_graph=True)
    for _ in range(2):
        (got,) = torch.autograd.grad(out, source, retain_graph=True)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_depth_mix_without_tokens() -> None:
    tensors = [x.requires_grad_() for x in inputs(2, 0, 16, dtype=torch.float32)]
    query, key, norm, *sources = tensors
    out = depth_mix_triton(sources, query, key, eps=EPS, norm_weight=norm)
    found = torch.autograd.grad(out.sum(), tensors)
    assert out.shape == (0, 16)
    assert all(not x.any() for x in found)
