"""Packing: every token once, few cuts, labels that follow their own document, any layout alike."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.config.schema import Packing
from megatron_ext.data.batches import MicroBatch, micro_batches
from megatron_ext.data.packing import pack
from megatron_ext.data.statistics import batch_statistics, bucket_starts
from tests.unit.test_data_stream import BLEND, flat, make

PACKERS = (Packing.best_fit, Packing.spiral)


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=30),
    capacity=st.integers(1, 20),
    packing=st.sampled_from(PACKERS),
    segment=st.integers(0, 5),
)
def test_every_token_stands_in_exactly_one_sequence(
    lengths: list[int], capacity: int, packing: Packing, segment: int
) -> None:
    short = -sum(lengths) % capacity
    sizes = np.array(lengths + [short] * (short > 0), np.int64)
    rows = pack(sizes, sequence_length=capacity, packing=packing, segment=segment)
    assert [sum(item.length for item in row) for row in rows] == [capacity] * len(rows)
    seen = [np.zeros(size, int) for size in sizes]
    for item in itertools.chain.from_iterable(rows):
        assert item.length > 0
        seen[item.piece][item.offset : item.offset + item.length] += 1
    assert all((part == 1).all() for part in seen)
    assert rows == pack(sizes, sequence_length=capacity, packing=packing, segment=segment)
    # tokens of a document keep their order inside a sequence
    for row in rows:
        for piece in {item.piece for item in row}:
            own = [item.offset for item in row if item.piece == piece]
            assert own == sorted(own)


def cut_pieces(rows: list, sizes: np.ndarray) -> int:
    held = [{item.piece for item in row} for row in rows]
    return sum(sum(piece in row for row in held) > 1 for piece in range(sizes.size))


def test_best_fit_cuts_few_documents() -> None:
    """Log-normal lengths as of text, 64 sequences of 1024: concat cuts one a sequence."""
    rng = np.random.default_rng(0)
    sizes = np.exp(rng.normal(5, 1, 4000)).astype(np.int64) + 1
    sizes = sizes[: int(np.searchsorted(sizes.cumsum(), 64 * 1024))]
    sizes = np.append(sizes, 64 * 1024 - sizes.sum())
    rows = pack(sizes, sequence_length=1024, packing=Packing.best_fit)
    longer = int((sizes > 1024).sum())
    ends = sizes.cumsum()
    concat = int(((ends - sizes) // 1024 != (ends - 1) // 1024).sum())
    assert concat > 50
    # No gap may stay, so a few more than the documents that fit nowhere are cut.
    assert cut_pieces(rows, sizes) - longer < concat / 5


def test_spiral_takes_length_classes_in_turn() -> None:
    sizes = np.array([1, 1, 2, 8, 9, 3, 8], np.int64)
    rows = pack(sizes, sequence_length=16, packing=Packing.spiral)
    assert [item.piece for item in rows[0]] == [3, 2, 0, 4]
    assert [item.piece for item in rows[1]] == [4, 5, 1, 6]


def test_spiral_segments_of_a_sequence_are_interleaved() -> None:
    sizes = np.array([5, 2, 3], np.int64)
    (row,) = pack(sizes, sequence_length=10, packing=Packing.spiral, segment=2)
    assert [(item.piece, item.offset, item.length) for item in row] == [
        (0, 0, 2),
        (1, 0, 2),
        (2, 0, 2),
        (0, 2, 2),
        (2, 2, 1),
        (0, 4, 1),
    ]


def batches(
    packing: Packing, *, size: int, ranks: int, isolate: bool, segment: int = 0, length: int = 16
) -> list[MicroBatch]:
    stream = make(*BLEND, isolate=isolate)
    each = [
        list(
            micro_batches(
                stream,
                start=100,
                batch_tokens=192,
                sequence_length=length,
                micro_batch_size=size,
                data_rank=rank,
                data_size=ranks,
                packing=packing,
                segment=segment,
            )
        )
        for rank in range(ranks)
    ]
    return [batch for step in zip(*each, strict=True) for batch in step]


@pytest.mark.parametrize("packing", PACKERS)
@pytest.mark.parametrize("isolate", [False, True])
def test_a_packed_batch_is_a_rearranged_stretch_in_every_layout(
    packing: Packing, isolate: bool
) -> None:
    whole = make(*BLEND).read(100, 192)
    segment = 0 if isolate else 3
    first = batches(packing, size=1, ranks=1, isolate=isolate, segment=segment)
    for size, ranks in [(1, 1), (2, 1), (1, 4), (3, 2), (12, 1)]:
        found = batches(packing, size=size, ranks=ranks, isolate=isolate, segment=segment)
        for name in ("tokens", "labels", "loss_mask", "source", "position"):
            np.testing.assert_array_equal(flat(found, name), flat(first, name))
    assert sorted(flat(first, "tokens").tolist()) == sorted(whole.tokens.tolist())
    for length in (8, 32, 96):  # another length: the same tokens
        other = batches(packing, size=1, ranks=1, isolate=isolate, length=length)
        assert sorted(flat(other, "tokens").tolist()) == sorted(whole.tokens.tolist())


@pytest.mark.parametrize("packing", PACKERS)
def test_the_label_is_the_next_token_of_the_document(packing: Packing) -> None:
    """A token of the test's corpora is 1000 * document + place, so the next one is one more."""
    for batch in batches(packing, size=3, ranks=1, isolate=True):
        counted = batch.loss_mask > 0
        np.testing.assert_array_equal(batch.labels[counted], batch.tokens[counted] + 1)
        bounds = batch.cu_seqlens
        assert bounds is not None
        assert (np.diff(bounds) > 0).all()
        flat_tokens, places = batch.tokens.reshape(-1), batch.position.reshape(-1)
        for begin, end in itertools.pairwise(bounds):
            run = flat_tokens[begin:end]
            np.testing.assert_array_equal(run, run[0] + np.arange(end - begin))
            np.testing.assert_array_equal(places[begin:end], np.arange(end - begin))


def test_seeing_across_the_label_of_an_end_is_the_next_document() -> None:
    for batch in batches(Packing.spiral, size=3, ranks=1, isolate=False, segment=3):
        own = batch.labels == batch.tokens + 1
        following = np.zeros_like(own)
        following[:, :-1] = batch.labels[:, :-1] == batch.tokens[:, 1:]
        assert (own | following | (batch.loss_mask == 0)).all()
        assert (batch.loss_mask[:, :-1] == 1).all()
        assert batch.cu_seqlens is None
        np.testing.assert_array_equal(batch.position, np.tile(np.arange(16), (3, 1)))


def test_statistics_of_a_batch() -> None:
    assert bucket_starts(1024, first=1024) == [0]
    assert bucket_starts(1025, first=1024) == [0, 1024]
    assert bucket_starts(9000, first=1024) == [0, 1024, 2048, 4096, 8192]
    assert bucket_starts(9000, first=0) == [0]
    stream = make([[4, 12, 8]], [1.0])
    for packing, cut in ((Packing.concat, 1), (Packing.best_fit, 0)):
        got = batch_statistics(
            stream,
            start=0,
            batch_tokens=24,
            sequence_length=12,
            packing=packing,
            buckets=bucket_starts(12, first=8),
        )
        order = stream.pieces(0, 24).length.tolist()
        assert got["data/documents"] == 3
        wanted = cut if order[0] != 12 and order[2] != 12 else 0
        assert got["data/cut_documents"] == wanted
        assert got["data/length/0"] == pytest.approx(4 / 24)
        assert got["data/length/8"] == pytest.approx(20 / 24)
