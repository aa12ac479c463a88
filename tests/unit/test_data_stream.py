"""The token stream: a pure function of (seed, position), fair, and blind to how it is read."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.config.schema import DataOptions, SourceOptions
from megatron_ext.data import MicroBatch, TokenStream, evaluation_batches, micro_batches
from megatron_ext.data.indexed import ShardReader
from megatron_ext.data.order import held_out, permutation
from megatron_ext.data.stream import Source, Split, open_corpus
from megatron_ext.data.tokenizers import ByteTokenizer
from megatron_ext.errors import ConfigError, DataError

SAMPLE = Path(__file__).parents[2] / "data" / "sample"


class Memory(ShardReader):
    """A shard without files. Token = 1000 * document + position, so every token tells its place."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = np.asarray(lengths, np.int32)

    def read(self, document: int, *, begin: int = 0, end: int | None = None) -> np.ndarray:
        assert end is not None
        return 1000 * document + np.arange(begin, end)


def make(
    lengths: Sequence[Sequence[int]],
    weights: Sequence[float],
    *,
    seed: int = 1,
    share: float = 0.0,
    split: Split = "train",
    isolate: bool = False,
) -> TokenStream:
    sources = []
    for number, own in enumerate(lengths):
        half = len(own) // 2  # two shards where there is enough for two
        shards = [Memory(part) for part in (own[:half], own[half:]) if part]
        sources.append(
            Source(f"s{number}", shards=shards, share=share, split=split, seed=seed)  # type: ignore[arg-type]
        )
    return TokenStream(sources, weights=weights, isolate_documents=isolate)


CORPORA = st.lists(
    st.tuples(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.floats(0.01, 100)),
    min_size=1,
    max_size=4,
)


@settings(max_examples=60, deadline=None)
@given(corpora=CORPORA, cuts=st.lists(st.integers(0, 600), max_size=8), seed=st.integers(0, 9))
def test_any_split_into_reads_gives_the_same_stream(
    corpora: list[tuple[list[int], float]], cuts: list[int], seed: int
) -> None:
    lengths, weights = zip(*corpora, strict=True)
    whole = make(lengths, weights, seed=seed).read(0, 600)
    stream = make(lengths, weights, seed=seed)
    bounds = sorted({0, 600, *cuts})
    pairs = list(itertools.pairwise(bounds))
    parts = {a: stream.read(a, b - a) for a, b in reversed(pairs)}  # backwards: nothing is kept
    for name in ("tokens", "source", "document"):
        joined = np.concatenate([getattr(parts[a], name) for a, _ in pairs])
        np.testing.assert_array_equal(joined, getattr(whole, name))


@settings(max_examples=40, deadline=None)
@given(corpora=CORPORA)
def test_documents_come_whole_and_once_an_epoch(corpora: list[tuple[list[int], float]]) -> None:
    lengths, weights = zip(*corpora, strict=True)
    stream = make(lengths, weights)
    part = stream.read(0, 1500)
    starts = np.flatnonzero(np.diff(part.document, prepend=-1))
    assert part.document[starts].tolist() == list(range(len(starts)))
    seen: list[list[int]] = [[] for _ in lengths]
    for begin, end in zip(starts, [*starts[1:], 1500], strict=True):
        source = int(part.source[begin])
        assert set(part.source[begin:end]) == {source}
        half = len(lengths[source]) // 2
        token, last = int(part.tokens[begin]), int(part.tokens[end - 1])
        assert token % 1000 == 0
        assert last - token == end - begin - 1
        local = token // 1000
        if end < 1500:
            own = lengths[source]
            choices = [local] if half == 0 else [local, local + half]
            assert end - begin in [own[i] for i in choices if i < len(own)]
        seen[source].append(end - begin)
    for own, got in zip(lengths, seen, strict=True):
        for epoch in range(len(got) // len(own)):
            one = got[epoch * len(own) : (epoch + 1) * len(own)]
            if (epoch + 1) * len(own) < len(got):  # the last document may be cut
                assert Counter(one) == Counter(own)


@settings(max_examples=40, deadline=None)
@given(corpora=CORPORA, count=st.integers(1, 3000))
def test_token_shares_follow_the_weights(
    corpora: list[tuple[list[int], float]], count: int
) -> None:
    lengths, weights = zip(*corpora, strict=True)
    got = np.bincount(make(lengths, weights).read(0, count).source, minlength=len(weights))
    wanted = count * np.asarray(weights) / sum(weights)
    # every source is within one document of its share, and so is their sum
    assert np.abs(got - wanted).max() <= sum(max(own) for own in lengths) + 1e-2


def test_orders_differ_between_seeds_epochs_and_sources() -> None:
    own = list(range(1, 60))
    total = sum(own)
    stream = make([own], [1.0])
    first, second = stream.read(0, total).tokens, stream.read(total, total).tokens
    assert sorted(first) == sorted(second)
    assert (first != second).any()
    assert (make([own], [1.0], seed=2).read(0, total).tokens != first).any()
    orders = [permutation(100, seed=1, name=name, epoch=0).tolist() for name in ("a", "b")]
    assert orders[0] != orders[1]


def test_the_order_is_pinned() -> None:
    """A change here silently changes what every resumed run reads."""
    assert permutation(10, seed=1234, name="x", epoch=0).tolist() == PINNED
    assert np.flatnonzero(held_out(200, share=0.05)).tolist() == HELD_OUT


PINNED = [2, 9, 0, 8, 4, 3, 1, 5, 6, 7]
HELD_OUT = [2, 32, 33, 42, 53, 94, 142, 147]


def test_a_permutation_is_fair() -> None:
    """6 orders of 3 documents in 6000 epochs: 1000 each, 5 standard deviations are 145."""
    orders = Counter(tuple(permutation(3, seed=0, name="x", epoch=e).tolist()) for e in range(6000))
    assert len(orders) == 6
    assert all(abs(count - 1000) < 145 for count in orders.values())
    assert permutation(1, seed=0, name="x", epoch=0).tolist() == [0]


def test_ten_million_documents_are_shuffled_in_seconds() -> None:
    start = time.perf_counter()
    order = permutation(10_000_000, seed=1, name="x", epoch=0)
    assert time.perf_counter() - start < 5  # 0.6 s alone; the machine may be shared
    assert order.sum(dtype=np.int64) == 10_000_000 * 9_999_999 // 2


@settings(max_examples=30, deadline=None)
@given(count=st.integers(2, 500), more=st.integers(0, 200), share=st.floats(0.05, 0.9))
def test_the_held_out_split_never_leaks(count: int, more: int, share: float) -> None:
    chosen, later = held_out(count, share=share), held_out(count + more, share=share)
    assert 0 < chosen.sum() < count
    if count >= 100:  # with fewer, the rule of "at least one" may decide
        np.testing.assert_array_equal(chosen, later[:count])
    lengths = [list(range(1, 41))]
    sides = [
        {
            int(length)
            for seed in (1, 2)
            for length in make(lengths, [1.0], share=share, split=split, seed=seed)  # type: ignore[arg-type]
            ._sources[0]
            .order.lengths
        }
        for split in ("train", "held_out")
    ]
    assert sides[0] | sides[1] == set(lengths[0])
    assert not sides[0] & sides[1]


def test_the_held_out_share_is_met() -> None:
    # 5 standard deviations of a binomial with 100000 draws
    assert abs(held_out(100_000, share=0.05).mean() - 0.05) < 5 * (0.05 * 0.95 / 1e5) ** 0.5
    assert not held_out(1000, share=0.0).any()


# --------------------------------------------------------------------------------------- batches
def cut(stream: TokenStream, start: int, total: int, length: int, size: int, ranks: int) -> list:
    """All micro-batches of a global batch, in the order of their sequences."""
    each = [
        list(
            micro_batches(
                stream,
                start=start,
                batch_tokens=total,
                sequence_length=length,
                micro_batch_size=size,
                data_rank=rank,
                data_size=ranks,
            )
        )
        for rank in range(ranks)
    ]
    return [batch for step in zip(*each, strict=True) for batch in step]


def flat(batches: Sequence[MicroBatch], name: str) -> np.ndarray:
    return np.concatenate([getattr(batch, name).reshape(-1) for batch in batches])


BLEND = ([[5, 9, 30, 2, 17], [8] * 6, [40]], [0.5, 0.3, 0.2])


@pytest.mark.parametrize("isolate", [False, True])
def test_every_layout_reads_the_same_batch(isolate: bool) -> None:
    stream = make(*BLEND, isolate=isolate)
    whole = stream.read(100, 193)
    for size, ranks in [(1, 1), (2, 1), (1, 4), (3, 2), (12, 1)]:
        batches = cut(stream, 100, 192, 16, size, ranks)
        np.testing.assert_array_equal(flat(batches, "tokens"), whole.tokens[:-1])
        np.testing.assert_array_equal(flat(batches, "labels"), whole.tokens[1:])
        np.testing.assert_array_equal(flat(batches, "source"), whole.source[1:])
        same = whole.document[1:] == whole.document[:-1]
        mask = flat(batches, "loss_mask")
        np.testing.assert_array_equal(mask, same if isolate else np.ones(192))
        assert batches[0].tokens.shape == (size, 16)
        assert batches[0].loss_mask.dtype == np.float32
        assert batches[0].source.dtype == np.int16


def test_another_sequence_length_midway_neither_repeats_nor_skips() -> None:
    stream = make(*BLEND)
    parts, position = [], 0
    for length, total in [(8, 64), (16, 96), (32, 128), (8, 64)]:
        parts += cut(stream, position, total, length, 1, 2)
        position += total
    np.testing.assert_array_equal(flat(parts, "tokens"), stream.read(0, position).tokens)
    np.testing.assert_array_equal(flat(parts, "labels"), stream.read(1, position).tokens)


def test_isolated_documents_have_their_bounds() -> None:
    stream = make([[5, 3, 30]], [1.0], isolate=True)
    (batch,) = cut(stream, 0, 48, 16, 3, 1)
    bounds = batch.cu_seqlens
    assert bounds is not None
    assert bounds.dtype == np.int32
    assert (bounds[0], bounds[-1]) == (0, 48)
    assert (np.diff(bounds) > 0).all()
    assert {16, 32} <= set(bounds.tolist())
    documents = stream.read(0, 49).document
    for begin, end in itertools.pairwise(bounds):
        assert len(set(documents[begin:end])) == 1
    inside = set(bounds.tolist()) - {0, 16, 32, 48}
    assert all(documents[i] != documents[i - 1] for i in inside)
    ends = np.flatnonzero(batch.loss_mask.reshape(-1) == 0)
    assert all(documents[i] != documents[i + 1] for i in ends)
    assert len(ends) == len(set(documents)) - 1
    assert cut(make([[5, 3]], [1.0]), 0, 16, 16, 1, 1)[0].cu_seqlens is None


def test_a_batch_that_does_not_divide_is_an_error_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"batch_tokens: 100, allowed: multiples of 64.*128"):
        cut(make(*BLEND), 0, 100, 16, 2, 2)


def test_evaluation_counts_the_same_tokens_in_every_layout() -> None:
    stream = make(*BLEND)
    wanted = stream.read(0, 7 * 16 + 1).tokens[1:]
    for size, ranks in [(1, 1), (2, 1), (2, 3), (1, 4), (8, 2)]:
        arguments = {"sequence_length": 16, "micro_batch_size": size, "data_size": ranks}
        each = [
            list(evaluation_batches(stream, tokens=120, data_rank=rank, **arguments))
            for rank in range(ranks)
        ]
        assert len({len(batches) for batches in each}) == 1  # collectives need equal counts
        ordered = [batch for step in zip(*each, strict=True) for batch in step]
        more = list(evaluation_batches(stream, tokens=120, data_rank=0, rounds=9, **arguments))
        assert len(more) == max(9, len(each[0]))
        assert all((batch.loss_mask == 0).all() for batch in more[len(each[0]) :])
        counted = flat(ordered, "labels")[flat(ordered, "loss_mask") > 0]
        np.testing.assert_array_equal(counted, wanted)


# ---------------------------------------------------------------------------------------- corpus
def sample(*names: str, weight: float = 1.0) -> DataOptions:
    return DataOptions(sources=[SourceOptions(n, str(SAMPLE / n), weight) for n in names])


def test_the_sample_corpus_opens_and_holds_its_text() -> None:
    options = sample("prose", "code", "tables")
    stream = open_corpus(options, seed=1, tokenizer=ByteTokenizer(), split="train")
    assert stream.sources == ("prose", "code", "tables")
    assert sum(stream.tokens_per_epoch.values()) > 300_000
    part = stream.read(10**9 + 7, 4096)
    assert np.bincount(part.source).min() > 500
    ends = part.tokens[:-1][np.diff(part.document) > 0]
    assert (ends == 256).all()
    text = ByteTokenizer().decode(part.tokens.tolist())
    assert "\ufffd" not in text


def test_the_held_out_stream_ignores_the_seed_and_the_fingerprint_tells_blends_apart() -> None:
    tokenizer = ByteTokenizer()
    options = sample("prose", "code")
    first = open_corpus(options, seed=1, tokenizer=tokenizer, split="held_out")
    second = open_corpus(options, seed=2, tokenizer=tokenizer, split="held_out")
    np.testing.assert_array_equal(first.read(0, 5000).tokens, second.read(0, 5000).tokens)
    assert first.fingerprint == second.fingerprint
    other = open_corpus(sample("prose"), seed=1, tokenizer=tokenizer, split="held_out")
    assert other.fingerprint != first.fingerprint


def test_all_problems_of_a_blend_are_reported_together() -> None:
    options = sample("prose", "prose", weight=0.0)
    options.held_out = 1.0
    with pytest.raises(ConfigError) as error:
        open_corpus(options, seed=1, tokenizer=ByteTokenizer(), split="train")
    assert len(error.value.problems) == 4
    with pytest.raises(ConfigError, match=r"data\.sources: empty.*data\.demo=true"):
        open_corpus(DataOptions(), seed=1, tokenizer=ByteTokenizer(), split="train")


def test_the_demo_does_not_slip_into_a_blend_of_ones_own() -> None:
    options = sample("prose")
    options.demo = True
    assert open_corpus(options, seed=1, tokenizer=ByteTokenizer(), split="train").sources == (
        "prose",
    )


def test_an_empty_split_is_an_error() -> None:
    with pytest.raises(DataError, match=r"none of its 1 documents is in the held_out split"):
        make([[5]], [1.0], share=0.5, split="held_out")


def test_data_needs_neither_torch_nor_megatron() -> None:
    code = (
        "import sys, megatron_ext.data, megatron_ext.data.prepare\n"
        "heavy = {'torch', 'megatron', 'pyarrow', 'tokenizers', 'tiktoken', 'rich'}\n"
        "sys.exit(str(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
