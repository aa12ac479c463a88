"""Chunked cross-entropy against the formula: values, gradients, masks, shards, memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from megatron_ext.ops.cross_entropy import (
    IGNORED,
    chunk_for,
    cross_entropy_reference,
    linear_cross_entropy,
)
from tests.support.memory import PeakMemory
from tests.support.threads import run_ranks

TOKENS, WIDTH, VOCAB = 23, 8, 12
# float64 sums in another order
EXACT = {"rtol": 1e-12, "atol": 1e-13}


def problem(dtype: torch.dtype = torch.float64, *, spread: float = 1.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    labels = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    labels[4], labels[17] = IGNORED, -1
    return {
        "hidden": (spread * normal(TOKENS, WIDTH)).to(dtype),
        "weight": normal(VOCAB, WIDTH).to(dtype),
        "labels": labels,
        "upstream": normal(TOKENS),
    }


def run(
    given: dict[str, Tensor], *, chunk: int | None, group: dist.ProcessGroup | None = None
) -> list[Tensor]:
    """Losses and the gradients of hidden states and weight; chunk None: the formula."""
    ranks, rank = (1, 0) if group is None else (group.size(), group.rank())
    hidden = given["hidden"].clone().requires_grad_()
    weight = given["weight"].chunk(ranks)[rank].clone().requires_grad_()
    if chunk is None:
        losses = cross_entropy_reference(hidden, weight, given["labels"])
    else:
        losses = linear_cross_entropy(
            hidden, weight, given["labels"], chunk_tokens=chunk, group=group
        )
    gradients = torch.autograd.grad((losses * given["upstream"]).sum(), (hidden, weight))
    return [losses.detach(), *gradients]


@pytest.mark.parametrize("chunk", [1, 7, TOKENS, 1000])
def test_equals_the_formula_in_every_chunk_size(chunk: int) -> None:
    given = problem()
    for ours, truth in zip(run(given, chunk=chunk), run(given, chunk=None), strict=True):
        torch.testing.assert_close(ours, truth, **EXACT)


def test_equals_the_formula_to_rounding_in_float32() -> None:
    truth = run(problem(), chunk=None)
    for ours, want in zip(run(problem(torch.float32), chunk=7), truth, strict=True):
        # eight products of float32 a logit
        torch.testing.assert_close(ours.double(), want, rtol=1e-5, atol=1e-5)


def test_many_chunks_do_not_lose_the_gradient_of_a_16_bit_weight() -> None:
    given = problem(torch.bfloat16)
    exact = run({k: v.double() if v.is_floating_point() else v for k, v in given.items()}, chunk=7)
    error = [
        float((run(given, chunk=chunk)[2].double() - exact[2]).norm() / exact[2].norm())
        for chunk in (1, TOKENS)
    ]
    assert max(error) < 2**-7  # one rounding to bfloat16 of logits' gradients, one of the sum


@pytest.mark.parametrize("ranks", [2, 3])
def test_shards_of_the_vocabulary_equal_the_whole(ranks: int) -> None:
    given = problem()
    truth = run(given, chunk=None)
    parts = run_ranks(ranks, lambda group: run(given, chunk=7, group=group))
    for losses, _, _ in parts:
        torch.testing.assert_close(losses, truth[0], **EXACT)
    torch.testing.assert_close(sum(hidden for _, hidden, _ in parts), truth[1], **EXACT)
    torch.testing.assert_close(torch.cat([weight for _, _, weight in parts]), truth[2], **EXACT)


def test_the_sharded_comparison_sees_a_lost_maximum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: each shard keeps its own maximum."""
    given, real = problem(), dist.all_reduce

    def lossy(x: Tensor, op: object = dist.ReduceOp.SUM, group: object = None) -> None:
        if op == dist.ReduceOp.SUM:
            real(x, group=group)

    monkeypatch.setattr(dist, "all_reduce", lossy)
    losses = run_ranks(2, lambda group: run(given, chunk=7, group=group))[0][0]
    assert not torch.allclose(losses, run(given, chunk=None)[0], rtol=1e-3)


def test_tokens_that_do_not_count_have_no_loss_and_no_gradient() -> None:
    given = problem()
    losses, hidden, _ = run(given, chunk=5)
    ignored = given["labels"] < 0
    assert ignored.sum() == 2
    assert not losses[ignored].any()
    assert not hidden[ignored].any()
    assert losses[~ignored].all()
    assert not torch.stack([x.abs().sum() for x in run_all_ignored()]).any()


def run_all_ignored() -> list[Tensor]:
    given = problem()
    given["labels"] = torch.full_like(given["labels"], IGNORED)
    return run(given, chunk=5)


def test_logits_in_the_thousands_stay_finite() -> None:
    given = problem(torch.float32, spread=1e3)
    truth = run(problem(spread=1e3), chunk=None)[0]
    losses, *gradients = run(given, chunk=7)
    torch.testing.assert_close(losses.double(), truth, rtol=1e-5, atol=1e-3)
    assert all(x.isfinite().all() for x in gradients)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_plan_counts_every_product_and_makes_nothing_else_of_their_size(
    dtype: torch.dtype,
) -> None:
    tokens, width, vocab = 64, 32, 96
    hidden, weight = (
        torch.empty(n, width, dtype=dtype, device="meta", requires_grad=True)
        for n in (tokens, vocab)
    )
    labels = torch.empty(tokens, dtype=torch.int64, device="meta")
    with FlopCounterMode(display=False) as counter, Made() as made:
        losses = linear_cross_entropy(hidden, weight, labels, chunk_tokens=16)
        torch.autograd.grad(losses.sum(), [hidden, weight])
    assert counter.get_total_flops() == 4 * 2 * tokens * width * vocab
    sizes = [shape for shape in made.shapes if shape == (vocab, width)]
    # The sum and, in 16 bits, what it is rounded to; in 32 a product a chunk.
    assert len(sizes) == (2 if dtype is torch.bfloat16 else 1 + tokens // 16)
    assert made.shapes.count((16, vocab)) == 2 * tokens // 16, "logits, twice"


class Made(TorchDispatchMode):
    """Shapes of the tensors that are made, views left out."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []
        self._known: set[int] = set()
        self._alive: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        storage = out.untyped_storage()._cdata if isinstance(out, Tensor) else None
        if storage is not None and storage not in self._known:
            given = [x for x in args if isinstance(x, Tensor)]
            if all(x.untyped_storage()._cdata != storage for x in given):
                self.shapes.append(tuple(out.shape))
            self._known.add(storage)
            self._alive.append(out)
        return out


def test_a_frozen_weight_gets_no_gradient() -> None:
    given = problem()
    hidden = given["hidden"].clone().requires_grad_()
    losses = linear_cross_entropy(hidden, given["weight"], given["labels"], chunk_tokens=7)
    (losses * given["upstream"]).sum().backward()
    torch.testing.assert_close(hidden.grad, run(given, chunk=None)[1], **EXACT)


def peak_beyond_inputs(tokens: int, *, chunk: int, vocab: int = 512) -> tuple[int, int]:
    """Bytes alive at the peak beyond the gradients that are returned; bytes of the largest."""
    hidden = torch.randn(tokens, 4, requires_grad=True)
    weight = torch.randn(vocab, 4, requires_grad=True)
    labels = torch.randint(0, vocab, (tokens,))
    with PeakMemory() as memory:
        linear_cross_entropy(hidden, weight, labels, chunk_tokens=chunk).sum().backward()
    return memory.peak, memory.largest


def test_memory_beside_a_few_numbers_a_token_does_not_grow_with_length() -> None:
    chunk, vocab, short, long = 32, 512, 1024, 8192
    (small, largest), (large, largest_of_large) = (
        peak_beyond_inputs(n, chunk=chunk, vocab=vocab) for n in (short, long)
    )
    assert largest == chunk * vocab * 4
    # a token: hidden gradient (16), loss, log-sum, two temporaries, label, masks, upstream
    assert (large - small) / (long - short) < 100
    assert large < long * vocab * 4 / 10
    assert largest_of_large == max(chunk * vocab * 4, long * 4 * 4)


def test_a_chunk_is_as_large_as_its_logits_may_be() -> None:
    assert chunk_for(20480) == 3276
    assert chunk_for(1 << 30) == 1
    with pytest.raises(ValueError, match="chunk_tokens: given 0, allowed 1 or more"):
        linear_cross_entropy(
            torch.ones(1, 1), torch.ones(1, 1), torch.zeros(1).long(), chunk_tokens=0
        )
