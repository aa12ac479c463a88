"""Sequences that ask how far a model looks back: a key to be found again, a text cut short.

A probe is scored by the loss of its last tokens only, so it works at any length and layout, and
for a model that is too small to answer rightly.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from megatron_ext.data.batches import MicroBatch
from megatron_ext.data.stream import DocumentId, TokenStream
from megatron_ext.data.tokenizers import Tokenizer

DIGITS = 5


def key_probe(
    stream: TokenStream, tokenizer: Tokenizer, *, number: int, length: int, depth: float | None
) -> MicroBatch:
    """A key of five digits inside held-out text, asked for at the end; the answer is scored.

    Args:
        stream: text to hide it in.
        tokenizer: of the stream.
        number: of the probe; another text and another key each.
        length: tokens.
        depth: where the key stands, 0: at the beginning, 1: right before the question; None: it
            does not, so the answer can only be guessed.

    Raises:
        ValueError: the key and its question are longer than `length`.
    """
    digest = hashlib.blake2b(f"key {number}".encode(), digest_size=8).digest()
    digits = str(int.from_bytes(digest, "big") % 10**DIGITS).zfill(DIGITS)
    question = tokenizer.encode("\nKey: ")
    answer = tokenizer.encode(digits)
    needle = [] if depth is None else [*question, *answer, *tokenizer.encode("\n")]
    room = length + 1 - len(needle) - len(question) - len(answer)
    if room < 0:
        raise ValueError(f"length {length}: a key and its question take {length - room + 1} tokens")
    text = stream.read(number * length, room).tokens.tolist()
    place = round((depth or 0.0) * room)
    whole = [*text[:place], *needle, *text[place:], *question, *answer]
    return probe(np.array(whole, np.int64), scored=len(answer))


def context_probe(
    stream: TokenStream, document: DocumentId, *, length: int, seen: int
) -> MicroBatch:
    """A stretch of one document, of which the last `seen` of `length` tokens are given.

    The last eighth of `length` is scored, whatever is seen of what stands before it.
    """
    tokens = stream.read_piece(*document, begin=length - seen, end=length + 1)
    return probe(tokens, scored=length // 8)


def probe(tokens: npt.NDArray[np.int64], *, scored: int) -> MicroBatch:
    """One sequence, one document: inputs and labels of tokens [s + 1], the last labels scored."""
    length = tokens.size - 1
    mask = np.zeros((1, length), np.float32)
    mask[:, length - scored :] = 1
    return MicroBatch(
        tokens=tokens[None, :-1],
        labels=tokens[None, 1:],
        loss_mask=mask,
        source=np.zeros((1, length), np.int16),
        cu_seqlens=np.array([0, length], np.int32),
        position=np.arange(length, dtype=np.int32)[None],
    )
