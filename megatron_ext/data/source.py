"""One split of one prepared corpus: an endless stream of whole documents, from any place on."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from megatron_ext.data.indexed import ShardReader
from megatron_ext.data.order import DocumentOrder, held_out
from megatron_ext.errors import DataError

Split = Literal["train", "held_out"]


class Source:
    """One split of one prepared corpus: its shards, which documents belong, and their order.

    Args:
        name: in metrics. shards: opened. share: held out, in [0, 1). split: which side.
        seed: of the order.
    """

    def __init__(
        self, name: str, *, shards: Sequence[ShardReader], share: float, split: Split, seed: int
    ) -> None:
        self.name = name
        self._shards = list(shards)
        counts = [len(shard) for shard in shards]
        self._firsts = [sum(counts[:i]) for i in range(len(counts))]
        lengths = np.concatenate([shard.lengths for shard in shards])
        kept = held_out(lengths.size, share=share)
        if split == "train":
            kept = ~kept
        kept &= lengths > 0
        self._rows = np.flatnonzero(kept)
        if not self._rows.size:
            raise DataError(
                f"source {name}: none of its {lengths.size} documents is in the {split} split at "
                f"data.held_out={share}. Give more documents, or another data.held_out in (0, 1)"
            )
        self.order = DocumentOrder(lengths[self._rows], name=name, seed=seed)
        self.begin_at(0, offset=0)

    def begin_at(self, ordinal: int, *, offset: int) -> None:
        """Leave out all documents before one, and its first tokens: another blend has read them."""
        self._first, self._offset = ordinal, offset
        self._before = self.order.start(ordinal) + offset

    def first_from(self, token: int) -> tuple[int, int]:
        """(ordinal, start) of the first document that starts at or after a token, where this source
        begins; the rest of a document that it begins with starts at 0."""
        if token <= 0:
            return self._first, 0
        ordinal, start = self.order.first_from(token + self._before)
        return ordinal, start - self._before

    def document(self, ordinal: int) -> tuple[int, int]:
        """Row of a document, and how many of its tokens are left out."""
        return self.order.document(ordinal), self._offset if ordinal == self._first else 0

    def __len__(self) -> int:
        """Documents of an epoch."""
        return int(self._rows.size)

    def read(self, row: int, *, begin: int, end: int) -> npt.NDArray[np.int64]:
        """Tokens [begin, end) of the row-th document of this split, int64."""
        document = int(self._rows[row])
        shard = bisect_right(self._firsts, document) - 1
        return self._shards[shard].read(document - self._firsts[shard], begin=begin, end=end)
