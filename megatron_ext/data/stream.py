"""The token stream of a run: a pure function of (seed, position), blended by weight.

Every source is an endless stream of whole documents (`order`). A token of source s lasts 1 / w_s of
virtual time, so the document of s before which s has passed C tokens starts at C / w_s. The mixed
stream takes the documents by (start, source): shares of tokens follow the weights to within one
document a source at any moment, and nothing needs to be remembered. ``read`` finds its place by
bisection over virtual time, in exact integers, so however a stretch is split into reads, the
tokens are the same.

Another blend may take over at any position: each source goes on where the blend before left it.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_ext.config.schema import DataOptions
from megatron_ext.data.demo import ensure_demo
from megatron_ext.data.manifest import Manifest, open_shards
from megatron_ext.data.source import Source, Split
from megatron_ext.data.tokenizers import Tokenizer
from megatron_ext.errors import ConfigError

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


class DocumentId(NamedTuple):
    """A document, as ``Pieces`` names it."""

    source: int
    row: int


class _Document(NamedTuple):
    """A document in the mixed stream: `length` tokens from position `start` on, its first `skip`
    ones left out; `ordinal` counts those of its source, `number` all."""

    source: int
    ordinal: int
    row: int
    skip: int
    start: int
    length: int
    number: int


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
        self._others: dict[str, list[int]] = {}
        #: First token that is read from this blend, and where the sources were by then.
        self.begin = 0
        self.begun: dict[str, list[int]] = {}
        #: Content of the sources that former blends have read and this one leaves out.
        self.left: dict[str, str] = {}
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

    @property
    def longest_without_repeat(self) -> tuple[str, int]:
        """The source that is the first to begin anew, and the tokens of a stretch by then."""
        rate = sum(1 / ticks for ticks in self._ticks)  # tokens of all sources a tick
        return min(
            (
                (source.name, math.floor(source.order.tokens * ticks * rate))
                for source, ticks in zip(self._sources, self._ticks, strict=True)
            ),
            key=lambda found: found[1],
        )

    def take_over(self, position: int, places: Mapping[str, Sequence[int]]) -> None:
        """Begin where another blend has ended.

        Args:
            position: of the first token that is read from this blend.
            places: of every source that was ever read, as `places` gave them there; sources that
                are not among them begin with their first document.
        """
        self.begin = position
        self.begun = {name: list(place) for name, place in places.items()}
        self._others = dict(self.begun)
        for source in self._sources:
            ordinal, offset = self._others.pop(source.name, (0, 0))
            source.begin_at(ordinal, offset=offset)

    def places(self, position: int) -> dict[str, list[int]]:
        """Where each source is when the tokens before ``position`` are read: ordinal of a document
        of its endless stream, and how many tokens of it are read. Sources of former blends too."""
        _, ordinals, _ = self._find(position - self.begin)
        found: dict[str, list[int]] = dict(self._others)
        for source, ordinal in zip(self._sources, ordinals, strict=True):
            found[source.name] = [ordinal, source.document(ordinal)[1]]
        for document in self._documents(position):
            if document.start >= position:
                break
            read = min(position - document.start, document.length)
            done = read == document.length
            found[self.sources[document.source]] = (
                [document.ordinal + 1, 0] if done else [document.ordinal, document.skip + read]
            )
        return found

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

    def longer_than(self, length: int, *, count: int) -> list[DocumentId]:
        """Up to ``count`` documents of more than ``length`` tokens, of all sources in turn."""
        rows = [np.flatnonzero(source.order.lengths > length) for source in self._sources]
        most = min(count, max(map(len, rows)))
        found = [
            DocumentId(source, int(own[turn]))
            for turn in range(most)
            for source, own in enumerate(rows)
            if turn < len(own)
        ]
        return found[:count]

    def read_piece(self, source: int, row: int, *, begin: int, end: int) -> npt.NDArray[np.int64]:
        """Tokens [begin, end) of one document, as ``Pieces`` names it."""
        return self._sources[source].read(row, begin=begin, end=end)

    def _walk(self, start: int, count: int) -> Iterator[tuple[int, int, int, int, int]]:
        """Source, row in it, first and last token (exclusive) and ordinal of each document."""
        if start < self.begin or count < 0:
            raise ValueError(f"start={start}, count={count}: must be at least {self.begin} and 0")
        end = start + count
        for document in self._documents(start):
            if document.start >= end:
                break
            first = max(document.start, start) - document.start + document.skip
            last = min(document.length, end - document.start) + document.skip
            if last > first:
                yield document.source, document.row, first, last, document.number

    def _documents(self, start: int) -> Iterator[_Document]:
        """Documents in the order of the stream, from a little before a token on, without end."""
        position, ordinals, starts = self._find(start - self.begin)
        position += self.begin
        number = sum(ordinals)
        queue = [
            (begin * ticks, index)
            for index, (begin, ticks) in enumerate(zip(starts, self._ticks, strict=True))
        ]
        heapq.heapify(queue)
        while True:
            tick, index = queue[0]
            source, ordinal = self._sources[index], ordinals[index]
            row, skip = source.document(ordinal)
            length = int(source.order.lengths[row]) - skip
            yield _Document(index, ordinal, row, skip, position, length, number)
            ordinals[index] += 1
            number += 1
            position += length
            heapq.heapreplace(queue, (tick + length * self._ticks[index], index))

    def _started_before(self, tick: int) -> tuple[int, list[int], list[int]]:
        """Documents that start before a tick: tokens of all; documents, tokens of each source."""
        found = [
            source.first_from(-(-tick // ticks))
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
