"""The mixes of a layer in two phases: those of the formula, and those of our kernels one by one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron_ext.ops.attn_res import depth_mix_reference, triton
from megatron_ext.ops.attn_res.gradients import with_gradient_sum
from megatron_ext.ops.attn_res.triton import (
    depth_mix_triton,
    first_phase_triton,
    second_phase_triton,
)
from tests.kernels.common import TOLERANCE, draw, errors

EPS = 1e-5
VECTORS = 6  # query, key and norm weights of either mix


def inputs(count: int, *shape: int, dtype: torch.dtype) -> list[Tensor]:
    """What the first mix reads, the source more of the second, then the vectors of either."""
    width = shape[-1]
    sources = [(1 + j) * draw(*shape, dtype=dtype, seed=9 + j) for j in range(count + 1)]
    # As in `attn_res`: no source takes all.
    vectors = [(j % 3 > 0) + 0.1 * draw(width, seed=1 + j) for j in range(VECTORS)]
    return [*sources, *vectors]


def one_by_one(mix: Callable[..., Tensor], bank: int) -> Callable[..., Tensor]:
    """Both mixes by `mix`, one after the other."""

    def call(*tensors: Tensor) -> Tensor:
        *sources, running = tensors[:-VECTORS]
        query, key, norm, second_query, second_key, second_norm = tensors[-VECTORS:]
        once = mix(sources, query, key, eps=EPS, norm_weight=norm)
        # Attention in small: what the second mix reads depends on the first.
        read = [*sources[:bank], running + once.tanh()]
        again = mix(read, second_query, second_key, eps=EPS, norm_weight=second_norm)
        return torch.cat([once, again])

    return call


def in_phases(bank: int) -> Callable[..., Tensor]:
    """The same by our kernels in two phases."""

    def call(*tensors: Tensor) -> Tensor:
        *sources, running = tensors[:-VECTORS]
        query, key, norm, second_query, second_key, second_norm = tensors[-VECTORS:]
        once, begun = first_phase_triton(
            sources, query, key, bank_query=second_query, bank_key_weight=second_key,
            bank_sources=bank, eps=EPS, norm_weight=norm,
        )  # fmt: skip
        last = running + once.tanh()
        again = second_phase_triton(
            begun, last, second_query, second_key, eps=EPS, norm_weight=second_norm
        )
        return torch.cat([once, again])

    return call


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("count", "bank", "shape"),
    [(2, 1, (3, 2, 8)), (3, 3, (5, 1, 100)), (8, 7, (7, 64)), (9, 9, (2, 2, 130))],
    ids=str,
)
def test_two_phases_and_gradients(
    count: int, bank: int, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    tensors = inputs(count, *shape, dtype=dtype)
    exact = one_by_one(depth_mix_reference, bank)
    found = errors(in_phases(bank), exact, tensors)
    single = errors(one_by_one(depth_mix_triton, bank), exact, tensors)
    assert max(found) <= 4 * TOLERANCE[dtype]
    # The mix of the bank is rounded to 16 bits: of what has 16 bits itself, at most twice the
    # square of the error. Vectors of the second mix, float32, get it whole.
    for place, (error, alone) in enumerate(zip(found, single, strict=True)):
        rounded = TOLERANCE[dtype] if place >= len(found) - VECTORS else 4e-6
        assert error <= 1.5 * alone + rounded, (place, found, single)


def test_two_phases_add_gradients_up_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers that read the same finished sources; programs that take several tokens each."""
    monkeypatch.setattr(triton, "launch_settings", lambda *_: {"PROGRAMS": 4, "num_warps": 4})
    tensors = [x.requires_grad_() for x in inputs(3, 9, 2, 100, dtype=torch.float32)]

    def grads(collect: Callable[[Tensor], Tensor], both: Callable[..., Tensor]) -> list[Tensor]:
        read = [*map(collect, tensors[:2]), *tensors[2:]]
        out = both(*read).sin() + (3 * both(*read)).cos() + 3 * read[1].sin().repeat(2, 1, 1)
        return list(torch.autograd.grad(out.square().sum(), tensors))

    found = grads(with_gradient_sum, in_phases(2))
    wanted = grads(lambda x: x, one_by_one(depth_mix_triton, 2))
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("used", ["first", "second"])
def test_one_mix_may_be_unused(used: str) -> None:
    tensors = [x.requires_grad_() for x in inputs(3, 4, 24, dtype=torch.float32)]
    half = slice(0, 4) if used == "first" else slice(4, 8)

    def grads(both: Callable[..., Tensor]) -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(both(*tensors)[half].square().sum(), tensors, allow_unused=True)

    found, wanted = grads(in_phases(2)), grads(one_by_one(depth_mix_triton, 2))
    for got, want in zip(found, wanted, strict=True):
        if got is not None and want is not None:
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        else:
            assert all(x is None or not x.any() for x in (got, want))


def test_two_phases_without_tokens() -> None:
    tensors = [x.requires_grad_() for x in inputs(2, 0, 16, dtype=torch.float32)]
    found = torch.autograd.grad(in_phases(2)(*tensors).sum(), tensors)
    assert all(not x.any() for x in found)


@pytest.mark.parametrize("count", [3, 9])
def test_two_phases_keep_one_tensor_more_whatever_the_number_of_sources(count: int) -> None:
    tensors = [x.requires_grad_() for x in inputs(count, 5, 64, dtype=torch.bfloat16)]
    known = {x.untyped_storage().data_ptr() for x in tensors}
    kept: dict[int, Tensor] = {}

    def pack(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in known:
            kept[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        *sources, running = tensors[:-VECTORS]
        query, key, norm, second_query, second_key, second_norm = tensors[-VECTORS:]
        _, begun = first_phase_triton(
            sources, query, key, bank_query=second_query, bank_key_weight=second_key,
            bank_sources=count, eps=EPS, norm_weight=norm,
        )  # fmt: skip
        second_phase_triton(
            begun, running, second_query, second_key, eps=EPS, norm_weight=second_norm
        )
    numbers = 4 * 5 * (3 * count + 2 * 2)  # of float32: three a source, then two of two sources
    assert sum(x.untyped_storage().nbytes() for x in kept.values()) == numbers + 2 * 5 * 64
