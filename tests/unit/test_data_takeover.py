"""A blend that takes over reads on where the one before stopped: no token twice, none left out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.data import TokenStream
from megatron_ext.data.change import go_on_with, remember
from megatron_ext.errors import DataError
from tests.unit.test_data_stream import make

LENGTHS = ([5, 17, 3, 9], [40, 1, 8], [12, 12])


def blend(weights: dict[int, float]) -> TokenStream:
    stream = make([LENGTHS[index] for index in weights], list(weights.values()))
    # `make` numbers the sources that it is given; the names decide what is which.
    for source, index in zip(stream._sources, weights, strict=True):
        source.name = source.order.name = f"s{index}"
        source.order._epochs.clear()
        source.begin_at(0, offset=0)
    stream.sources = tuple(f"s{index}" for index in weights)
    return stream


def by_source(stream: TokenStream, start: int, count: int) -> dict[str, list[int]]:
    part = stream.read(start, count)
    return {
        name: part.tokens[part.source == number].tolist()
        for number, name in enumerate(stream.sources)
    }


WEIGHTS = st.dictionaries(st.integers(0, 2), st.floats(0.1, 10), min_size=1)


@settings(max_examples=80, deadline=None)
@given(stages=st.lists(st.tuples(WEIGHTS, st.integers(1, 120)), min_size=2, max_size=4))
def test_every_source_is_read_through_whatever_the_blends(
    stages: list[tuple[dict[int, float], int]],
) -> None:
    """Sources come, go and come back; each one's tokens are those of its own stream, in order."""
    read: dict[str, list[int]] = {f"s{index}": [] for index in range(3)}
    position, places = 0, {}
    for weights, count in stages:
        stream = blend(weights)
        stream.take_over(position, places)
        half = count // 2
        parts = [(position + half, count - half), (position, half)]  # backwards: nothing is kept
        second, first = (by_source(stream, *part) for part in parts)
        for name in stream.sources:
            read[name] += first[name] + second[name]
        position += count
        places = stream.places(position)
    assert sum(map(len, read.values())) == position
    for index in range(3):
        alone = blend({index: 1.0})
        own = read[f"s{index}"]
        np.testing.assert_array_equal(own, alone.read(0, len(own)).tokens)


def test_the_same_blend_may_take_over_from_itself_at_a_document() -> None:
    whole = blend({0: 1.0, 1: 2.0})
    ends = np.flatnonzero(np.diff(whole.read(0, 200).document)) + 1
    for position in ends[:5].tolist():
        rest = blend({0: 1.0, 1: 2.0})
        rest.take_over(position, whole.places(position))
        assert rest.places(position) == whole.places(position)


def test_documents_keep_their_bounds_across_a_take_over() -> None:
    before, after = blend({0: 1.0, 1: 1.0}), blend({0: 1.0, 1: 3.0})
    after.take_over(7, before.places(7))
    pieces = after.pieces(7, 60)
    assert pieces.length.sum() == 60
    assert (pieces.end <= pieces.whole).all()
    part = after.read(7, 60)
    cuts = np.flatnonzero(np.diff(part.document)) + 1
    assert cuts.tolist() == np.cumsum(pieces.length)[:-1].tolist()
    # The rest of a document that the blend before had begun starts inside it.
    assert pieces.begin.max() > 0


def test_another_blend_needs_to_know_where_each_source_stands() -> None:
    old = {key: value for key, value in remember(blend({0: 1.0})).items() if key != "position"}
    with pytest.raises(DataError, match="did not note where each source stands"):
        go_on_with(old, blend({0: 1.0, 1: 1.0}), other_blend=True)
    go_on_with(old, blend({0: 1.0}), other_blend=False)
