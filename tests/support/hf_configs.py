"""Tiny `text_config`s in the released layout. Sizes all differ, so that no two can be mixed up."""

from __future__ import annotations

from random import Random
from typing import Any


def kimi_k3(**changes: Any) -> dict[str, Any]:
    """Five layers of the K3 kind: KDA and gated MLA, latent experts, attention residuals."""
    linear = changes.pop("linear_attn_config", {})
    config = {
        "model_type": "kimi_linear",
        "vocab_size": 101,
        "hidden_size": 28,
        "num_hidden_layers": 5,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "intermediate_size": 44,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "num_nextn_predict_layers": 0,
        "tie_word_embeddings": False,
        "num_experts": 7,
        "num_experts_per_token": 3,
        "num_shared_experts": 2,
        "moe_intermediate_size": 10,
        "routed_expert_hidden_size": 18,
        "latent_moe_use_norm": True,
        "moe_router_activation_func": "sigmoid",
        "moe_renormalize": True,
        "routed_scaling_factor": 1.0,
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "q_lora_rank": 20,
        "kv_lora_rank": 14,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "rope_theta": 10000.0,
        "attn_res_block_size": 2,
        "linear_attn_config": {
            "head_dim": 8,
            "num_heads": 5,
            "short_conv_kernel_size": 4,
            "use_full_rank_gate": True,
            "gate_lower_bound": -5.0,
            "kda_layers": [1, 2, 4],
            "full_attn_layers": [3, 5],
        }
        | linear,
    }
    return config | changes


def kimi_linear(**changes: Any) -> dict[str, Any]:
    """The same sizes in the Kimi-Linear kind: no bound, low-rank gate, no latent width."""
    config = kimi_k3(
        hidden_act="silu", q_lora_rank=None, num_shared_experts=1, routed_scaling_factor=2.446
    )
    absent = "activation_situ_beta activation_situ_linear_beta routed_expert_hidden_size"
    for name in f"{absent} latent_moe_use_norm mla_use_output_gate attn_res_block_size".split():
        del config[name]
    for name in ("use_full_rank_gate", "gate_lower_bound"):
        del config["linear_attn_config"][name]
    return config | changes


def published_k3() -> dict[str, Any]:
    """The released sizes of Kimi K3."""
    full = [*range(4, 93, 4), 93]
    return kimi_k3(
        vocab_size=163840,
        hidden_size=7168,
        num_hidden_layers=93,
        num_attention_heads=96,
        num_key_value_heads=96,
        intermediate_size=33792,
        max_position_embeddings=1048576,
        num_experts=896,
        num_experts_per_token=16,
        moe_intermediate_size=3072,
        routed_expert_hidden_size=3584,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        attn_res_block_size=12,
        linear_attn_config={
            "head_dim": 128,
            "num_heads": 96,
            "full_attn_layers": full,
            "kda_layers": [layer for layer in range(1, 94) if layer not in full],
        },
    )


def published_kimi_linear() -> dict[str, Any]:
    """The released sizes of Kimi-Linear-48B-A3B."""
    full = [4, 8, 12, 16, 20, 24, 27]
    config = kimi_linear(
        vocab_size=163840,
        hidden_size=2304,
        num_hidden_layers=27,
        num_attention_heads=32,
        num_key_value_heads=32,
        head_dim=72,
        intermediate_size=9216,
        num_experts=256,
        num_experts_per_token=8,
        moe_intermediate_size=1024,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        model_max_length=1048576,
        bos_token_id=163584,
        eos_token_id=163586,
        pad_token_id=163839,
    )
    config["linear_attn_config"] |= {
        "head_dim": 128,
        "num_heads": 32,
        "full_attn_layers": full,
        "kda_layers": [layer for layer in range(1, 28) if layer not in full],
    }
    return config


def random_kind(seed: int) -> dict[str, Any]:
    """A configuration whose sizes all differ, with blocks of 1 to 12 layers from one seed to the
    next; every fifth one is of the Kimi-Linear kind. Vocabularies are multiples of 128, as ours."""
    random = Random(seed)
    block = 1 + seed % 12
    # Of some depth beyond the block, so that blocks of every size end inside the model.
    layers = min(13, block + random.randint(2, 4))
    names = (
        *("hidden_size", "intermediate_size", "moe_intermediate_size", "q_lora_rank"),
        *("routed_expert_hidden_size", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"),
        *("v_head_dim", "num_experts", "num_attention_heads", "num_heads", "head_dim"),
    )
    few = dict(zip(names[-3:-1], random.sample(range(2, 6), 2), strict=True))
    sizes = dict(zip(names, random.sample(range(6, 34), len(names)), strict=True)) | few
    full = sorted({layers, *random.sample(range(1, layers), layers // 3)})
    changes: dict[str, Any] = {name: sizes[name] for name in names[:-2]}
    changes |= {
        "vocab_size": 128 * random.randint(1, 3),
        "num_hidden_layers": layers,
        "num_key_value_heads": sizes["num_attention_heads"],
        "first_k_dense_replace": random.randint(0, 2),
        "num_experts_per_token": random.randint(2, 5),
        "num_shared_experts": random.randint(0, 3),
        "routed_scaling_factor": random.choice([1.0, 2.446]),
        "latent_moe_use_norm": random.random() < 0.7,
        "linear_attn_config": {
            "head_dim": sizes["head_dim"],
            "num_heads": sizes["num_heads"],
            "short_conv_kernel_size": random.randint(2, 5),
            "kda_layers": [i for i in range(1, layers + 1) if i not in full],
            "full_attn_layers": full,
        },
    }
    if seed % 5 < 4:
        return kimi_k3(**changes, attn_res_block_size=block)
    absent = ("q_lora_rank", "routed_expert_hidden_size", "latent_moe_use_norm")
    linear = kimi_linear(**{name: changes[name] for name in changes if name not in absent})
    for name in ("use_full_rank_gate", "gate_lower_bound"):
        linear["linear_attn_config"].pop(name, None)
    return linear
