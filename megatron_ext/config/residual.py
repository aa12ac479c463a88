"""Attention residuals as arithmetic: how many sources there are where, and what crosses stages.

Words: a *source* is a tensor of the width of the residual stream that later sublayers read: the
embedding, the sum of a finished block of layers, and, last, the sum that still runs. With
`kind=full` every sublayer's output is a source of its own. No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.config.layout import chunk_sizes
from megatron_ext.config.schema import ResidualKind, ResidualOptions, RunConfig


def mixes(options: ResidualOptions) -> bool:
    """Whether sublayers read a softmax over sources (kinds block and full)."""
    return options.kind in (ResidualKind.block, ResidualKind.full)


def opens_source(options: ResidualOptions, layer: int) -> tuple[bool, bool]:
    """Whether the outputs of attention and feed-forward each begin a new source; else they are
    added to the last one. `layer` is 0-based."""
    if options.kind is ResidualKind.full:
        return True, True
    return mixes(options) and layer % options.block_size == 0, False


def source_count(options: ResidualOptions, layers: int) -> int:
    """Sources after the first `layers` layers: the embedding and those opened since."""
    return 1 + sum(sum(opens_source(options, layer)) for layer in range(layers))


def mix_sources(options: ResidualOptions, layers: int) -> dict[int, int]:
    """Sources that each mix of a model of so many layers reads, by sublayer: 2 l is the attention
    of layer l, 2 l + 1 its feed-forward, 2 `layers` the mix after the last. The first sublayer has
    the embedding alone, and no mix; a plain residual has none at all."""
    if not mixes(options):
        return {}
    found = {}
    for layer in range(layers):
        before = source_count(options, layer)
        found[2 * layer] = before
        found[2 * layer + 1] = before + opens_source(options, layer)[0]
    found[2 * layers] = source_count(options, layers)
    return {sublayer: count for sublayer, count in found.items() if count > 1}


@dataclass(frozen=True)
class ChunkSources:
    """The sources that one model chunk gets, and those that it passes on.

    A message is one tensor of `slots` sources one after another; unused slots are padding.

    Attributes:
        cached: first sources that the rank kept from its chunk before.
        received: sources of the message, which follow them.
        slots_in: slots of the message.
        kept: first sources that the rank keeps for its next chunk.
        skipped: first sources that the receiver has already; all later ones are sent.
        slots_out: slots of the message to the next chunk.
    """

    cached: int
    received: int
    slots_in: int
    kept: int
    skipped: int
    slots_out: int


def chunk_sources(config: RunConfig) -> list[ChunkSources]:
    """One entry a global chunk, in the order of the layers.

    The last source still changes, so it is always sent. Of the others a receiver has those that
    were there when it finished its chunk before, which lies `parallel.pipeline` chunks back.
    The interleaved schedule exchanges messages of one size, so all have the slots of the largest.
    """
    parallel, options = config.parallel, config.residual
    ends = [0]
    for size in chunk_sizes(parallel, config.model.num_layers):
        ends.append(ends[-1] + size)
    present = [source_count(options, layers) for layers in ends]  # before each chunk, and after all
    chunks, interleaved = len(ends) - 1, parallel.virtual_pipeline > 1
    known = [0] * (chunks + 1)  # of the sources before a chunk, those its rank has kept
    if interleaved and options.cache_sources and mixes(options):
        for chunk in range(parallel.pipeline, chunks):
            known[chunk] = present[chunk - parallel.pipeline + 1] - 1
    sent = [present[chunk] - known[chunk] for chunk in range(chunks)]
    slots = [max(sent[1:])] * chunks if interleaved and chunks > 1 else list(sent)
    slots[0] = 1  # the embedding, which no message carries
    return [
        ChunkSources(
            cached=known[chunk],
            received=sent[chunk],
            slots_in=slots[chunk],
            kept=known[chunk + parallel.pipeline] if chunk + parallel.pipeline < chunks else 0,
            skipped=known[chunk + 1],
            slots_out=slots[chunk + 1] if chunk + 1 < chunks else 0,
        )
        for chunk in range(chunks)
    ]
