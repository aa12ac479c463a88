"""What pipeline stages send each other: the bytes of every hop, counted before anything runs.

A *hop* is the message from one model chunk to the next, of one micro-batch, from one rank to one
other; the gradient that comes back on it is as large. A chunk without layers passes messages on.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_ext.config.layout import row_length, sequence_parallel
from megatron_ext.config.residual import chunk_sources, mixes
from megatron_ext.config.schema import ResidualKind, RunConfig
from megatron_ext.data.batches import padded_length
from megatron_ext.parallel.mcore_config import pipeline_dtype
from megatron_ext.plan.numbers import human

_LISTED = 16  # of more hops that differ only the smallest and the largest are told


def source_tokens(config: RunConfig) -> int:
    """Tokens of a micro-batch that one rank holds between layers, padding included."""
    parallel = config.parallel
    shards = parallel.tensor if sequence_parallel(parallel) else 1
    row = padded_length(row_length(config), ranks=parallel.context, multiple=shards)
    rows = 1 if config.data.isolate_documents else config.train.micro_batch_size
    return row * rows // (parallel.context * shards)


def source_bytes(config: RunConfig) -> int:
    """Bytes of one source, which is what a hop of a plain residual carries."""
    itemsize: int = pipeline_dtype(config).itemsize
    return source_tokens(config) * config.model.hidden_size * itemsize


def hop_bytes(config: RunConfig) -> list[int]:
    """Bytes from each global chunk to the next, in one direction; [chunks - 1]."""
    return [plan.slots_out * source_bytes(config) for plan in chunk_sources(config)[:-1]]


def sent_by(config: RunConfig, *, stage: int, micro_batches: int) -> list[int]:
    """Bytes of every message that a rank of a pipeline stage sends in a training step, sorted.

    Args:
        stage: from 0.
        micro_batches: of the rank, in the step.
    """
    stages = config.parallel.pipeline
    messages = []
    for chunk, size in enumerate(hop_bytes(config)):
        messages += [size] * micro_batches * (chunk % stages == stage)  # sources
        messages += [size] * micro_batches * ((chunk + 1) % stages == stage)  # their gradients
    return sorted(messages)


def hops_table(config: RunConfig) -> str:
    """The hops of each scheme that the layout could use, and of a plain residual; "" for one
    stage."""
    if config.parallel.pipeline == 1:
        return ""
    tokens, width = source_tokens(config), config.model.hidden_size
    dtype = str(pipeline_dtype(config)).removeprefix("torch.")
    lines = [
        "sent between stages a micro-batch, one rank of each (gradients bring as much back)",
        f"  {'one source':<20}{human(source_bytes(config), unit='B'):>10}"
        f"  {tokens:,} tokens x {width:,} {dtype}",
    ]
    residual = config.residual
    schemes = {"plain residual": replace(residual, kind=ResidualKind.standard)}
    if mixes(residual):
        schemes["all sources"] = replace(residual, cache_sources=False)
        if config.parallel.virtual_pipeline > 1:
            schemes["cached sources"] = replace(residual, cache_sources=True)
    for name, options in schemes.items():
        # float32 sums are those of attention residuals; what is compared is the number of sources.
        slots = [plan.slots_out for plan in chunk_sources(replace(config, residual=options))[:-1]]
        total = human(sum(slots) * source_bytes(config), unit="B")
        used = "  in use" if options == residual and len(schemes) > 1 else ""
        lines.append(f"  {name:<20}{total:>10}  {_slots(slots)}{used}")
    return "\n".join(lines)


def _slots(slots: list[int]) -> str:
    hops = "1 hop" if len(slots) == 1 else f"{len(slots)} hops"
    if len(set(slots)) == 1:
        return f"{hops} of {slots[0]} source{'s' * (slots[0] > 1)}"
    if len(slots) <= _LISTED:
        return f"{hops} of {' '.join(map(str, slots))} sources"
    return f"{hops} of {min(slots)} to {max(slots)} sources"
