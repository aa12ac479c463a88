"""Layers to stages: every layer once, in order, as megatron-core's interleaving has it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.config.compose import compose
from megatron_ext.config.layout import (
    LayerKind,
    chunk_sizes,
    draw,
    layer_kinds,
    padded_vocab_size,
    sequence_parallel,
    stage_layers,
)
from megatron_ext.config.schema import AttentionPattern, ModelOptions, ParallelOptions

SIZES = st.integers(1, 8)


@given(pipeline=SIZES, virtual=SIZES, num_layers=st.integers(1, 100))
def test_every_layer_has_one_place_in_global_chunk_order(
    pipeline: int, virtual: int, num_layers: int
) -> None:
    parallel = ParallelOptions(pipeline=pipeline, virtual_pipeline=virtual)
    stages = stage_layers(parallel, num_layers)
    assert len(stages) == pipeline
    assert all(len(chunks) == virtual for chunks in stages)
    order = [stages[chunk % pipeline][chunk // pipeline] for chunk in range(pipeline * virtual)]
    assert [layer for chunk in order for layer in chunk] == list(range(num_layers))


@given(pipeline=SIZES, virtual=SIZES, num_layers=st.integers(1, 100))
def test_default_chunks_are_even_and_the_outer_ones_not_larger(
    pipeline: int, virtual: int, num_layers: int
) -> None:
    parallel = ParallelOptions(pipeline=pipeline, virtual_pipeline=virtual)
    sizes = chunk_sizes(parallel, num_layers)
    assert max(sizes) - min(sizes) <= 1
    if num_layers % len(sizes) and len(sizes) > 2:
        assert sizes[-1] == min(sizes)


def test_given_stages_are_taken_as_they_are() -> None:
    parallel = ParallelOptions(pipeline=2, virtual_pipeline=2, stage_layers=[0, 1, 2, 3])
    assert stage_layers(parallel, 6) == [[[], [1, 2]], [[0], [3, 4, 5]]]


def test_patterns() -> None:
    def letters(model: ModelOptions) -> str:
        return "".join(kind.value for kind in layer_kinds(model))

    assert letters(ModelOptions(num_layers=6)) == "KKKMKM"
    assert letters(ModelOptions(num_layers=6, full_attention_last=False)) == "KKKMKK"
    assert letters(ModelOptions(num_layers=8, full_attention_interval=2)) == "KMKMKMKM"
    for pattern in (AttentionPattern.kda, AttentionPattern.mla, AttentionPattern.gated):
        kind = LayerKind[pattern.name]
        assert layer_kinds(ModelOptions(num_layers=3, attention=pattern)) == [kind] * 3


def test_vocabulary_is_padded_to_128() -> None:
    assert [padded_vocab_size(n) for n in (1, 128, 129, 163840)] == [128, 128, 256, 163840]


def test_drawing_shows_ranks_stages_and_kinds() -> None:
    config = compose(
        ["parallel.tensor=2", "parallel.pipeline=2", "parallel.virtual_pipeline=2"], world_size=8
    )
    assert draw(config, 8).splitlines() == [
        "8 ranks = data 2 x pipeline 2 x context 1 x tensor 2+sequence x virtual 2",
        "  stage 0.0 layer 0        embedding K",
        "  stage 0.1 layers 3-4     Me Ke",
        "  stage 1.0 layers 1-2     Ke Ke",
        "  stage 1.1 layer 5        Me head",
        "  K KDA, M gated MLA, e experts",
    ]


def test_drawing_shows_empty_stages_and_fits_a_terminal() -> None:
    config = compose(["parallel.pipeline=4", "parallel.virtual_pipeline=2"])
    text = draw(config, 4)
    assert "stage 0.0 no layers      embedding" in text
    assert "stage 3.1 no layers      head" in text
    plan = draw(compose(["model=k3", "run.mode=plan"]), 1)
    assert "K Ke Ke Me" in plan
    assert max(map(len, plan.splitlines())) <= 110


def test_sequence_parallelism_follows_tensor_parallelism_and_is_never_on_without_it() -> None:
    on = [(2, None), (2, True)]
    off = [(1, None), (1, False), (1, True), (2, False)]
    for tensor, sequence in on + off:
        parallel = ParallelOptions(tensor=tensor, sequence=sequence)
        assert sequence_parallel(parallel) is ((tensor, sequence) in on)
