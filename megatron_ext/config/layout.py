"""Which layer is what, and where it lives: plain arithmetic from the options to stages. No torch.

Words: a *chunk* is what one pipeline rank holds of the model for one virtual stage. Chunk ``c`` of
pipeline rank ``r`` is the global chunk ``c * pipeline + r`` (megatron-core's interleaving), and
layers follow one another in the order of global chunks.
"""

from __future__ import annotations

import textwrap
from enum import Enum

from megatron_ext.config.schema import AttentionPattern, ModelOptions, ParallelOptions, RunConfig

VOCAB_MULTIPLE = 128


class LayerKind(Enum):
    """How a layer attends. The value is its letter in drawings."""

    kda = "K"
    mla = "M"
    gated = "G"


def layer_kinds(model: ModelOptions) -> list[LayerKind]:
    """The kind of each layer, first to last.

    The interleaved pattern is Kimi K3's: with 1-based numbers, layers 4, 8, ... and the last one
    are full attention (``full_attn_layers`` of its configuration), the others KDA.
    """
    whole = {
        AttentionPattern.kda: LayerKind.kda,
        AttentionPattern.mla: LayerKind.mla,
        AttentionPattern.gated: LayerKind.gated,
    }
    if model.attention in whole:
        return [whole[model.attention]] * model.num_layers
    if model.full_attention_layers is not None:
        full = set(model.full_attention_layers)
        numbers = range(1, model.num_layers + 1)
        return [LayerKind.mla if number in full else LayerKind.kda for number in numbers]
    kinds = [
        LayerKind.mla if number % model.full_attention_interval == 0 else LayerKind.kda
        for number in range(1, model.num_layers + 1)
    ]
    if model.full_attention_last and kinds:
        kinds[-1] = LayerKind.mla
    return kinds


def expert_layers(model: ModelOptions) -> set[int]:
    """0-based numbers of the layers whose feed-forward is a mixture of experts."""
    first = model.first_dense_layers
    return set() if first is None else set(range(first, model.num_layers))


def padded_vocab_size(tokens: int) -> int:
    """Rows of the embedding for a tokenizer of so many tokens: rounded up to a multiple of 128.

    It does not depend on the tensor parallel size, so that every layout trains the same model.
    """
    return -(-tokens // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def chunk_sizes(parallel: ParallelOptions, num_layers: int) -> list[int]:
    """Layers of each global chunk: as given, else as even as possible.

    The layers left over go to the middle chunks, since the first one also holds the embedding and
    the last one the output head. With fewer layers than chunks the outer chunks hold none.
    """
    if parallel.stage_layers is not None:
        return list(parallel.stage_layers)
    chunks = parallel.pipeline * parallel.virtual_pipeline
    base, extra = divmod(num_layers, chunks)
    start = (chunks - extra) // 2
    return [base + (start <= chunk < start + extra) for chunk in range(chunks)]


def stage_layers(parallel: ParallelOptions, num_layers: int) -> list[list[list[int]]]:
    """Global 0-based layer numbers, indexed ``[pipeline_rank][virtual_stage]``; may be empty."""
    chunks: list[list[int]] = []
    start = 0
    for size in chunk_sizes(parallel, num_layers):
        chunks.append(list(range(start, start + size)))
        start += size
    return [chunks[rank :: parallel.pipeline] for rank in range(parallel.pipeline)]


def row_length(config: RunConfig) -> int:
    """Tokens of a row: a sequence, or with isolated documents all those of a micro-batch."""
    sequences = config.train.micro_batch_size if config.data.isolate_documents else 1
    return config.data.sequence_length * sequences


def probe_lengths(config: RunConfig) -> list[int]:
    """Lengths of the evaluation by length, in tokens, ascending, each once."""
    options, length = config.evaluate, config.data.sequence_length
    return sorted({*options.lengths, *(factor * length for factor in options.length_factors)})


def model_parallel_size(parallel: ParallelOptions) -> int:
    """Ranks that hold one copy of the model: tensor x pipeline x context."""
    return parallel.tensor * parallel.pipeline * parallel.context


def sequence_parallel(parallel: ParallelOptions) -> bool:
    """On by default exactly when tensor parallelism is, and never without it.

    Asking for it without tensor parallelism is an error of `validate`; here it is off.
    """
    return parallel.tensor > 1 and parallel.sequence is not False


def draw(config: RunConfig, world_size: int) -> str:
    """The layout as text: one line a rank group and virtual stage, no line over 110 columns."""
    parallel, model = config.parallel, config.model
    data = world_size // model_parallel_size(parallel)
    sequence = "+sequence" if sequence_parallel(parallel) else ""
    virtual = f" x virtual {parallel.virtual_pipeline}" if parallel.virtual_pipeline > 1 else ""
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    head = (
        f"{ranks} = data {data} x pipeline {parallel.pipeline} x context {parallel.context} "
        f"x tensor {parallel.tensor}{sequence}{virtual}"
    )
    kinds, experts = layer_kinds(model), expert_layers(model)
    letters = [kind.value + ("e" if i in experts else "") for i, kind in enumerate(kinds)]
    lines = [head]
    last = parallel.pipeline * parallel.virtual_pipeline - 1
    for rank, chunks in enumerate(stage_layers(parallel, model.num_layers)):
        for virtual_stage, layers in enumerate(chunks):
            chunk = virtual_stage * parallel.pipeline + rank
            parts = ["embedding"] if chunk == 0 else []
            parts += [letters[i] for i in layers] or ([] if chunk in (0, last) else ["(no layers)"])
            parts += ["head"] if chunk == last else []
            name = f"stage {rank}" + (f".{virtual_stage}" if parallel.virtual_pipeline > 1 else "")
            span = f"layers {layers[0]}-{layers[-1]}" if len(layers) > 1 else "no layers"
            span = f"layer {layers[0]}" if len(layers) == 1 else span
            prefix = f"  {name:<10}{span:<14} "
            lines += textwrap.wrap(
                " ".join(parts), 110, initial_indent=prefix, subsequent_indent=" " * len(prefix)
            )
    names = {"K": "K KDA", "M": "M gated MLA", "G": "G both, mixed by a gate"}
    legend = [text for letter, text in names.items() if any(k.value == letter for k in kinds)]
    lines.append("  " + ", ".join([*legend, *(["e experts"] if experts else [])]))
    return "\n".join(lines)


def draw_experts(config: RunConfig, world_size: int) -> str:
    """Which rank of the first pipeline stage holds which experts of a layer, as text.

    Ranks of a stage are expert tensor parallel first, then expert parallel, then copies. A model
    without expert layers gives an empty string.
    """
    parallel, experts = config.parallel, config.model.experts
    layers = len(expert_layers(config.model))
    if not layers:
        return ""
    each, tensor = experts.num_experts // parallel.expert, parallel.expert_tensor
    width = parallel.expert * tensor
    copies = world_size // parallel.pipeline // width
    head = f"experts: {layers} layers of {experts.num_experts}, {experts.top_k} a token; "
    head += f"{each} on each of {parallel.expert} expert parallel ranks"
    head += f", cut in {tensor} by expert tensor parallelism" if tensor > 1 else ""
    head += f", {copies} {'copy' if copies == 1 else 'copies'}"
    rows = [f"  {'expert rank':<14}{'experts':<14}ranks of stage 0"]
    for rank in _shown(parallel.expert):
        if rank is None:
            rows.append("  ...")
            continue
        held = f"{rank * each}-{(rank + 1) * each - 1}" if each > 1 else f"{rank}"
        ranks = [
            "..." if copy is None else _span(copy * width + rank * tensor, tensor)
            for copy in _shown(copies)
        ]
        rows.append(f"  {rank:<14}{held:<14}{' '.join(ranks)}")
    return "\n".join([head, *rows])


def _shown(count: int, *, most: int = 8) -> list[int | None]:
    """Numbers below ``count``; of many the first three, None and the last."""
    return list(range(count)) if count <= most else [0, 1, 2, None, count - 1]


def _span(first: int, count: int) -> str:
    return f"{first}" if count == 1 else f"{first}-{first + count - 1}"
