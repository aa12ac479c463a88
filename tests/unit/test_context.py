"""Parts of sequences for context parallel ranks: tokens, documents, halos, exchange of heads."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_ext.data.batches import MicroBatch, padded_length, part_of_rank
from megatron_ext.parallel.context import (
    heads_to_sequence,
    part_of,
    sequence_to_heads,
    with_previous,
)
from tests.support.threads import run_ranks


def batch_of(lengths: list[int], *, sequences: int, isolate: bool) -> MicroBatch:
    """A micro-batch whose tokens are their own place, and labels the next one's."""
    count = sum(lengths)
    shape = (sequences, count // sequences)
    place = np.arange(count).reshape(shape)
    bounds = np.cumsum([0, *lengths]).astype(np.int32) if isolate else None
    return MicroBatch(
        tokens=place,
        labels=place + 1,
        loss_mask=np.ones(shape, np.float32),
        source=np.ones(shape, np.int16),
        cu_seqlens=bounds,
        position=place.astype(np.int32),
    )


@settings(deadline=None, max_examples=80)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    ranks=st.integers(1, 5),
    multiple=st.integers(1, 3),
)
def test_parts_hold_every_token_once_and_padding_counts_nowhere(
    lengths: list[int], ranks: int, multiple: int
) -> None:
    batch = batch_of(lengths, sequences=1, isolate=True)
    parts = [part_of_rank(batch, rank=r, ranks=ranks, multiple=multiple) for r in range(ranks)]
    assert len({part.tokens.shape for part in parts}) == 1
    assert parts[0].tokens.shape[1] % multiple == 0
    joined = np.concatenate([part.tokens[0] for part in parts])
    mask = np.concatenate([part.loss_mask[0] for part in parts])
    total, count = joined.size, batch.tokens.size
    assert total == padded_length(count, ranks=ranks, multiple=multiple)
    assert total - count < ranks * multiple
    np.testing.assert_array_equal(joined[:count], np.arange(count))
    np.testing.assert_array_equal(mask, np.arange(total) < count)
    if total > count:
        padding = [part.padding[0] for part in parts if part.padding is not None]
        np.testing.assert_array_equal(np.concatenate(padding), np.arange(total) >= count)
    bounds = parts[0].cu_seqlens
    assert bounds is not None
    assert bounds.tolist() == np.cumsum([0, *lengths]).tolist() + [total] * (total > count)


def test_every_sequence_of_a_batch_is_shared_out_by_itself() -> None:
    batch = batch_of([10], sequences=2, isolate=False)
    parts = [part_of_rank(batch, rank=r, ranks=2, multiple=2) for r in range(2)]
    assert parts[0].tokens.tolist() == [[0, 1, 2, 3], [5, 6, 7, 8]]
    assert parts[1].tokens.tolist() == [[4, 0, 0, 0], [9, 0, 0, 0]]
    assert parts[1].labels.tolist() == [[5, 0, 0, 0], [10, 0, 0, 0]]
    assert parts[1].loss_mask.tolist() == [[1, 0, 0, 0]] * 2


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 7), min_size=1, max_size=12), st.integers(1, 4))
def test_bounds_within_a_part_are_those_of_the_row(lengths: list[int], ranks: int) -> None:
    lengths.append(-sum(lengths) % ranks + ranks)  # to a multiple, and not empty
    bounds = list(itertools.accumulate(lengths, initial=0))
    document = np.repeat(np.arange(len(lengths)), lengths)
    size = bounds[-1] // ranks
    for rank in range(ranks):
        local, before = part_of(bounds, start=rank * size, end=(rank + 1) * size)
        own = document[rank * size : (rank + 1) * size]
        wanted = [0, *(np.flatnonzero(np.diff(own)) + 1).tolist(), size]
        assert local == wanted
        assert before == (document[: rank * size] == own[0]).sum()


def test_a_halo_is_the_end_of_the_rank_before_and_its_gradient_goes_back() -> None:
    """Over three ranks of 4 tokens; on rank 1 the first document has one token before it."""
    x = torch.randn(12, 2, 3, dtype=torch.float64)
    upstream = torch.randn(3, 7, 2, 3, dtype=torch.float64)
    before = (0, 1, 8)

    def part(group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        rank = group.rank()
        own = x[4 * rank : 4 * rank + 4].clone().requires_grad_()
        y = with_previous(own, 3, before=before[rank], group=group)
        return y.detach(), torch.autograd.grad(y, own, upstream[rank])[0]

    parts = run_ranks(3, part)
    gradient = torch.zeros_like(x)
    for rank, (y, _) in enumerate(parts):
        known = min(3, before[rank])
        assert not y[: 3 - known].any()
        torch.testing.assert_close(y[3 - known :], x[4 * rank - known : 4 * rank + 4])
        gradient[4 * rank - known : 4 * rank + 4] += upstream[rank, 3 - known :]
    torch.testing.assert_close(torch.cat([g for _, g in parts]), gradient)


@pytest.mark.parametrize("ranks", [2, 4])
def test_heads_for_sequence_and_back(ranks: int) -> None:
    tokens, heads = 8, 4
    x = torch.arange(tokens * 2 * heads * 3).view(tokens, 2, heads, 3).double()

    def part(group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
        own = x.chunk(ranks)[group.rank()].clone().requires_grad_()
        some = sequence_to_heads(own, group=group)
        back = heads_to_sequence(some * 2, group=group)
        (gradient,) = torch.autograd.grad(back.square().sum(), own)
        return some.detach(), back.detach(), gradient

    for rank, (some, back, gradient) in enumerate(run_ranks(ranks, part)):
        own = x.chunk(ranks)[rank]
        torch.testing.assert_close(some, x.chunk(ranks, dim=2)[rank])
        torch.testing.assert_close(back, own * 2)
        torch.testing.assert_close(gradient, own * 8)
