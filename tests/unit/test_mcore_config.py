"""What the mapper promises: our stages are megatron-core's stages, and numbers-changing flags."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron_ext.config.layout import stage_layers
from megatron_ext.config.schema import (
    AttentionPattern,
    ParallelOptions,
    Precision,
    Recompute,
    RunConfig,
)
from megatron_ext.errors import ConfigError
from megatron_ext.model.build import build_chunks
from megatron_ext.parallel.fake import fake_world, on_meta, one_rank_mesh
from megatron_ext.parallel.mcore_config import ddp_config, optimizer_config, transformer_config
from megatron_ext.parallel.mesh import describe, fewest_ranks, misfits

LAYOUTS = {
    "one": ParallelOptions(),
    "even": ParallelOptions(pipeline=2),
    "uneven": ParallelOptions(pipeline=4),
    "given": ParallelOptions(pipeline=3, stage_layers=[1, 4, 1]),
    "interleaved": ParallelOptions(pipeline=2, virtual_pipeline=2),
    "interleaved_three": ParallelOptions(pipeline=2, virtual_pipeline=3, stage_layers=[1] * 6),
    "empty_ends": ParallelOptions(pipeline=2, virtual_pipeline=2, stage_layers=[0, 3, 3, 0]),
    "empty_middle": ParallelOptions(pipeline=3, stage_layers=[3, 0, 3]),
    "more_chunks_than_layers": ParallelOptions(pipeline=4, virtual_pipeline=2),
}


def make(parallel: ParallelOptions | None = None) -> RunConfig:
    return RunConfig(parallel=parallel or ParallelOptions())


@pytest.mark.parametrize("parallel", LAYOUTS.values(), ids=LAYOUTS)
def test_our_stages_are_the_stages_that_megatron_builds(parallel: ParallelOptions) -> None:
    config = make(parallel)
    tc = transformer_config(config)
    built = []
    for rank, chunks in enumerate(stage_layers(parallel, config.model.num_layers)):
        with fake_world(parallel, rank=rank, world_size=parallel.pipeline) as groups:
            for virtual, layers in enumerate(chunks):
                stage = virtual if parallel.virtual_pipeline > 1 else None
                assert get_num_layers_to_build(tc, stage, rank) == len(layers)
                if layers:
                    assert get_transformer_layer_offset(tc, stage, rank) == layers[0]
            with on_meta():
                models = build_chunks(config, tc, groups, vocab_size=256)
        for model, layers in zip(models, chunks, strict=True):
            numbers = [layer.layer_number - 1 for layer in model.decoder.layers]
            assert numbers == layers
            built += numbers
        first, last = rank == 0, rank == parallel.pipeline - 1
        assert [hasattr(model, "embedding") for model in models] == [
            first and virtual == 0 for virtual in range(len(models))
        ]
        assert [model.decoder.final_layernorm is not None for model in models] == [
            last and virtual == len(models) - 1 for virtual in range(len(models))
        ]
    assert sorted(built) == list(range(config.model.num_layers))


def test_interleaved_schedules_overlap_and_others_do_not() -> None:
    interleaved = transformer_config(make(LAYOUTS["interleaved"]))
    plain = transformer_config(make(LAYOUTS["even"]))
    assert (interleaved.overlap_p2p_comm, interleaved.batch_p2p_comm) == (True, False)
    assert (plain.overlap_p2p_comm, plain.batch_p2p_comm) == (False, True)
    assert interleaved.virtual_pipeline_model_parallel_size == 2
    assert plain.virtual_pipeline_model_parallel_size is None


@pytest.mark.parametrize("pattern", AttentionPattern)
def test_every_pattern_maps_to_what_a_cpu_can_run(pattern: AttentionPattern) -> None:
    config = make()
    config.model.attention = pattern
    tc = transformer_config(config)
    assert type(tc).__name__ == "TransformerConfig"
    assert tc.calculate_per_token_loss
    assert not tc.perform_initialization
    assert tc.hidden_dropout == tc.attention_dropout == 0.0
    fused = [name for name, value in vars(tc).items() if name.endswith("_fusion") and value]
    assert fused == []


def test_sequence_parallelism_follows_tensor_parallelism() -> None:
    assert not transformer_config(make()).sequence_parallel
    assert transformer_config(make(ParallelOptions(tensor=2))).sequence_parallel
    switched_off = ParallelOptions(tensor=2, sequence=False)
    assert not transformer_config(make(switched_off)).sequence_parallel


def test_bf16_keeps_float32_where_sums_are_made() -> None:
    config = make()
    config.run.precision = Precision.bf16
    tc = transformer_config(config)
    assert tc.bf16
    assert tc.params_dtype is tc.pipeline_dtype is torch.bfloat16
    assert ddp_config(config).grad_reduce_in_fp32
    optimizer = optimizer_config(config)
    assert optimizer.bf16
    assert optimizer.main_params_dtype is optimizer.main_grads_dtype is torch.float32


def test_recomputation_names_what_is_computed_again() -> None:
    config = make()
    config.train.recompute = Recompute.selective
    assert transformer_config(config).recompute_modules == ["core_attn", "mlp"]
    config.train.recompute = Recompute.full
    tc = transformer_config(config)
    assert (tc.recompute_granularity, tc.recompute_method, tc.recompute_num_layers) == (
        "full",
        "uniform",
        1,
    )
    config.train.recompute = Recompute.none
    assert transformer_config(config).recompute_granularity is None


def test_the_optimizer_gets_every_number_of_the_options() -> None:
    config = make()
    config.optim = replace(
        config.optim, lr=0.5, min_lr_ratio=0.1, beta1=0.8, beta2=0.7, eps=1e-5, clip_grad=2.0
    )
    got = optimizer_config(config)
    assert (got.lr, got.min_lr, got.adam_beta1, got.adam_beta2, got.adam_eps, got.clip_grad) == (
        0.5,
        0.05,
        0.8,
        0.7,
        1e-5,
        2.0,
    )


def test_a_world_that_does_not_fit_is_refused_with_a_number_that_does() -> None:
    parallel = ParallelOptions(tensor=2, pipeline=2)
    message = r"4 ranks do not divide the 6 started; start 8 "
    with pytest.raises(ConfigError, match=message), fake_world(parallel, rank=0, world_size=6):
        pass
    assert not torch.distributed.is_initialized()
    assert misfits(parallel, 8) == []
    assert fewest_ranks(parallel) == 4
    assert fewest_ranks(ParallelOptions(tensor=2, pipeline=2, expert=3)) == 12


def test_the_table_shows_the_groups_that_megatron_makes() -> None:
    parallel = ParallelOptions(tensor=2, pipeline=2, context=2)
    rows = {line.split()[0]: line.split()[2:] for line in describe(parallel, 16).splitlines()[1:]}
    with fake_world(parallel, rank=0, world_size=16) as groups:
        for name, group in {
            "tensor": groups.tp,
            "context": groups.cp,
            "data": groups.dp,
            "pipeline": groups.pp,
        }.items():
            ranks = [str(rank) for rank in torch.distributed.get_process_group_ranks(group)]
            assert rows[name] == ranks


def test_fake_ranks_leave_nothing_and_refuse_a_running_group() -> None:
    with fake_world(ParallelOptions(tensor=2), rank=1, world_size=4) as groups:
        assert (groups.tp.size(), groups.tp.rank(), groups.dp.size()) == (2, 1, 2)
        second = fake_world(ParallelOptions(), rank=0, world_size=1)
        with pytest.raises(RuntimeError, match="process of its own"), second:
            pass
    assert not torch.distributed.is_initialized()
    assert not parallel_state.model_parallel_is_initialized()


def test_a_size_that_does_not_fit_is_said_once() -> None:
    config = make()
    config.model.kda.value_dim = config.model.kda.head_dim + 1
    tc = transformer_config(config)
    with pytest.raises(ConfigError) as caught, on_meta():
        build_chunks(config, tc, one_rank_mesh(), vocab_size=256)
    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].startswith("model.kda.value_dim")
    assert "instantiating" not in str(caught.value)
