"""The order of documents: a function of (seed, source, epoch), with random access.

Only stable ingredients: Philox's raw 64-bit words (numpy promises their stream for ever, unlike
that of ``Generator.permutation``), a sort of distinct keys, integer sums.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

EPOCHS_KEPT = 3  # a read may straddle two, and its search looks one further


def permutation(count: int, *, seed: int, name: str, epoch: int) -> npt.NDArray[np.uint32]:
    """Document order of one epoch: uint32 [count], the same on every machine and numpy version.

    Random bits stand above the index in one 64-bit key, so the keys are distinct and any sort gives
    the same order; 10 million documents take about half a second.
    """
    digest = hashlib.blake2b(f"{seed}\0{name}\0{epoch}".encode(), digest_size=16).digest()
    generator = np.random.Philox(key=np.frombuffer(digest, dtype="<u8").astype(np.uint64))
    bits = np.uint64(max(count - 1, 1).bit_length())
    keys = np.asarray(generator.random_raw(count), dtype=np.uint64)
    keys <<= bits
    keys |= np.arange(count, dtype=np.uint64)
    keys.sort()
    keys &= (np.uint64(1) << bits) - np.uint64(1)
    return keys.astype(np.uint32)


def held_out(count: int, *, share: float) -> npt.NDArray[np.bool_]:
    """Which documents are kept for evaluation: bool [count].

    A hash of the document's index alone (splitmix64, Steele et al. 2014): neither seed, epoch nor
    weight moves a document to the other side, nor do documents added behind. A share above 0 keeps
    at least one document of a source that has two or more.
    """
    value = np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    value += np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    value ^= value >> np.uint64(31)
    chosen = (value >> np.uint64(11)) < np.uint64(int(share * 2**53))
    if share > 0 and count > 1:
        if not chosen.any():
            chosen[value.argmin()] = True
        elif chosen.all():
            chosen[value.argmax()] = False
    return np.asarray(chosen)


@dataclass(frozen=True)
class Epoch:
    """documents: uint32 [n], rows in this order. starts: int64 [n + 1], tokens before each."""

    documents: npt.NDArray[np.uint32]
    starts: npt.NDArray[np.int64]


class DocumentOrder:
    """The endless stream of one source: epoch after epoch, each in its own permutation.

    Args:
        lengths: int32 [n], tokens of each document (all above 0).
        name: of the source; two sources of equal sizes have different orders.
        seed: of the run.
    """

    def __init__(self, lengths: npt.NDArray[np.int32], *, name: str, seed: int) -> None:
        self.lengths = lengths
        self.name = name
        self.seed = seed
        self.tokens = int(lengths.sum(dtype=np.int64))
        self.longest = int(lengths.max())
        self._epochs: OrderedDict[int, Epoch] = OrderedDict()

    def epoch(self, number: int) -> Epoch:
        """Order and token starts of one epoch; the last few are kept."""
        found = self._epochs.get(number)
        if found is None:
            order = permutation(self.lengths.size, seed=self.seed, name=self.name, epoch=number)
            starts = np.zeros(order.size + 1, dtype=np.int64)
            np.cumsum(self.lengths[order], dtype=np.int64, out=starts[1:])
            found = self._epochs[number] = Epoch(order, starts)
            while len(self._epochs) > EPOCHS_KEPT:
                self._epochs.popitem(last=False)
        else:
            self._epochs.move_to_end(number)
        return found

    def first_from(self, token: int) -> tuple[int, int]:
        """(ordinal, start) of the first document that starts at or after a token of this stream."""
        number, rest = divmod(token, self.tokens)
        starts = self.epoch(number).starts
        place = int(np.searchsorted(starts[:-1], rest, side="left"))
        return number * self.lengths.size + place, number * self.tokens + int(starts[place])

    def start(self, ordinal: int) -> int:
        """Tokens of this stream before a document."""
        number, place = divmod(ordinal, self.lengths.size)
        return number * self.tokens + int(self.epoch(number).starts[place])

    def document(self, ordinal: int) -> int:
        """Row of the document with this ordinal of the endless stream."""
        number, place = divmod(ordinal, self.lengths.size)
        return int(self.epoch(number).documents[place])
