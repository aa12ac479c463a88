"""Evaluation by length: is a key found again at any depth, does more context lower the loss?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from megatron_ext.config.layout import probe_lengths
from megatron_ext.data.batches import MicroBatch
from megatron_ext.data.probe import context_probe, key_probe
from megatron_ext.data.stream import DocumentId, TokenStream
from megatron_ext.train.state import TrainState
from megatron_ext.train.step import Waited, evaluating, run_schedule

DEPTHS = (0, 25, 50, 75, 100)  # percent of the text
PROBES = 8  # of each kind, shared out over data parallel ranks; the same ones in every layout


def by_length(state: TrainState, *, beat: Callable[[], None] = lambda: None) -> dict[str, float]:
    """Losses of probes at each of `evaluate.lengths`. Changes nothing in `state`.

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
        documents = stream.longer_than(length, count=PROBES)
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
    count = -(-PROBES // (data_size * multiple)) * multiple
    first = int(state.mesh.dp.rank()) * count

    def probes() -> Iterator[MicroBatch]:
        for number in range(first, first + count):
            batch = make(number)
            if number >= PROBES:  # only fills up the round
                batch = replace(batch, loss_mask=np.zeros_like(batch.loss_mask))
            yield batch if config.data.isolate_documents else replace(batch, cu_seqlens=None)

    with evaluating(state.chunks):
        feeds = [Waited(probes()) for _ in state.chunks]
        return run_schedule(replace(state, config=own), feeds, count, forward_only=True).mean
