"""Probes score the answer alone, and what they hide stands where it is said to."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_ext.data.probe import DIGITS, context_probe, key_probe
from megatron_ext.data.stream import DocumentId, TokenStream
from megatron_ext.data.tokenizers import ByteTokenizer
from tests.unit.test_data_stream import make


def stream() -> TokenStream:
    return make([[900, 30, 500]], [1.0])


def text_of(length: int, depth: float | None, number: int = 0) -> tuple[str, str]:
    """The inputs and the scored labels of a probe, tokens outside of bytes as dots."""
    batch = key_probe(stream(), ByteTokenizer(), number=number, length=length, depth=depth)
    assert batch.tokens.shape == batch.labels.shape == (1, length)
    assert (batch.tokens[0, 1:] == batch.labels[0, :-1]).all()
    scored = batch.labels[batch.loss_mask == 1]

    def show(tokens: np.ndarray) -> str:
        return "".join(chr(t) if t < 128 else "." for t in tokens.tolist())

    return show(batch.tokens[0]), show(scored)


@pytest.mark.parametrize("length", [64, 300])
def test_the_key_stands_at_its_depth_and_only_the_answer_is_scored(length: int) -> None:
    for depth in (0.0, 0.5, 1.0):
        text, answer = text_of(length, depth)
        assert len(answer) == DIGITS
        assert answer.isdigit()
        needle = f"\nKey: {answer}\n"
        room = length + 1 - len(needle) - len("\nKey: ") - DIGITS
        assert text.index(needle) == round(depth * room)
        # The last digit of the answer is a label only.
        assert text.endswith("\nKey: " + answer[:-1])
    absent, answer = text_of(length, None)
    assert f"\nKey: {answer}" not in absent
    assert text_of(length, 0.5, number=1)[1] != answer


def test_a_length_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="length 20: a key and its question take 23 tokens"):
        text_of(20, 0.5)


def test_the_end_of_a_text_is_the_same_however_much_is_seen() -> None:
    document = DocumentId(0, 2)
    whole, half = (context_probe(stream(), document, length=64, seen=n) for n in (64, 32))
    assert (whole.tokens.shape, half.tokens.shape) == ((1, 64), (1, 32))
    scored = [batch.labels[batch.loss_mask == 1].tolist() for batch in (whole, half)]
    assert scored[0] == scored[1]
    assert len(scored[0]) == 64 // 8
    # Of one document, from its beginning.
    text = stream().read_piece(0, 2, begin=0, end=65)
    assert whole.tokens[0].tolist() == text[:-1].tolist()


def test_context_is_measured_in_documents_that_are_long_enough() -> None:
    blend = make([[900, 30, 500], [70, 64]], [1.0, 1.0])
    assert blend.longer_than(64, count=8) == [(0, 0), (1, 0), (0, 2)]
    assert blend.longer_than(64, count=2) == [(0, 0), (1, 0)]
    assert blend.longer_than(900, count=8) == []


def test_a_text_repeats_nothing_up_to_where_a_source_begins_anew() -> None:
    blend = make([[900], [70, 30]], [3.0, 1.0])
    # A quarter of the tokens is of the second source, which has 100.
    assert blend.longest_without_repeat == ("s1", 400)
    assert make([[900], [70, 30]], [1.0, 9.0]).longest_without_repeat == ("s1", 111)
