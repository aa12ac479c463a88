"""`config.json` of the Hugging Face layout of Kimi K3 and Kimi Linear, as keys of ours.

Every field is read, known to say nothing about the function, or an error; a field whose value would
make another model than we build is an error too. What is read is plain keys of ours, so that
`model=PATH/config.json` composes like any other configuration. No torch here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_ext.config.hf_fields import (
    FIXED,
    LINEAR,
    MLA_NORM_EPS,
    OTHER,
    REQUIRED,
    SAME,
    SILENT,
    full_attention_layers,
)
from megatron_ext.config.keys import suggest
from megatron_ext.config.schema import ModelOptions
from megatron_ext.errors import ConfigError


def read_architecture(path: Path) -> dict[str, Any]:
    """Keys of ours and their values, as the file says: `model.*` and `residual.*`.

    Args:
        path: a `config.json`, flat or with a nested `text_config` (then the rest of it, which is
            about images, is not looked at).

    Raises:
        ConfigError: the file cannot be read, or fields are unknown, missing, of a wrong type, in
            contradiction, or of a model that is not ours; all of them are listed.
    """
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON ({error})") from error
    content = whole.get("text_config", whole) if isinstance(whole, dict) else whole
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: must hold an object, got {type(content).__name__}")
    reader = _Reader(content)
    values = {"model.name": _name(path)} | _read(reader)
    if content is not whole and whole.get("tie_word_embeddings", False):
        reader.wrong("tie_word_embeddings", "must be false")
    if reader.problems:
        raise ConfigError([f"{path.name}: {problem}" for problem in reader.problems])
    return values


class _Reader:
    """Takes fields one by one, and collects what is wrong with them."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self.fields = dict(content)
        nested = self.fields.pop(LINEAR[:-1], None)
        if isinstance(nested, dict):
            self.fields |= {LINEAR + name: value for name, value in nested.items()}
        self.problems: list[str] = []
        self.left = set(self.fields) - set(SILENT)

    def wrong(self, field: str, text: str) -> None:
        value = json.dumps(self.fields[field]) if field in self.fields else "(absent)"
        self.problems.append(f"{field}={value}: {text}")

    def take(self, field: str, kind: type, default: Any = REQUIRED) -> Any:
        """The value; the default where it is absent or null; None where something is wrong."""
        self.left.discard(field)
        value = self.fields.get(field)
        if value is None:
            if default is REQUIRED:
                self.wrong(field, "is missing, must be given")
                return None
            return default
        fits = isinstance(value, kind) or (kind is float and isinstance(value, int))
        if not fits or (isinstance(value, bool) and kind in (int, float)):
            words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
            self.wrong(field, f"must be {words.get(kind, 'a list of whole numbers')}")
            return None
        return float(value) if kind is float else value


def _read(reader: _Reader) -> dict[str, Any]:
    values: dict[str, Any] = {}
    has_experts = reader.fields.get("num_experts") is not None
    for row in SAME:
        if row.needs and not has_experts:
            if reader.fields.get(row.field) is not None:
                reader.wrong(row.field, f"contradicts the absence of {row.needs}")
            reader.left.discard(row.field)
            continue
        value = reader.take(row.field, row.kind, row.default)
        values |= dict.fromkeys(row.keys.split(), value)
    for field, (only, must_be_given) in FIXED.items():
        reader.left.discard(field)
        if field in reader.fields and reader.fields[field] != only:
            reader.wrong(field, f"must be {json.dumps(only)} (other models are not built here)")
        elif must_be_given and field not in reader.fields:
            reader.wrong(field, f"is missing, must be {json.dumps(only)}")
    heads = reader.take("num_key_value_heads", int, values["model.mla.num_heads"])
    if heads != values["model.mla.num_heads"]:
        reader.wrong("num_key_value_heads", "must be num_attention_heads (latent attention)")
    values |= _read_layers(reader, values["model.num_layers"]) | _read_gates(reader)
    values |= _read_experts(reader) if has_experts else _read_no_experts(reader)
    block = reader.take("attn_res_block_size", int, None)
    values["residual.kind"] = "standard" if block is None else "block"
    values |= {} if block is None else {"residual.block_size": block}
    known = [*(row.field for row in SAME), *FIXED, *SILENT, *OTHER]
    for field in sorted(reader.left):
        near = suggest(field, known, count=1)
        reader.wrong(field, "no such field" + (f" (did you mean {near[0]}?)" if near else ""))
    return values


def _read_layers(reader: _Reader, num_layers: int | None) -> dict[str, Any]:
    kda = reader.take(LINEAR + "kda_layers", list)
    full = reader.take(LINEAR + "full_attn_layers", list)
    if kda is None or full is None or num_layers is None:
        return {}
    if sorted(kda + full) != list(range(1, num_layers + 1)):
        reader.wrong(
            LINEAR + "full_attn_layers",
            f"with kda_layers must hold each of 1 to num_hidden_layers={num_layers} once "
            "(layers count from 1)",
        )
        return {}
    if not full or not kda:
        return {"model.attention": "mla" if full else "kda"}
    for interval in range(1, num_layers + 1):
        for last in (True, False):
            pattern = ModelOptions(
                num_layers=num_layers, full_attention_interval=interval, full_attention_last=last
            )
            if full_attention_layers(pattern) == sorted(full):
                return {
                    "model.attention": "interleaved",
                    "model.full_attention_interval": interval,
                    "model.full_attention_last": last,
                }
    return {"model.attention": "interleaved", "model.full_attention_layers": sorted(full)}


def _read_gates(reader: _Reader) -> dict[str, Any]:
    values: dict[str, Any] = {"model.mla.norm_eps": MLA_NORM_EPS}
    bound = reader.take(LINEAR + "gate_lower_bound", float, None)
    values["model.kda.gate"] = "softplus" if bound is None else "bounded"
    values |= {} if bound is None else {"model.kda.lower_bound": bound}
    full = reader.take(LINEAR + "use_full_rank_gate", bool, False)
    values["model.kda.output_gate"] = "full_rank" if full else "low_rank"
    activation = reader.take("hidden_act", str, "silu")
    betas = {"activation_situ_beta": "situ_beta", "activation_situ_linear_beta": "situ_linear_beta"}
    for field, key in betas.items():
        value = reader.take(field, float, REQUIRED if activation == "situ" else None)
        if activation == "silu" and value is not None:
            reader.wrong(field, "contradicts hidden_act='silu' (allowed with 'situ' only)")
        values["model." + key] = value
    if activation not in ("situ", "silu"):
        reader.wrong("hidden_act", "must be 'situ' (Kimi K3) or 'silu' (Kimi Linear)")
    return values


def _read_no_experts(reader: _Reader) -> dict[str, Any]:
    reader.take("first_k_dense_replace", int, 0)
    for field in ("num_shared_experts", "routed_expert_hidden_size", "latent_moe_use_norm"):
        if reader.take(field, object, None) not in (None, 0, False):
            reader.wrong(field, "contradicts the absence of num_experts")
    reader.take("num_experts", int, None)
    return {"model.first_dense_layers": None}


def _read_experts(reader: _Reader) -> dict[str, Any]:
    shared = reader.take("num_shared_experts", int, 0)
    width = reader.fields.get("moe_intermediate_size")
    latent = reader.take("routed_expert_hidden_size", int, None)
    norm = reader.take("latent_moe_use_norm", bool, False)
    if norm and latent is None:
        reader.wrong("latent_moe_use_norm", "contradicts the absence of routed_expert_hidden_size")
    if reader.fields.get("num_experts_per_token") == 1:
        # The released code leaves the weight of a single expert at its score, whatever
        # moe_renormalize says; here the weights of a token's experts always sum to the scaling.
        reader.wrong("num_experts_per_token", "must be 2 or more (one expert's weight differs)")
    values = {
        "model.first_dense_layers": reader.take("first_k_dense_replace", int, 0),
        "model.experts.num_experts": reader.take("num_experts", int),
        "model.experts.latent_size": latent,
    }
    if isinstance(width, int) and shared is not None:
        values["model.experts.shared_feed_forward_size"] = shared * width
    return values if latent is None else values | {"model.experts.latent_norm": norm}


def _name(path: Path) -> str:
    """What the run is called by default: the folder that the file came in."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", path.resolve().parent.name).strip("-.") or "model"
