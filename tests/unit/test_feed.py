"""A batch that was begun during the step before it is the batch that would have been read."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from itertools import tee
from pathlib import Path

import numpy as np
import pytest

from megatron_ext.config.compose import compose
from megatron_ext.data.batches import MicroBatch
from megatron_ext.data.stream import TokenStream
from megatron_ext.parallel import cpu_support, runtime
from megatron_ext.train.feed import feeds_of, next_batches, next_feeds, read_ahead
from megatron_ext.train.state import TrainState, build_state
from megatron_ext.train.step import train_step

BATCH = 128


@pytest.fixture
def state(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[TrainState]:
    packing = getattr(request, "param", "best_fit")
    words = ["model=nano", "data=sample", f"data.packing={packing}", "data.isolate_documents=true"]
    words += ["data.sequence_length=32", f"train.batch_tokens={BATCH}", "train.micro_batch_size=1"]
    config = compose([*words, "optim.schedule=constant", f"run.dir={tmp_path}"])
    yield build_state(config, runtime.start(config.run))
    runtime.stop()
    cpu_support.uninstall()


def tokens(batches: Iterator[MicroBatch]) -> list[np.ndarray]:
    return [np.concatenate([batch.tokens, batch.labels]) for batch in batches]


def assert_same(found: list[np.ndarray], wanted: list[np.ndarray]) -> None:
    assert len(found) == len(wanted) == BATCH // 32
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("state", ["concat", "best_fit", "spiral"], indirect=True)
def test_what_was_read_ahead_is_the_next_batch(state: TrainState) -> None:
    for _ in range(3):
        train_step(state)
        assert state.ahead is not None
        assert state.ahead.position == state.position
        begun, whole = tee(state.ahead.batches)
        state.ahead = state.ahead._replace(batches=begun)
        assert_same(tokens(whole), tokens(next_batches(state)))


def test_it_is_used_once_and_only_where_the_next_batch_begins_there(state: TrainState) -> None:
    read_ahead(state)  # the batch after the next
    assert_same(tokens(next_feeds(state)[0]), tokens(next_batches(state)))
    assert state.ahead is None
    read_ahead(state)
    state.tokens += BATCH
    marked = [next(next_batches(state))]
    assert state.ahead is not None
    state.ahead = state.ahead._replace(batches=iter(marked))
    assert list(next_feeds(state)[0]) == marked
    state.tokens -= BATCH
    read_ahead(state)
    state.left_out += 2 * BATCH  # as a rewind that leaves data out
    assert_same(tokens(next_feeds(state)[0]), tokens(next_batches(state)))


def test_a_batch_that_cannot_be_read_fails_in_its_own_step(
    state: TrainState, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = TokenStream.pieces

    def torn(self: TokenStream, start: int, count: int) -> object:
        if start >= BATCH and self is state.train_data:
            raise OSError("the disk is gone")
        return real(self, start, count)

    monkeypatch.setattr(TokenStream, "pieces", torn)
    train_step(state)
    assert state.step == 1
    with pytest.raises(OSError, match="the disk is gone"):
        train_step(state)
    assert (state.step, state.tokens) == (1, BATCH)


def test_the_last_step_reads_nothing_ahead(state: TrainState) -> None:
    state.step = state.config.train.steps - 1
    train_step(state)
    assert state.ahead is None


def test_model_chunks_share_one_reading_and_nothing_is_kept(state: TrainState) -> None:
    state.chunks = state.chunks * 2
    first, second = feeds_of(state, next_batches(state))
    batch = next(first)
    kept = weakref.ref(batch)
    del batch
    assert next(second) is kept()
    assert kept() is None
    for _ in range(2):
        next(first)
    assert len(list(second)) == BATCH // 32 - 1
    assert len(list(first)) == BATCH // 32 - 3
