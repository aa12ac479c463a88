"""`config.json` of the released layout, read strictly, for the reference model.

Field names are those of the released file, so that each can be looked up there. A field that the
reference does not compute is an error: it can then never agree by ignoring something.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

# Say nothing about what is computed: identities, tokens, storage, and the rotation that NoPE lacks.
SILENT = (
    *("architectures", "auto_map", "bos_token_id", "dtype", "eos_token_id", "head_dim"),
    *("initializer_range", "max_position_embeddings", "model_max_length", "model_type"),
    *("pad_token_id", "rope_theta", "torch_dtype", "transformers_version", "use_cache"),
)
# Other values would be another model: none that was released, so nothing to hold ours against.
FIXED: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mla_use_nope": True,
    "moe_layer_freq": 1,
    "moe_router_activation_func": "sigmoid",
    "num_expert_group": 1,
    "num_nextn_predict_layers": 0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "use_grouped_topk": True,
}


@dataclass(frozen=True)
class LinearAttention:
    """`linear_attn_config`. Layers count from 1. No `gate_lower_bound`: the gate is unbounded."""

    head_dim: int
    num_heads: int
    short_conv_kernel_size: int
    kda_layers: list[int]
    full_attn_layers: list[int]
    use_full_rank_gate: bool = False
    gate_lower_bound: float | None = None


@dataclass(frozen=True)
class ReferenceConfig:
    """`text_config`. Fields with a default are absent in the Kimi-Linear release."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    first_k_dense_replace: int
    rms_norm_eps: float
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    linear_attn_config: LinearAttention
    hidden_act: str = "silu"
    q_lora_rank: int | None = None
    mla_use_output_gate: bool = False
    num_experts: int | None = None
    num_experts_per_token: int | None = None
    num_shared_experts: int | None = None
    moe_intermediate_size: int | None = None
    moe_renormalize: bool = False
    routed_scaling_factor: float = 1.0
    routed_expert_hidden_size: int | None = None
    latent_moe_use_norm: bool = False
    activation_situ_beta: float | None = None
    activation_situ_linear_beta: float | None = None
    attn_res_block_size: int | None = None

    @property
    def linear(self) -> LinearAttention:
        return self.linear_attn_config

    def is_kda(self, layer: int) -> bool:
        """Whether 0-indexed `layer` is KDA (the lists of the file count from 1)."""
        return layer + 1 in self.linear.kda_layers

    def is_moe(self, layer: int) -> bool:
        return self.num_experts is not None and layer >= self.first_k_dense_replace

    @property
    def a_log_length(self) -> int:
        """Stored length of `A_log`: the K3 release pads it with zeros to the width of a head."""
        heads, bounded = self.linear.num_heads, self.linear.gate_lower_bound is not None
        return max(heads, self.linear.head_dim) if bounded else heads


def read_config(folder: Path) -> ReferenceConfig:
    """The text part of `folder/config.json`.

    Raises:
        ValueError: fields unknown, missing, of a wrong type, or in contradiction; all are named.
    """
    whole = json.loads((folder / "config.json").read_text())
    return parse_config(whole.get("text_config", whole))


def parse_config(fields: dict[str, Any]) -> ReferenceConfig:
    fields = dict(fields)
    problems = [
        f"{name}={fields[name]!r}: must be {value!r}"
        for name, value in FIXED.items()
        if name in fields and fields[name] != value
    ]
    for name in (*SILENT, *FIXED):
        fields.pop(name, None)
    nested = dict(fields.get("linear_attn_config") or {})
    linear = _fill(LinearAttention, nested, "linear_attn_config.", problems)
    fields["linear_attn_config"] = linear
    config = _fill(ReferenceConfig, fields, "", problems)
    if linear is not None and config is not None:
        problems += _contradictions(config)
    if problems:
        raise ValueError("config.json: " + "; ".join(problems))
    assert config is not None
    return config


def _fill(kind: type, fields: dict[str, Any], prefix: str, problems: list[str]) -> Any:
    hints = get_type_hints(kind)
    needed = {f.name for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING}
    bad = [f"{prefix}{name}: unknown" for name in fields.keys() - hints.keys()]
    bad += [f"{prefix}{name}: missing" for name in needed - fields.keys()]
    bad += [
        f"{prefix}{name}={value!r}: must be {hints[name]}"
        for name, value in fields.items()
        if name in hints and not _is_a(value, hints[name])
    ]
    problems += sorted(bad)
    return None if bad else kind(**fields)


def _is_a(value: object, hint: Any) -> bool:
    if get_origin(hint) in (UnionType, Union):
        return any(_is_a(value, one) for one in get_args(hint))
    if get_origin(hint) is list:
        return isinstance(value, list) and all(_is_a(one, int) for one in value)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(value, hint) and (hint is bool or not isinstance(value, bool))


def _contradictions(config: ReferenceConfig) -> list[str]:
    linear, bad = config.linear, []
    layers = sorted(linear.kda_layers + linear.full_attn_layers)
    if layers != list(range(1, config.num_hidden_layers + 1)):
        bad.append("kda_layers and full_attn_layers: must hold each of 1..num_hidden_layers once")
    if config.num_key_value_heads != config.num_attention_heads:
        bad.append("num_key_value_heads: must be num_attention_heads (each head has its own keys)")
    betas = (config.activation_situ_beta, config.activation_situ_linear_beta)
    if config.hidden_act not in ("situ", "silu"):
        bad.append(f"hidden_act={config.hidden_act!r}: must be 'situ' or 'silu'")
    if any((beta is not None) != (config.hidden_act == "situ") for beta in betas):
        bad.append("activation_situ_beta, activation_situ_linear_beta: belong to hidden_act='situ'")
    sizes = (config.num_experts_per_token, config.moe_intermediate_size, config.num_shared_experts)
    if any((size is None) != (config.num_experts is None) for size in sizes):
        bad.append("num_experts and its sizes: all of them or none")
    if config.num_experts is None and config.routed_expert_hidden_size is not None:
        bad.append("routed_expert_hidden_size: needs num_experts")
    if config.latent_moe_use_norm and config.routed_expert_hidden_size is None:
        bad.append("latent_moe_use_norm: needs routed_expert_hidden_size")
    if (config.num_experts or 0) and (config.num_experts_per_token or 0) > (
        config.num_experts or 0
    ):
        bad.append("num_experts_per_token: must be <= num_experts")
    if linear.gate_lower_bound is not None and not -5 <= linear.gate_lower_bound < 0:
        bad.append("gate_lower_bound: must be within [-5, 0)")
    if config.attn_res_block_size is not None and config.attn_res_block_size < 1:
        bad.append("attn_res_block_size: must be >= 1")
    return bad
