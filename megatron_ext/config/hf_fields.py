"""Fields of `config.json` in the Hugging Face layout of Kimi K3 and Kimi Linear. No torch here.

The tables that `hf_read` and `hf_write` share. Every field is in one of them, is handled by both of
those, or is an error. Field names are those of `text_config`; a dot leads into a nested object.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_ext.config.layout import LayerKind, layer_kinds
from megatron_ext.config.schema import ModelOptions

LINEAR = "linear_attn_config."
REQUIRED = object()
# Of the two low-rank norms of MLA: the default of the released norm class, not rms_norm_eps.
MLA_NORM_EPS = 1e-6
# Without positions nothing limits the length; this is the number of both releases.
MAX_LENGTH = 1048576


@dataclass(frozen=True)
class Same:
    """A field that is one or several keys of ours, with the same value.

    Attributes:
        default: the value where the field is absent or null; `REQUIRED`: it may not be.
        needs: another field without which this one is a contradiction.
    """

    field: str
    keys: str
    kind: type = int
    default: Any = REQUIRED
    needs: str = ""


SAME = (
    Same("num_hidden_layers", "model.num_layers"),
    Same("hidden_size", "model.hidden_size"),
    Same("intermediate_size", "model.feed_forward_size"),
    Same("vocab_size", "model.vocab_size"),
    Same("rms_norm_eps", "model.norm_eps", float),
    Same("initializer_range", "model.init_std", float, default=0.02),
    Same("num_attention_heads", "model.mla.num_heads"),
    Same("q_lora_rank", "model.mla.q_lora_rank", default=0),
    Same("kv_lora_rank", "model.mla.kv_lora_rank"),
    Same("qk_nope_head_dim", "model.mla.qk_nope_head_dim"),
    Same("qk_rope_head_dim", "model.mla.qk_rope_head_dim"),
    Same("v_head_dim", "model.mla.v_head_dim"),
    Same("mla_use_output_gate", "model.mla.output_gate", bool, default=False),
    Same(LINEAR + "num_heads", "model.kda.num_heads"),
    # The release ties the ranks of decay and output gate to the width of a head.
    Same(
        LINEAR + "head_dim",
        "model.kda.head_dim model.kda.value_dim model.kda.decay_rank model.kda.output_gate_rank",
    ),
    Same(LINEAR + "short_conv_kernel_size", "model.kda.conv_width"),
    Same("num_experts_per_token", "model.experts.top_k", needs="num_experts"),
    Same("moe_intermediate_size", "model.experts.feed_forward_size", needs="num_experts"),
    Same("routed_scaling_factor", "model.experts.scaling", float, 1.0, needs="num_experts"),
)
# What the two directions treat each in its own way.
OTHER = (
    *("num_experts", "num_key_value_heads", "first_k_dense_replace", "num_shared_experts"),
    *("routed_expert_hidden_size", "latent_moe_use_norm", "attn_res_block_size", "hidden_act"),
    *("activation_situ_beta", "activation_situ_linear_beta", LINEAR + "kda_layers"),
    *(LINEAR + "full_attn_layers", LINEAR + "gate_lower_bound", LINEAR + "use_full_rank_gate"),
)
# Other values would be another model. The flag: whether leaving the field out means another one.
FIXED: dict[str, tuple[Any, bool]] = {
    "attention_bias": (False, False),
    "attention_dropout": (0.0, False),
    "mla_use_nope": (True, True),
    "moe_layer_freq": (1, False),
    "moe_renormalize": (True, False),
    "moe_router_activation_func": ("sigmoid", False),
    "num_expert_group": (1, False),
    "num_nextn_predict_layers": (0, False),
    "rope_scaling": (None, False),
    "tie_word_embeddings": (False, False),
    "topk_group": (1, False),
    "topk_method": ("noaux_tc", False),
}
# Names, token ids, lengths, storage, and what only grouped or rotated models use.
SILENT = (
    *("architectures", "auto_map", "bos_token_id", "dtype", "eos_token_id", "head_dim"),
    *("max_position_embeddings", "model_max_length", "model_type", "pad_token_id", "rope_theta"),
    *("quantization_config", "torch_dtype", "transformers_version", "use_cache"),
    "use_grouped_topk",
)


def full_attention_layers(model: ModelOptions) -> list[int]:
    """Numbers, from 1, of the layers with full attention."""
    return [i for i, kind in enumerate(layer_kinds(model), 1) if kind is not LayerKind.kda]
