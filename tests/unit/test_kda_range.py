"""Range of the tiles: what the bound of the decay buys, and what happens without it."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_ext.ops.kda import chunk_kda, max_inverse_decay, recurrent_kda
from megatron_ext.ops.kda.tiles import CHUNK, TILE, centring, chunk_products, empty_products
from tests.support.kda_inputs import Case, make

FLOAT32 = 1e-5  # as in test_kda_dense


def tensors(tokens: int, *, decay: float, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    x = make(Case(tokens))
    q, k, v = (torch.nn.functional.normalize(x[n], dim=-1).to(dtype) for n in "qkv")
    return [q, k, v, torch.full_like(q, decay), x["beta"].sigmoid().to(dtype)]


def gradients(
    function, inputs: list[torch.Tensor], *, size: float, **options
) -> list[torch.Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    o, _ = function(*leaves, **options)
    upstream = torch.randn(o.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return [o.detach(), *torch.autograd.grad(o, leaves, size * upstream.to(o.dtype))]


@pytest.mark.parametrize("size", [1.0, 1e-9, 1e-15, 1e9])
def test_decay_at_the_bound_everywhere_is_exact_for_gradients_of_any_size(size: float) -> None:
    # Tiny upstream gradients are what a loss averaged over a large batch gives; with rows as small
    # as e^-80 they would fall below the smallest float32.
    inputs = tensors(100, decay=-5.0)
    got = gradients(chunk_kda, inputs, size=size)
    want = gradients(recurrent_kda, [x.double() for x in inputs], size=size)
    for name, a, b in zip(("o", "q", "k", "v", "g", "beta"), got, want, strict=True):
        assert a.isfinite().all()
        # The gradient of g is a difference of terms e^5 = 150 times as large: its own rounding is
        # that much larger. Its natural size is that of the gradient of k.
        floor = 0.1 * want[2].norm() if name == "g" else 0.0
        assert (a - b).norm() < FLOAT32 * max(b.norm(), floor), name


def test_no_decay_is_exact() -> None:
    inputs = tensors(100, decay=0.0)
    got = gradients(chunk_kda, inputs, size=1.0)
    want = gradients(recurrent_kda, [x.double() for x in inputs], size=1.0)
    for a, b in zip(got, want, strict=True):
        assert (a - b).norm() < FLOAT32 * b.norm()


def products(*, tile: int, decay: float, lower_bound: float | None) -> torch.Tensor:
    inputs = tensors(2 * tile, decay=decay)
    q, k, g = (inputs[i].transpose(1, 2).contiguous() for i in (0, 1, 3))
    parts = empty_products(k)
    chunk_products(q, k, g, parts, tile=tile, lower_bound=lower_bound)
    return parts.square


def test_tile_of_16_tokens_is_finite_at_the_bound_and_18_tokens_overflow() -> None:
    assert products(tile=16, decay=-5.0, lower_bound=-5.0).isfinite().all()
    assert products(tile=17, decay=-5.0, lower_bound=-5.0).isfinite().all()
    assert not products(tile=18, decay=-5.0, lower_bound=-5.0).isfinite().all()


def test_unbounded_gate_overflows_on_the_matrix_path_but_not_on_the_element_wise_one() -> None:
    assert not products(tile=16, decay=-20.0, lower_bound=-5.0).isfinite().all()
    assert products(tile=16, decay=-20.0, lower_bound=None).isfinite().all()
    inputs = tensors(100, decay=-20.0)
    got = gradients(chunk_kda, inputs, size=1.0, lower_bound=None)
    assert all(x.isfinite().all() for x in got)
    o, _ = chunk_kda(*inputs, lower_bound=-5.0, check=False)
    assert not o.isfinite().all()


@pytest.mark.parametrize("value", [-5.1, 0.01, math.nan, -math.inf])
def test_one_log_decay_outside_the_bound_is_an_error(value: float) -> None:
    inputs = tensors(40, decay=-1.0)
    inputs[3][0, 33, 1, 2] = value
    with pytest.raises(ValueError, match=r"allowed \[-5, 0\] on the dense path"):
        chunk_kda(*inputs)


@pytest.mark.parametrize("bound", [-6.0, 0.0, 1.0])
def test_bound_that_a_tile_cannot_take_is_an_error(bound: float) -> None:
    with pytest.raises(ValueError, match="lower_bound: given"):
        chunk_kda(*tensors(4, decay=0.0), lower_bound=bound)


def test_largest_inverse_decay_of_a_tile_is_reported() -> None:
    g = torch.full((1, 40, 2, 4), -5.0)
    g[:, :, 1] = 0.0
    found = max_inverse_decay(g)
    assert found.shape == (1, 3, 2)
    # 16, 16 and 8 tokens at 5 nats. exp in float32 is right to 1e-5 for exponents of 80 (one ulp of
    # the exponent is 8e-6).
    want = torch.tensor([80.0, 80.0, 40.0], dtype=torch.float64).exp().float()
    torch.testing.assert_close(found[0, :, 0], want, rtol=2e-5, atol=0.0)
    assert torch.equal(found[0, :, 1], torch.ones(3))
    assert max_inverse_decay(g, tile=18)[0, 0, 0] == math.inf


def test_centring_is_a_power_of_two_that_halves_the_range() -> None:
    scale = centring(tile=TILE, lower_bound=-5.0)
    assert math.frexp(scale)[0] == 0.5
    assert abs(math.log(scale) - 40.0) < 0.35  # half a factor of two
    assert CHUNK % TILE == 0
