"""The token stream of a run: a pure function of (seed, position), blended by weight.

Every source is an endless stream of whole documents (`order`). A token of source s lasts 1 / w_s of
virtual time, so the document of s before which s has passed C tokens starts at C / w_s. The mixed
stream takes the documents by (start, source): shares of tokens follow the weights to within one
document a source at any moment, and nothing needs to be remembered. ``read`` finds its place by
bisection over virtual time, in exact integers, so however a stretch is split into reads, the
tokens are the same.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from megatron_ext.config.schema import DataOptions
from megatron_ext.data.demo import ensure_demo
from megatron_ext.data.indexed import ShardReader
from megatron_ext.data.manifest import Manifest, open_shards
from megatron_ext.data.order import DocumentOrder, held_out
from megatron_ext.data.tokenizers import Tokenizer
from megatron_ext.errors import ConfigError, DataError

Split = Literal["train", "held_out"]
TICKS = 1 << 20  # ticks a token of the heaviest source: weights are met to one part in a million


@dataclass(frozen=True)
class Slice:
    """A stretch of the stream.

    tokens: int64 [count]. source: int16 [count], index into ``TokenStream.sources``.
    document: int64 [count], ordinal of the document in the mixed stream, from 0 at position 0.
    """

    tokens: npt.NDArray[np.int64]
    source: npt.NDArray[np.int16]
    document: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Pieces:
    """The documents of a stretch of the stream, in its order; int64 [n] each.

    source: index into ``TokenStream.sources``. row: document of that source. begin, end: its tokens
    that lie in the stretch. whole: all of its tokens.
    """

    source: npt.NDArray[np.int64]
    row: npt.NDArray[np.int64]
    begin: npt.NDArray[np.int64]
    end: npt.NDArray[np.int64]
    whole: npt.NDArray[np.int64]

    @property
    def length(self) -> npt.NDArray[np.int64]:
        """Tokens in the stretch."""
        return self.end - self.begin


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

    def __len__(self) -> int:
        """Documents of an epoch."""
        return int(self._rows.size)

    def read(self, row: int, *, begin: int, end: int) -> npt.NDArray[np.int64]:
        """Tokens [begin, end) of the row-th document of this split, int64."""
        document = int(self._rows[row])
        shard = bisect_right(self._firsts, document) - 1
        return self._shards[shard].read(document - self._firsts[shard], begin=begin, end=end)


class TokenStream:
    """The blended, endless stream.

    Args:
        sources: what to blend. weights: relative shares of tokens, above 0.
        isolate_documents: batches cut from this stream keep documents apart.
        facts: everything that the tokens depend on, as words; a resume compares them (`change`).
    """

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        weights: Sequence[float],
        isolate_documents: bool = False,
        facts: Mapping[str, str] | None = None,
    ) -> None:
        self.sources: tuple[str, ...] = tuple(source.name for source in sources)
        self.isolate_documents = isolate_documents
        self.facts: dict[str, str] = dict(facts or {})
        self._sources = list(sources)
        heaviest = max(weights)
        self._ticks = [round(TICKS * heaviest / weight) for weight in weights]

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits for all the facts together."""
        text = "\n".join(f"{key}: {value}" for key, value in self.facts.items())
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    @property
    def tokens_per_epoch(self) -> dict[str, int]:
        """Tokens of one epoch of each source."""
        return {source.name: source.order.tokens for source in self._sources}

    @property
    def documents_per_epoch(self) -> dict[str, int]:
        """Documents of one epoch of each source."""
        return {source.name: len(source) for source in self._sources}

    def read(self, start: int, count: int) -> Slice:
        """Tokens [start, start + count) of the stream."""
        tokens = np.empty(count, np.int64)
        source_ids = np.empty(count, np.int16)
        documents = np.empty(count, np.int64)
        first = 0
        for index, row, begin, end, number in self._walk(start, count):
            place = slice(first, first + end - begin)
            tokens[place] = self._sources[index].read(row, begin=begin, end=end)
            source_ids[place] = index
            documents[place] = number
            first += end - begin
        return Slice(tokens, source_ids, documents)

    def pieces(self, start: int, count: int) -> Pieces:
        """The documents of tokens [start, start + count), without reading a token."""
        found = list(self._walk(start, count))
        table = np.array(found, np.int64).reshape(-1, 5)
        source, row, begin, end, _ = table.T
        whole = np.array(
            [self._sources[index].order.lengths[place] for index, place, *_ in found], np.int64
        )
        return Pieces(source, row, begin, end, whole)

    def read_piece(self, source: int, row: int, *, begin: int, end: int) -> npt.NDArray[np.int64]:
        """Tokens [begin, end) of one document, as ``Pieces`` names it."""
        return self._sources[source].read(row, begin=begin, end=end)

    def _walk(self, start: int, count: int) -> Iterator[tuple[int, int, int, int, int]]:
        """Source, row in it, first and last token (exclusive) and ordinal of each document."""
        if start < 0 or count < 0:
            raise ValueError(f"start={start}, count={count}: both must be 0 or more")
        end = start + count
        position, ordinals, starts = self._find(start)
        number = sum(ordinals)
        queue = [
            (begin * ticks, index)
            for index, (begin, ticks) in enumerate(zip(starts, self._ticks, strict=True))
        ]
        heapq.heapify(queue)
        while position < end:
            tick, index = queue[0]
            source = self._sources[index]
            row = source.order.document(ordinals[index])
            length = int(source.order.lengths[row])
            if position + length > start:
                first, last = max(position, start), min(position + length, end)
                yield index, row, first - position, last - position, number
            ordinals[index] += 1
            number += 1
            position += length
            heapq.heapreplace(queue, (tick + length * self._ticks[index], index))

    def _started_before(self, tick: int) -> tuple[int, list[int], list[int]]:
        """Documents that start before a tick: tokens of all; documents, tokens of each source."""
        found = [
            source.order.first_from(-(-tick // ticks))
            for source, ticks in zip(self._sources, self._ticks, strict=True)
        ]
        return sum(start for _, start in found), [k for k, _ in found], [s for _, s in found]

    def _find(self, start: int) -> tuple[int, list[int], list[int]]:
        """The last tick with at most ``start`` tokens before it; ``_started_before`` of it.

        Documents that start before tick t cover at least t / ticks_s tokens of source s, and at
        most one document more. Those two bounds bracket the tick.
        """
        # sum of 1 / ticks as an exact ratio rate / common
        common = math.lcm(*self._ticks)
        rate = sum(common // ticks for ticks in self._ticks)
        slack = sum(source.order.longest + 1 for source in self._sources)
        low = max(0, (start - slack) * common // rate)
        high = start * common // rate + 1  # more than `start` tokens stand before this one
        best = self._started_before(low)
        while high - low > 1:
            middle = (low + high) // 2
            found = self._started_before(middle)
            if found[0] <= start:
                low, best = middle, found
            else:
                high = middle
        return best


def open_corpus(
    options: DataOptions, *, seed: int, tokenizer: Tokenizer, split: Split
) -> TokenStream:
    """Open every source of a run.

    Args:
        options: ``sources`` (the demo, if ``demo`` and there are none), ``held_out``, and
            ``isolate_documents``.
        seed: of the document order. The held-out split ignores it: always the same tokens.
        tokenizer: must be the one that the sources were prepared with.
        split: ``train`` or ``held_out``. A document is on the same side for every seed.

    Raises:
        ConfigError: no source, a weight that is not above 0, a name twice, share outside [0, 1).
        DataError: damaged, truncated or missing files, another tokenizer, an empty split.
    """
    given = list(options.sources)
    # The demo is what `data=demo`, the default, reads: it must not slip into somebody's own blend.
    if options.demo and not given:
        given.append(ensure_demo(options))
    problems = _problems(options, names=[s.name for s in given], weights=[s.weight for s in given])
    if problems:
        raise ConfigError(problems)
    # The held-out documents have one order for every seed.
    order_seed = seed if split == "train" else 0
    sources = []
    facts = {"run.seed": str(order_seed), "data.held_out": repr(options.held_out), "split": split}
    facts["order of data.sources"] = ", ".join(source.name for source in given)
    for source in given:
        manifest, shards = open_shards(
            Path(source.path).expanduser(), tokenizer=tokenizer, verify=options.verify
        )
        facts[f"weight of source {source.name}"] = repr(source.weight)
        facts[f"content of source {source.name}"] = _content(manifest)
        sources.append(
            Source(
                source.name,
                shards=shards,
                share=options.held_out,
                split=split,
                seed=order_seed,
            )
        )
    return TokenStream(
        sources,
        weights=[source.weight for source in given],
        isolate_documents=options.isolate_documents,
        facts=facts,
    )


def _content(manifest: Manifest) -> str:
    """Sizes, and a digest of the digests of tokens and of document bounds."""
    digests = [
        digest
        for shard in manifest.shards
        for part in ("bin", "idx")
        for digest in shard[part]["blake2b"]
    ]
    digest = hashlib.blake2b(" ".join(digests).encode(), digest_size=8).hexdigest()
    return f"{manifest.documents} documents, {manifest.tokens} tokens, {digest}"


def _problems(options: DataOptions, *, names: list[str], weights: list[float]) -> list[str]:
    problems = []
    if not names:
        problems.append(
            "data.sources: empty. Name at least one folder written by data/prepare.py, or set "
            "data.demo=true to read Python's own library sources"
        )
    for name in sorted({name for name in names if names.count(name) > 1}):
        problems.append(f"data.sources: the name {name} stands twice. Every source needs its own")
    for name, weight in zip(names, weights, strict=True):
        if not (math.isfinite(weight) and weight > 0):
            problems.append(
                f"data.sources: {name} has weight {weight}, allowed: above 0. Leave the source out"
            )
    if not 0 <= options.held_out < 1:
        problems.append(f"data.held_out: {options.held_out}, allowed: 0 up to below 1, e.g. 0.05")
    return problems
