"""Folders in the released layout for the reference model: their tensors, a reader, random ones.

The list of tensors is written down here a second time, from the published names, so that a mistake
in the package's key map cannot hide in the reference.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from tests.support.reference_config import ReferenceConfig, parse_config, read_config

Shapes = dict[str, tuple[int, ...]]


def expected_shapes(config: ReferenceConfig) -> Shapes:
    """Every tensor of the model and its shape, as the released index names them."""
    c, d = config, config.hidden_size
    shapes: Shapes = {
        "model.embed_tokens.weight": (c.vocab_size, d),
        "model.norm.weight": (d,),
        "lm_head.weight": (c.vocab_size, d),
    }
    mixes = ["model.output_attn_res"]
    for i in range(c.num_hidden_layers):
        at = f"model.layers.{i}."
        shapes |= {at + f"{name}_layernorm.weight": (d,) for name in ("input", "post_attention")}
        attention = _kda_shapes(c) if c.is_kda(i) else _mla_shapes(c)
        shapes |= {f"{at}self_attn.{name}": shape for name, shape in attention.items()}
        if c.is_moe(i):
            shapes |= {f"{at}block_sparse_moe.{name}": s for name, s in _moe_shapes(c).items()}
        else:
            shapes |= _glu(
                at + "mlp.", d, c.intermediate_size, ("gate_proj", "up_proj", "down_proj")
            )
        mixes += [at + "self_attention_res", at + "mlp_res"]
    if c.attn_res_block_size is not None:
        for name in mixes:
            shapes |= {name + "_norm.weight": (d,), name + "_proj.weight": (1, d)}
    return shapes


def _glu(at: str, width: int, inner: int, names: tuple[str, str, str]) -> Shapes:
    gate, up, down = (at + name + ".weight" for name in names)
    return {gate: (inner, width), up: (inner, width), down: (width, inner)}


def _kda_shapes(c: ReferenceConfig) -> Shapes:
    d, n, k = c.hidden_size, c.linear.num_heads, c.linear.head_dim
    bounded = c.linear.gate_lower_bound is not None
    shapes: Shapes = {f"{name}_proj.weight": (n * k, d) for name in "qkv"}
    shapes |= {
        f"{name}_conv1d.weight": (n * k, 1, c.linear.short_conv_kernel_size) for name in "qkv"
    }
    shapes |= {
        "f_a_proj.weight": (k, d),
        "f_b_proj.weight": (n * k, k),
        "dt_bias": (n * k,),
        "A_log": (c.a_log_length,) if bounded else (1, 1, n, 1),
        "b_proj.weight": (n, d),
        "o_norm.weight": (k,),
        "o_proj.weight": (d, n * k),
    }
    if c.linear.use_full_rank_gate:
        return shapes | {"g_proj.weight": (n * k, d)}
    return shapes | {"g_a_proj.weight": (k, d), "g_b_proj.weight": (n * k, k)}


def _mla_shapes(c: ReferenceConfig) -> Shapes:
    d, n, q, kv = c.hidden_size, c.num_attention_heads, c.q_lora_rank, c.kv_lora_rank
    key, value = c.qk_nope_head_dim + c.qk_rope_head_dim, c.v_head_dim
    shapes: Shapes = {
        "kv_a_proj_with_mqa.weight": (kv + c.qk_rope_head_dim, d),
        "kv_a_layernorm.weight": (kv,),
        "kv_b_proj.weight": (n * (c.qk_nope_head_dim + value), kv),
        "o_proj.weight": (d, n * value),
    }
    if q is None:
        shapes["q_proj.weight"] = (n * key, d)
    else:
        shapes |= {"q_a_proj.weight": (q, d), "q_a_layernorm.weight": (q,)}
        shapes["q_b_proj.weight"] = (n * key, q)
    return shapes | ({"g_proj.weight": (n * value, d)} if c.mla_use_output_gate else {})


def _moe_shapes(c: ReferenceConfig) -> Shapes:
    assert c.num_experts is not None
    assert c.moe_intermediate_size is not None
    d, e, inner = c.hidden_size, c.num_experts, c.moe_intermediate_size
    width = c.routed_expert_hidden_size or d
    shapes: Shapes = {"gate.weight": (e, d), "gate.e_score_correction_bias": (e,)}
    for i in range(e):
        shapes |= _glu(f"experts.{i}.", width, inner, ("w1", "w3", "w2"))
    if c.num_shared_experts:
        names = ("gate_proj", "up_proj", "down_proj")
        shapes |= _glu("shared_experts.", d, c.num_shared_experts * inner, names)
    if c.routed_expert_hidden_size is not None:
        shapes["routed_expert_down_proj.weight"] = (width, d)
        shapes["routed_expert_up_proj.weight"] = (d, width)
    if c.latent_moe_use_norm:
        shapes["routed_expert_norm.weight"] = (width,)
    return shapes


def read_folder(folder: Path) -> tuple[ReferenceConfig, dict[str, Tensor]]:
    """Configuration and all tensors, as stored.

    Raises:
        ValueError: a tensor is missing, unknown, misshapen, not finite, or padded with non-zeros.
    """
    config = read_config(folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    tensors: dict[str, Tensor] = {}
    for file in sorted(set(index.values())):
        with safe_open(folder / file, framework="pt") as shard:
            tensors |= {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118
    tensors = {name.removeprefix("language_model."): t for name, t in tensors.items()}
    expected = expected_shapes(config)
    problems = [f"{name}: missing" for name in expected.keys() - tensors.keys()]
    problems += [f"{name}: unknown" for name in tensors.keys() - expected.keys()]
    for name in tensors.keys() & expected.keys():
        tensor = tensors[name]
        if tuple(tensor.shape) != expected[name]:
            problems.append(f"{name}: has shape {tuple(tensor.shape)}, not {expected[name]}")
        if not tensor.isfinite().all():
            problems.append(f"{name}: is not finite")
        if name.endswith("A_log") and tensor.flatten()[config.linear.num_heads :].any():
            problems.append(f"{name}: padding is not zero")
    if problems:
        raise ValueError(f"{folder}: " + "; ".join(sorted(problems)))
    return config, tensors


def random_tensors(config: ReferenceConfig, seed: int = 0) -> dict[str, Tensor]:
    """Float32 weights of a size at which every part matters: by fan-in, norms around one."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in expected_shapes(config).items():
        x = torch.randn(shape, generator=generator)
        if "norm" in name:
            x = 1 + 0.2 * x
        elif name.endswith("A_log"):
            live = torch.arange(x.numel()).reshape(shape) < config.linear.num_heads
            x = torch.where(live, 0.5 * x, 0)
        elif name.endswith("e_score_correction_bias"):
            x = 0.1 * x
        elif len(shape) > 1 and "embed" not in name:
            x = x / math.sqrt(math.prod(shape[1:]))
        tensors[name] = x
    return tensors


def write_folder(folder: Path, text_config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """A folder in the released layout, in two shards, with the configuration nested."""
    folder.mkdir(parents=True)
    outer = {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3"}
    (folder / "config.json").write_text(json.dumps(outer | {"text_config": text_config}, indent=1))
    names = sorted(tensors)
    halves = (names[: len(names) // 2], names[len(names) // 2 :])
    weight_map = {}
    for i, part in enumerate(halves, 1):
        file = f"model-{i:05d}-of-00002.safetensors"
        save_file({name: tensors[name].contiguous() for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}}
    text = json.dumps(index | {"weight_map": weight_map}, indent=1)
    (folder / "model.safetensors.index.json").write_text(text)


def write_random_folder(
    folder: Path, text_config: dict[str, Any], seed: int = 0
) -> ReferenceConfig:
    """A random model of `text_config` in `folder`."""
    config = parse_config(text_config)
    write_folder(folder, text_config, random_tensors(config, seed))
    return config
