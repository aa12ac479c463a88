"""The mix over depth: equal to its formula, and its memory does not grow with the sources."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_ext.config.schema import AttentionResidualBackend as Backend
from megatron_ext.errors import ConfigError
from megatron_ext.ops.attn_res import depth_mix, depth_weights, depth_weights_reference

EPS = 1e-5


def inputs(
    count: int, *, dtype: torch.dtype = torch.float64, width: int = 12, norm: bool = False
) -> tuple[list[Tensor], list[Tensor]]:
    """Sources [5, 2, width] of different sizes, and the vectors: query, key norm, output norm."""
    generator = torch.Generator().manual_seed(count)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    sources = [(3.0**j * draw(5, 2, width)).requires_grad_() for j in range(count)]
    vectors = [draw(width), 1 + draw(width) / 4] + ([1 + draw(width) / 4] if norm else [])
    return sources, [v.requires_grad_() for v in vectors]


def run(
    sources: list[Tensor], vectors: list[Tensor], backend: Backend
) -> tuple[Tensor, list[Tensor]]:
    """The mix and the gradients of everything under a fixed upstream gradient."""
    query, key_weight, *norm = vectors
    out = depth_mix(
        sources, query, key_weight, eps=EPS, norm_weight=norm[0] if norm else None, backend=backend
    )
    # Values that every dtype holds exactly.
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).bfloat16()
    return out, list(torch.autograd.grad(out, [*sources, *vectors], upstream.to(out)))


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("count", [1, 2, 9])
def test_the_dense_form_is_the_formula(count: int, norm: bool) -> None:
    sources, vectors = inputs(count, norm=norm)
    exact, exact_grads = run(sources, vectors, Backend.reference)
    out, grads = run(sources, vectors, Backend.dense)
    # float64 sums in another order.
    torch.testing.assert_close(out, exact, rtol=1e-12, atol=1e-12)
    for found, wanted in zip(grads, exact_grads, strict=True):
        assert (found - wanted).norm() <= 1e-12 * max(float(wanted.norm()), 1.0)


@pytest.mark.parametrize("norm", [False, True])
def test_its_gradient_is_that_of_finite_differences(norm: bool) -> None:
    sources, vectors = inputs(3, width=4, norm=norm)

    def function(*tensors: Tensor) -> Tensor:
        query, key_weight, *rest = tensors[3:]
        return depth_mix(
            tensors[:3],
            query,
            key_weight,
            eps=EPS,
            norm_weight=rest[0] if rest else None,
            backend=Backend.dense,
        )

    assert torch.autograd.gradcheck(function, (*sources, *vectors))


def test_sixteen_bit_sources_are_mixed_in_float32() -> None:
    sources, vectors = inputs(5, dtype=torch.bfloat16, width=64, norm=True)
    vectors = [v.detach().float().requires_grad_() for v in vectors]
    out, grads = run(sources, vectors, Backend.dense)
    wide = [v.detach().double().requires_grad_() for v in sources]
    exact, exact_grads = run(wide, [v.detach().double().requires_grad_() for v in vectors],
                             Backend.reference)  # fmt: skip
    assert out.dtype == torch.bfloat16
    assert grads[-1].dtype == torch.float32
    # One rounding to 8 bits: at most 2^-9 of each element.
    assert (out.double() - exact).norm() < 2**-8 * exact.norm()
    for found, wanted in zip(grads[:5], exact_grads[:5], strict=True):
        assert (found.double() - wanted).norm() < 2**-8 * wanted.norm()
    # The vectors' gradients are kept in float32 throughout.
    for found, wanted in zip(grads[5:], exact_grads[5:], strict=True):
        assert (found.double() - wanted).norm() < 1e-5 * wanted.norm()


def test_a_query_of_zeros_gives_the_mean_and_a_large_one_selects() -> None:
    sources, (query, key_weight) = inputs(4)
    mean = depth_mix(sources, torch.zeros_like(query), key_weight, eps=EPS)
    torch.testing.assert_close(mean, torch.stack(sources).mean(0))
    weights = depth_weights(sources, query, key_weight, eps=EPS)
    torch.testing.assert_close(
        weights, depth_weights_reference(sources, query, key_weight, eps=EPS)
    )
    # The token whose best source leads most clearly takes it alone when the query is scaled up.
    best = weights.argmax(0)
    selected = depth_mix(sources, 1e6 * query, key_weight, eps=EPS)
    wanted = torch.stack(sources).gather(0, best[None, ..., None].expand(1, *sources[0].shape))[0]
    torch.testing.assert_close(selected, wanted)


@pytest.mark.parametrize("norm", [False, True])
def test_saved_memory_does_not_grow_with_the_number_of_sources(norm: bool) -> None:
    def saved(count: int, backend: Backend) -> int:
        """Bytes that the mix keeps beside the sources, each storage once."""
        sources, vectors = inputs(count, width=64, norm=norm)
        known = {v.untyped_storage().data_ptr() for v in sources}
        kept: dict[int, int] = {}

        def pack(x: Tensor) -> Tensor:
            storage = x.untyped_storage()
            if storage.data_ptr() not in known:
                kept[storage.data_ptr()] = storage.nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            out = depth_mix(
                sources,
                *vectors[:2],
                eps=EPS,
                norm_weight=vectors[2] if norm else None,
                backend=backend,
            )
        assert out.requires_grad
        return sum(kept.values())

    dense = [saved(count, Backend.dense) for count in (2, 5, 9)]
    assert dense[0] == dense[1] == dense[2] == (3 if norm else 2) * 64 * 8  # the vectors
    # What this test is for: plain autograd keeps copies of every source.
    assert saved(9, Backend.reference) > 3 * saved(2, Backend.reference)


def test_wrong_inputs_are_named() -> None:
    sources, (query, key_weight) = inputs(2)
    with pytest.raises(ValueError, match="at least one"):
        depth_mix([], query, key_weight, eps=EPS)
    with pytest.raises(ValueError, match=r"source 1: given \(5, 2, 11\)"):
        depth_mix([sources[0], sources[1][..., :-1]], query, key_weight, eps=EPS)
    with pytest.raises(ValueError, match=r"key_weight: given \(11,\), allowed \(12,\)"):
        depth_mix(sources, query, key_weight[:-1], eps=EPS)


def test_a_required_backend_that_cannot_run_is_refused() -> None:
    sources, (query, key_weight) = inputs(2)
    for backend in (Backend.fla, Backend.triton):
        wrong = rf"residual\.backend: given {backend.name} with require on cpu"
        with pytest.raises(ConfigError, match=wrong):
            depth_mix(sources, query, key_weight, eps=EPS, backend=backend, require=True)
    # Without it the fallback runs, and auto asks for nothing on a CPU.
    depth_mix(sources, query, key_weight, eps=EPS, backend=Backend.fla)
    depth_mix(sources, query, key_weight, eps=EPS, backend=Backend.auto, require=True)
