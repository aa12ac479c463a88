"""Evaluation by length: is a key found again at any depth, does more context lower the loss?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from megatron_ext.config.layout import probe_lengths
from megatron_ext.config.schema import RunConfig
from megatron_ext.config.stages import stage_config, stage_names
from megatron_ext.data.batches import MicroBatch
from megatron_ext.data.probe import context_probe, key_probe
from megatron_ext.data.stream import DocumentId, TokenStream, open_corpus
from megatron_ext.data.tokenizers import load_tokenizer
from megatron_ext.errors import ConfigError
from megatron_ext.train.feed import feeds_of
from megatron_ext.train.state import TrainState, probe_length_problem
from megatron_ext.train.step import evaluating, run_schedule

DEPTHS = (0, 25, 50, 75, 100)  # percent of the text


def check_probe_lengths(config: RunConfig, *, first: str) -> None:
    """Hold the lengths of the stages to come against the data, before the first step: they would
    else be refused when their time comes.

    Args:
        config: of the run with all its stages.
        first: the stage to begin with.

    Raises:
        ConfigError: see `probe_length_problem`, for any stage.
        DataError: a source cannot be read.
    """
    problems, names = [], stage_names(config)
    for name in names[names.index(first) :] if first in names else ():
        own = stage_config(config, name)
        if probe_lengths(own):
            stream = open_corpus(
                replace(own.data, verify=False),  # done where it is read
                seed=own.run.seed,
                tokenizer=load_tokenizer(own.data.tokenizer),
                split="held_out",
            )
            if problem := probe_length_problem(own, stream):
                problems.append(f"{name}: {problem}")
    if problems:
        raise ConfigError(problems)


def by_length(state: TrainState, *, beat: Callable[[], None] = lambda: None) -> dict[str, float]:
    """Losses of probes at each length that is asked for. Changes nothing in `state`.

    The probes are shared out over data parallel ranks, and the same ones in every layout.

    Args:
        beat: called before each kind of probe, which may take minutes at a long length.

    Returns:
        `eval/retrieval/<length>/<depth>`, the loss of a key that stands at a depth (`absent`:
        nowhere), and `eval/context/<length>/<seen>`, that of the end of a text of which the
        `whole` or the last `half` or `quarter` is seen; in nats a token, the same on every rank.
        Of lengths that no held-out document has, there is nothing of the second kind.
    """
    values: dict[str, float] = {}
    stream, tokenizer = state.held_out_data, state.tokenizer
    for length in probe_lengths(state.config):
        for depth in (*DEPTHS, None):
            name = f"eval/retrieval/{length}/{'absent' if depth is None else depth}"
            share = None if depth is None else depth / 100

            def key(number: int, *, length: int = length, at: float | None = share) -> MicroBatch:
                return key_probe(stream, tokenizer, number=number, length=length, depth=at)

            beat()
            values[name] = _loss(state, key, length=length)
        documents = stream.longer_than(length, count=state.config.evaluate.probes)
        shares = (("whole", length), ("half", length // 2), ("quarter", length // 4))
        for what, seen in shares if documents else ():
            end = partial(_end, stream, documents, length=length, seen=seen)

            beat()
            values[f"eval/context/{length}/{what}"] = _loss(state, end, length=seen)
    return values


def _end(
    stream: TokenStream, documents: list[DocumentId], number: int, *, length: int, seen: int
) -> MicroBatch:
    document = documents[number % len(documents)]
    return context_probe(stream, document, length=length, seen=seen)


def length_rows(values: dict[str, float]) -> list[str]:
    """A line for each length and kind, for a person."""
    rows: dict[str, list[str]] = {}
    for name, value in values.items():
        _, kind, length, what = name.split("/")
        rows.setdefault(f"{kind} at {length} tokens", []).append(f"{what} {value:.4f}")
    return [f"{head}:  {'  '.join(cells)}" for head, cells in rows.items()]


def _loss(state: TrainState, make: Callable[[int], MicroBatch], *, length: int) -> float:
    config, data_size = state.config, int(state.mesh.dp.size())
    own = replace(
        config,
        data=replace(config.data, sequence_length=length),
        train=replace(config.train, micro_batch_size=1),
    )
    # The interleaved schedule takes whole rounds of the pipeline only.
    multiple = config.parallel.pipeline if config.parallel.virtual_pipeline > 1 else 1
    probes = config.evaluate.probes
    count = -(-probes // (data_size * multiple)) * multiple
    first = int(state.mesh.dp.rank()) * count

    def batches() -> Iterator[MicroBatch]:
        for number in range(first, first + count):
            batch = make(number)
            if number >= probes:  # only fills up the round
                batch = replace(batch, loss_mask=np.zeros_like(batch.loss_mask))
            yield batch if config.data.isolate_documents else replace(batch, cu_seqlens=None)

    with evaluating(state.chunks):
        feeds = feeds_of(state, batches())
        return run_schedule(replace(state, config=own), feeds, count, forward_only=True).mean
