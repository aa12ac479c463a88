"""`model=PATH/config.json`: a published configuration is ours without translation, or an error."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.config import schema
from megatron_ext.config.compose import compose
from megatron_ext.config.hf_read import read_architecture
from megatron_ext.config.hf_write import write_architecture
from megatron_ext.config.layout import LayerKind, layer_kinds
from megatron_ext.config.schema import ModelOptions, ResidualOptions
from megatron_ext.errors import ConfigError
from tests.support import hf_configs

PLAN = "run.mode=plan"  # any layers can be planned


def write(folder: Path, fields: dict[str, Any], *, nested: bool = True) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    outer = {"model_type": "kimi_k3", "vision_config": {"anything": 1}, "text_config": fields}
    (folder / "config.json").write_text(json.dumps(outer if nested else fields))
    return folder / "config.json"


def test_the_published_k3_is_our_preset(tmp_path: Path) -> None:
    path = write(tmp_path / "Kimi K3", hf_configs.published_k3())
    config, preset = compose([f"model='{path}'", PLAN]), compose(["model=k3", PLAN])
    experts = config.model.experts
    assert config.model == dataclasses.replace(preset.model, name="Kimi-K3", experts=experts)
    assert (config.residual.kind, config.residual.block_size) == (schema.ResidualKind.block, 12)
    assert config.run.name == "Kimi-K3"


def test_the_published_kimi_linear_is_read_flat(tmp_path: Path) -> None:
    path = write(tmp_path / "linear", hf_configs.published_kimi_linear(), nested=False)
    config = compose([f"model={path}", PLAN])
    model = config.model
    assert config.residual.kind is schema.ResidualKind.standard
    assert [i for i, k in enumerate(layer_kinds(model), 1) if k is LayerKind.mla][-2:] == [24, 27]
    assert (model.kda.gate, model.kda.output_gate) == (
        schema.Gate.softplus,
        schema.OutputGate.low_rank,
    )
    assert (model.situ_beta, model.situ_linear_beta, model.mla.output_gate) == (None, None, False)
    experts = model.experts
    assert (experts.num_experts, experts.top_k, experts.scaling) == (256, 8, 2.446)
    assert (experts.latent_size, experts.shared_feed_forward_size) == (None, 1024)


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a", hf_configs.kimi_k3(vocab_size=256))
    words = [f"model={path}", "model.num_layers=4", "model.first_dense_layers=null", PLAN]
    config = compose([*words, "residual=full", "experiment=mini_bf16", "train.steps=100000"])
    assert (config.model.num_layers, config.model.hidden_size) == (4, 28)
    assert (config.residual.kind, config.residual.block_size) == (schema.ResidualKind.full, 2)
    assert config.run.precision is schema.Precision.bf16
    relative = compose(["model=config.json", PLAN], cwd=path.parent)
    assert relative.model.vocab_size == 256


DENSE = {"num_experts": None, "num_experts_per_token": None, "num_shared_experts": None}
DENSE |= {"moe_intermediate_size": None, "routed_expert_hidden_size": None}
DENSE |= {"latent_moe_use_norm": None, "routed_scaling_factor": None}


@pytest.mark.parametrize(
    "fields",
    [
        hf_configs.kimi_k3(),
        hf_configs.kimi_linear(),
        hf_configs.published_k3(),
        hf_configs.published_kimi_linear(),
        hf_configs.kimi_k3(**DENSE, first_k_dense_replace=5),
        hf_configs.kimi_k3(attn_res_block_size=None, latent_moe_use_norm=False),
        hf_configs.kimi_k3(
            linear_attn_config={"kda_layers": [3, 5], "full_attn_layers": [1, 2, 4]}
        ),
        hf_configs.kimi_k3(
            linear_attn_config={"kda_layers": [], "full_attn_layers": [1, 2, 3, 4, 5]}
        ),
    ],
)
def test_what_is_read_and_written_says_the_same(tmp_path: Path, fields: dict[str, Any]) -> None:
    model, residual = options(write(tmp_path, fields))
    back = write_architecture(model, residual, vocab_size=fields["vocab_size"], dtype="bfloat16")
    back = back.get("text_config", back)
    for field, value in fields.items():
        assert back.get(field) == value or field in (
            *("head_dim", "max_position_embeddings", "model_max_length"),
            *("bos_token_id", "eos_token_id", "pad_token_id"),
        ), field
    assert options(write(tmp_path / "again", back)) == (
        dataclasses.replace(model, name="again"),
        residual,
    )


def options(path: Path) -> tuple[ModelOptions, ResidualOptions]:
    """What the file says, without the rules of `validate` (odd vocabularies)."""
    model, residual = ModelOptions(), ResidualOptions()
    kinds = {"attention": schema.AttentionPattern, "gate": schema.Gate}
    kinds |= {"output_gate": schema.OutputGate, "kind": schema.ResidualKind}
    for key, value in read_architecture(path).items():
        node: Any = residual if key.startswith("residual.") else model
        *sections, name = key.split(".")[1:]
        for section in sections:
            node = getattr(node, section)
        setattr(
            node, name, kinds[name][value] if isinstance(value, str) and name in kinds else value
        )
    return model, residual


@settings(max_examples=40, deadline=None)
@given(num_layers=st.integers(1, 12), data=st.data())
def test_any_choice_of_layers_survives(
    tmp_path_factory: pytest.TempPathFactory, num_layers: int, data: st.DataObject
) -> None:
    full = sorted(data.draw(st.sets(st.integers(1, num_layers))))
    model = ModelOptions(num_layers=num_layers, full_attention_layers=full)
    written = write_architecture(model, ResidualOptions(), vocab_size=128, dtype="float32")
    read, _ = options(write(tmp_path_factory.mktemp("any"), written["text_config"]))
    assert layer_kinds(read) == layer_kinds(model)


WRONG: dict[str, tuple[dict[str, Any], list[str]]] = {
    "unknown": (
        {"num_expert": 3, "qk_head_dim": 8},
        ["num_expert=3: no such field (did you mean num_experts?)", "qk_head_dim=8: no such"],
    ),
    "missing_and_mistyped": (
        {"hidden_size": None, "rms_norm_eps": "small", "num_experts": True, "v_head_dim": 1.5},
        [
            "hidden_size=null: is missing, must be given",
            'rms_norm_eps="small": must be a number',
            "v_head_dim=1.5: must be a whole number",
            "num_experts=true: must be a whole number",
        ],
    ),
    "other_models": (
        {"rope_scaling": {"type": "yarn"}, "tie_word_embeddings": True, "num_key_value_heads": 1},
        [
            'rope_scaling={"type": "yarn"}: must be null',
            "tie_word_embeddings=true: must be false",
            "num_key_value_heads=1: must be num_attention_heads",
        ],
    ),
    "contradictions": (
        {"hidden_act": "silu", "routed_expert_hidden_size": None},
        [
            "activation_situ_beta=4.0: contradicts hidden_act='silu'",
            "activation_situ_linear_beta=25.0: contradicts hidden_act='silu'",
            "latent_moe_use_norm=true: contradicts the absence of routed_expert_hidden_size",
        ],
    ),
    "experts_without_experts": (
        {"num_experts": None},
        [
            "num_experts_per_token=3: contradicts the absence of num_experts",
            "moe_intermediate_size=10: contradicts the absence of num_experts",
            "routed_scaling_factor=1.0: contradicts the absence of num_experts",
            "num_shared_experts=2: contradicts the absence of num_experts",
            "routed_expert_hidden_size=18: contradicts the absence of num_experts",
            "latent_moe_use_norm=true: contradicts the absence of num_experts",
        ],
    ),
    "one_expert_a_token": (
        {"num_experts_per_token": 1},
        ["num_experts_per_token=1: must be 2 or more"],
    ),
    "layers": (
        {"num_hidden_layers": 6},
        ["linear_attn_config.full_attn_layers=[3, 5]: with kda_layers must hold each of 1 to"],
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_files_are_refused_with_every_reason(tmp_path: Path, name: str) -> None:
    changes, phrases = WRONG[name]
    path = write(tmp_path, hf_configs.kimi_k3(**changes))
    with pytest.raises(ConfigError) as refused:
        compose([f"model={path}", "train.stepz=3", PLAN])
    lines = [line for line in refused.value.problems if line.startswith("config.json: ")]
    assert len(lines) == len(phrases), lines
    for phrase, line in zip(phrases, lines, strict=True):
        assert phrase in line
    assert any("train.stepz" in line for line in refused.value.problems)


def test_files_that_are_no_configuration_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        compose([f"model={tmp_path}/none.json"])
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match="must hold an object, got list"):
        compose([f"model={tmp_path}/config.json"])


def test_sizes_of_the_file_obey_our_rules(tmp_path: Path) -> None:
    path = write(tmp_path, hf_configs.kimi_k3(linear_attn_config={"gate_lower_bound": -7.0}))
    with pytest.raises(ConfigError) as refused:
        compose([f"model={path}", PLAN])
    assert "model.kda.lower_bound=-7" in str(refused.value)
    assert "model.vocab_size=101: must be a multiple of 128" in str(refused.value)
    with pytest.raises(ConfigError, match=r"full_attention_layers=\[2,2\]: must be ascending"):
        compose(["model.full_attention_layers=[2,2]"])


def test_options_that_the_layout_cannot_say_are_listed() -> None:
    model = ModelOptions()
    model.kda.gate, model.kda.decay_rank = schema.Gate.bounded_plain, 16
    model.mla.norm_eps, model.situ_beta = 1e-5, None
    model.first_dense_layers, model.experts.top_k = 1, 1
    residual = ResidualOptions(kind=schema.ResidualKind.full)
    with pytest.raises(ConfigError) as refused:
        write_architecture(
            model,
            residual,
            vocab_size=128,
            dtype="float32",
            rule=schema.BalanceRule.microbatch_mean,
        )
    assert [line.split("=")[0].split(",")[0] for line in refused.value.problems] == [
        *("model.kda.gate", "model.kda.decay_rank", "model.mla.norm_eps", "model.situ_beta"),
        *("residual.kind", "model.experts.top_k", "balance.rule"),
    ]
