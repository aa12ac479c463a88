"""Our options as the `config.json` of the Hugging Face layout, or what keeps them from being one.

A model with a feature that Kimi Linear lacks takes the K3 form, with a nested `text_config`,
any other the flat form of Kimi Linear. No torch here.
"""

from __future__ import annotations

from typing import Any

from megatron_ext.config.hf_fields import (
    FIXED,
    LINEAR,
    MAX_LENGTH,
    MLA_NORM_EPS,
    SAME,
    full_attention_layers,
)
from megatron_ext.config.layout import LayerKind, expert_layers, layer_kinds
from megatron_ext.config.schema import (
    BalanceRule,
    Gate,
    ModelOptions,
    OutputGate,
    ResidualKind,
    ResidualOptions,
    RunConfig,
)
from megatron_ext.errors import ConfigError

# What a trained model does under the rules whose choice is not the k largest of score + bias.
OTHER_SELECTION = {
    BalanceRule.microbatch_mean: "a choice of experts by logit + bias",
    BalanceRule.reject: "experts that go on rejecting tokens below their thresholds",
}


def write_architecture(
    model: ModelOptions,
    residual: ResidualOptions,
    *,
    vocab_size: int,
    dtype: str,
    rule: BalanceRule = BalanceRule.quantile,
) -> dict[str, Any]:
    """The content of `config.json`, with every field of the release that concerns the text model.

    Args:
        vocab_size: rows of the embedding; the padding that we add is part of the model.
        dtype: what most tensors are stored in: `bfloat16` or `float32`.
        rule: that the model was balanced with; the layout takes the k largest of score + bias.

    Raises:
        ConfigError: the layout has no way to say what these options are; all such are listed.
    """
    problems = _inexpressible(model, residual)
    if expert_layers(model) and rule in OTHER_SELECTION:
        problems.append(f"balance.rule={rule.name}: {OTHER_SELECTION[rule]}")
    if problems:
        raise ConfigError([f"{problem}; the layout has no field for it" for problem in problems])
    text = _text(model, residual, vocab_size)
    common = {"tie_word_embeddings": False, "torch_dtype": dtype}
    inner = {"architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear"}
    if is_kimi_linear(model, residual):
        return inner | common | text
    outer = {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3"}
    return outer | common | {"text_config": inner | common | text}


def is_kimi_linear(model: ModelOptions, residual: ResidualOptions) -> bool:
    """Whether the model has nothing that came with K3."""
    experts = model.experts if expert_layers(model) else None
    return (
        residual.kind is ResidualKind.standard
        and model.situ_beta is None
        and not model.mla.output_gate
        and model.kda.gate is Gate.softplus
        and model.kda.output_gate is OutputGate.low_rank
        and (experts is None or experts.latent_size is None)
    )


def _inexpressible(model: ModelOptions, residual: ResidualOptions) -> list[str]:
    kda, mla, experts = model.kda, model.mla, model.experts
    kinds, found = set(layer_kinds(model)), []
    if LayerKind.gated in kinds:
        found.append("model.attention=gated: both kinds of attention in a layer")
    if LayerKind.kda in kinds:
        if kda.gate is Gate.bounded_plain:
            found.append("model.kda.gate=bounded_plain: a bounded gate without A_log")
        ranks = {"decay_rank": kda.decay_rank}
        if kda.output_gate is OutputGate.low_rank:
            ranks["output_gate_rank"] = kda.output_gate_rank
        found += [
            f"model.kda.{name}={rank}: a rank other than model.kda.head_dim={kda.head_dim}"
            for name, rank in ranks.items()
            if rank != kda.head_dim
        ]
    if LayerKind.mla in kinds and mla.norm_eps != MLA_NORM_EPS:
        found.append(f"model.mla.norm_eps={mla.norm_eps:g}: another epsilon than {MLA_NORM_EPS:g}")
    if (model.situ_beta is None) != (model.situ_linear_beta is None):
        found.append("model.situ_beta, model.situ_linear_beta: a bound on one branch only")
    if residual.kind not in (ResidualKind.block, ResidualKind.standard):
        found.append(f"residual.kind={residual.kind.name}: residuals of this kind")
    if expert_layers(model) and experts.top_k == 1:
        found.append("model.experts.top_k=1: a weight of 1, where the release has the score itself")
    if expert_layers(model) and experts.shared_feed_forward_size % experts.feed_forward_size:
        found.append(
            f"model.experts.shared_feed_forward_size={experts.shared_feed_forward_size}: a shared "
            f"expert that is not a multiple of feed_forward_size={experts.feed_forward_size}"
        )
    return found


def _text(model: ModelOptions, residual: ResidualOptions, vocab_size: int) -> dict[str, Any]:
    experts, has_experts = model.experts, bool(expert_layers(model))
    full = full_attention_layers(model)
    linear: dict[str, Any] = {
        "full_attn_layers": full,
        "kda_layers": [i for i in range(1, model.num_layers + 1) if i not in full],
    }
    text: dict[str, Any] = {
        field: value for field, (value, _) in FIXED.items() if not field.startswith("attention_")
    }
    config = RunConfig(model=model, residual=residual)
    for row in SAME:
        if row.needs and not has_experts:
            continue
        value: Any = config
        for part in row.keys.split()[0].split("."):
            value = getattr(value, part)
        place = linear if row.field.startswith(LINEAR) else text
        place[row.field.removeprefix(LINEAR)] = value
    text |= {
        "vocab_size": vocab_size,
        "num_key_value_heads": model.mla.num_heads,
        "q_lora_rank": model.mla.q_lora_rank or None,
        "first_k_dense_replace": model.first_dense_layers if has_experts else model.num_layers,
        "hidden_act": "silu" if model.situ_beta is None else "situ",
        "use_grouped_topk": True,
        "max_position_embeddings": MAX_LENGTH,
        "rope_theta": 10000.0,
    }
    if model.situ_beta is not None:
        text["activation_situ_beta"] = model.situ_beta
        text["activation_situ_linear_beta"] = model.situ_linear_beta
    if has_experts:
        text["num_experts"] = experts.num_experts
        text["num_shared_experts"] = experts.shared_feed_forward_size // experts.feed_forward_size
        if experts.latent_size is not None:
            text["routed_expert_hidden_size"] = experts.latent_size
            text["latent_moe_use_norm"] = experts.latent_norm
    if residual.kind is ResidualKind.block:
        text["attn_res_block_size"] = residual.block_size
    if model.kda.gate is Gate.bounded:
        linear["gate_lower_bound"] = model.kda.lower_bound
    if model.kda.output_gate is OutputGate.full_rank:
        linear["use_full_rank_gate"] = True
    return text | {LINEAR[:-1]: linear}
