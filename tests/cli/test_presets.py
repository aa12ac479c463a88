"""Every file of configs/ composes; presets have the sizes that they promise."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from megatron_ext.config import schema
from megatron_ext.config.compose import CONFIGS, compose, to_container, to_yaml
from megatron_ext.config.keys import table
from megatron_ext.config.layout import LayerKind, layer_kinds, padded_vocab_size
from megatron_ext.config.overrides import groups
from megatron_ext.config.ranges import RANGES
from megatron_ext.config.reference import PAGE, help_text, page
from megatron_ext.config.schema import RunConfig
from megatron_ext.config.sweep import expand
from megatron_ext.config.validate import validate
from megatron_ext.errors import ConfigError
from megatron_ext.model.count import count_parameters

OPTIONS = [
    (group, option)
    for group, options in groups(CONFIGS).items()
    for option in options
    if group != "local"
]


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_composes(group: str, option: str) -> None:
    k3_like = option in ("k3", "tp8_pp8")
    words = ["run.mode=plan", "model=k3"] if k3_like else []
    assert isinstance(compose([*words, f"{group}={option}"]), RunConfig)


def test_both_spellings_of_an_experiment_mean_the_same() -> None:
    assert compose(["+experiment=k3_plan"]) == compose(["experiment=k3_plan"])


def test_a_deterministic_run_takes_no_nondeterministic_backend_by_itself() -> None:
    assert compose([]).model.kda.backend is schema.KdaBackend.auto
    config = compose(["run.deterministic=true"])
    assert config.model.kda.backend is schema.KdaBackend.dense
    with pytest.raises(ConfigError, match=r"model\.kda\.require=true: .*backend=dense"):
        compose(["run.deterministic=true", "model.kda.require=true"])


def test_a_tilde_is_the_home_folder() -> None:
    config = compose(["run.dir='~/x'", "data.sources=[{name:a,path:'~/b'}]"])
    assert config.run.dir == str(Path.home() / "x")
    assert config.data.sources[0].path == str(Path.home() / "b")


def test_the_command_line_wins_over_an_experiment_and_a_model() -> None:
    config = compose(["experiment=mini_bf16", "train.steps=77", "data.sequence_length=8192"])
    assert (config.train.steps, config.data.sequence_length) == (77, 8192)
    assert (config.model.name, config.run.precision) == ("mini", schema.Precision.bf16)


def test_nano_takes_every_layout_with_a_parallel_key_alone() -> None:
    config = compose([])
    for tensor in (1, 2, 4):
        for pipeline, virtual in ((1, 1), (2, 1), (2, 2), (4, 1), (4, 2)):
            config.parallel = schema.ParallelOptions(
                tensor=tensor, pipeline=pipeline, virtual_pipeline=virtual
            )
            for data in (1, 2, 4, 8):
                if tensor * pipeline * data <= 8 or data == 1:
                    validate(config, tensor * pipeline * data)
    assert config.data.sequence_length % 8 == 0  # two chunks for each of 4 context ranks


def test_the_model_for_eight_gpus_has_30_b_parameters_and_3_b_active() -> None:
    config = compose(["model=k3_30b"])
    counts = count_parameters(config, padded_vocab_size(config.model.vocab_size or 0))
    assert round(counts.total / 1e9, 1) == 30.5
    assert round(counts.active / 1e9, 2) == 2.85


def test_k3_has_the_published_sizes() -> None:
    model = compose(["model=k3", "run.mode=plan"]).model
    kinds = layer_kinds(model)
    full = [number for number, kind in enumerate(kinds, 1) if kind is LayerKind.mla]
    assert full == [*range(4, 93, 4), 93]
    assert len(kinds) - len(full) == 69
    assert (model.hidden_size, model.feed_forward_size, model.vocab_size) == (7168, 33792, 163840)
    assert (model.kda.num_heads, model.kda.head_dim, model.kda.conv_width) == (96, 128, 4)
    assert (model.kda.lower_bound, model.norm_eps, model.mla.norm_eps) == (-5.0, 1e-5, 1e-6)
    mla = model.mla
    assert (mla.num_heads, mla.q_lora_rank, mla.kv_lora_rank) == (96, 1536, 512)
    assert (mla.qk_nope_head_dim, mla.qk_rope_head_dim, mla.v_head_dim) == (128, 64, 128)


def test_run_folder_is_named_after_the_run_and_absolute(tmp_path: Path) -> None:
    def folder(*words: str) -> str | None:
        return compose(words, cwd=tmp_path).run.dir

    assert folder() == str(tmp_path / "runs" / "nano")
    assert folder("run.name=a") == str(tmp_path / "runs" / "a")
    assert folder("run.dir=x/../y") == str(tmp_path / "y")
    assert folder(f"run.dir={tmp_path}/z") == str(tmp_path / "z")
    assert compose(["model=mini"], cwd=tmp_path).run.name == "mini"


def test_a_source_is_looked_for_here_and_then_in_the_repository(tmp_path: Path) -> None:
    words = ["data.sources=[{name:a,path:docs}]"]
    assert compose(words, cwd=tmp_path).data.sources[0].path == str(CONFIGS.parent / "docs")
    (tmp_path / "docs").mkdir()
    assert compose(words, cwd=tmp_path).data.sources[0].path == str(tmp_path / "docs")


def test_a_saved_configuration_says_everything() -> None:
    config = compose(["data.sources=[{name:a,path:/a,weight:2}]", "parallel.stage_layers=[6]"])
    saved = to_container(config)
    assert set(saved) == {field.name for field in dataclasses.fields(RunConfig)}
    assert saved["data"]["sources"] == [{"name": "a", "path": "/a", "weight": 2.0}]
    assert saved["run"]["mode"] == "train"
    assert "stage_layers:" in to_yaml(config)


def test_whole_numbers_may_be_written_as_powers_of_ten() -> None:
    assert compose(["optim.warmup_tokens=1e4"]).optim.warmup_tokens == 10_000


def test_every_number_of_the_schema_has_a_range() -> None:
    numbers = {key.name for key in table().values() if key.kind in (int, float)}
    assert numbers == set(RANGES)
    for key in table().values():
        if key.name in RANGES and key.default is not None:
            assert RANGES[key.name].holds(key.default), key.name


def test_the_reference_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), (
        "run: python -m megatron_ext.config.reference"
    )


def test_help_names_every_group_option_experiment_and_key() -> None:
    text = help_text()
    for group, option in OPTIONS:
        assert option in text, f"{group}={option}"
    for key in table():
        assert f"{key}=" in text


def test_a_sweep_is_the_product_of_its_values_each_in_its_own_folder() -> None:
    jobs = expand(["optim.lr=1e-3,2e-3", "run.seed=range(1,3)", "model=nano"])
    assert len(jobs) == 4
    configs = [compose(job) for job in jobs]
    folders = {config.run.dir for config in configs}
    assert len(folders) == 4
    assert all("/multirun/optim.lr=0.00" in str(folder) for folder in folders)
    assert {(config.optim.lr, config.run.seed) for config in configs} == {
        (lr, seed) for lr in (1e-3, 2e-3) for seed in (1, 2)
    }
