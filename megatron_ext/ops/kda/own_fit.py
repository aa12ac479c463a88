"""Where our own backend of KDA (`own`) can run, and where `auto` may take it."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from functools import cache
from typing import Any

import torch

from megatron_ext.config.schema import Gate
from megatron_ext.errors import ConfigError

HEAD_DIM = 128
LOWEST_BOUND = -5.0
# Compute capability of the GPUs on which it was run and its errors and times were measured (those
# of rows in segments in the interpreter only, see docs/kda.md). On others it is offered by name:
# its largest kernel was made for this much memory on chip.
MEASURED = ((9, 0),)
# Module and function of fla-core 0.6, with the arguments that are given by name.
FLA = {
    "fused_beta_sigmoid_fwd": ("fla.ops.common.gate", ""),
    "prepare_chunk_indices": ("fla.ops.utils.index", ""),
    "chunk_kda_fwd_intra": (
        "fla.ops.kda.chunk_intra",
        "q k v gk beta scale cu_seqlens chunk_indices chunk_size safe_gate disable_recompute",
    ),
    "chunk_gla_fwd_o_gk": (
        "fla.ops.gla.chunk",
        "q v g A h scale cu_seqlens chunk_indices chunk_size",
    ),
    "kda_gate_chunk_cumsum": (
        "fla.ops.kda.gate",
        "g A_log dt_bias scale chunk_size cu_seqlens chunk_indices lower_bound",
    ),
    "recompute_w_u_fwd": ("fla.ops.kda.wy_fast", "q k v beta A gk cu_seqlens chunk_indices"),
    "chunk_gated_delta_rule_fwd_h": (
        "fla.ops.common.chunk_delta_h",
        "k w u gk initial_state output_final_state save_new_value cu_seqlens chunk_indices "
        "chunk_offsets chunk_size",
    ),
    "chunk_gated_delta_rule_bwd_dhu": (
        "fla.ops.common.chunk_delta_h",
        "q k w gk h0 dht do dv scale cu_seqlens chunk_indices chunk_size",
    ),
}


@cache
def missing() -> list[str]:
    """What the installed fla lacks of `FLA`. Imports it."""
    found = []
    for name, (module, arguments) in FLA.items():
        try:
            function = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            found.append(f"{module}.{name}")
            continue
        known = _arguments(function)
        found += [f"{module}.{name}({x})" for x in arguments.split() if x not in known]
    return found


def _arguments(function: Any) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def misfits(
    device: torch.device,
    dtype: torch.dtype,
    *,
    head_dim: int,
    value_dim: int,
    gate: Gate,
    lower_bound: float,
) -> list[str]:
    """Why this backend cannot run, all that can be told without fla; empty where it can.

    fla is imported, on a GPU, where nothing else is in the way. On the meta device, where a plan
    counts memory, a stand-in runs. Arguments as ``megatron_ext.ops.kda.resolve_backend``.
    """
    reasons = []
    if device.type not in ("cuda", "meta"):
        reasons.append(f"needs a GPU, the tensors are on {device.type}")
    if dtype is not torch.bfloat16:
        reasons.append(f"needs bfloat16 (run.precision=bf16), got {str(dtype).split('.')[-1]}")
    for name, width in (("head_dim", head_dim), ("value_dim", value_dim)):
        if width != HEAD_DIM:
            reasons.append(f"needs model.kda.{name}={HEAD_DIM}, got {width}")
    if gate is Gate.softplus:
        reasons.append(
            "needs a bounded gate (model.kda.gate=bounded or bounded_plain), got softplus: its "
            "matrix products overflow where 16 tokens decay by more than 88 nats"
        )
    elif not LOWEST_BOUND <= lower_bound < 0:
        reasons.append(f"needs model.kda.lower_bound in [{LOWEST_BOUND:g}, 0), got {lower_bound:g}")
    if device.type == "cuda":
        if importlib.util.find_spec("fla") is None:
            reasons.append("needs the package fla-core, which is missing")
        elif not reasons and missing():
            reasons.append(f"needs fla-core 0.6; the one installed lacks {', '.join(missing())}")
    return reasons


def refusal(reasons: list[str]) -> ConfigError:
    """What is raised where this backend is asked for by name and `misfits` has reasons."""
    return ConfigError(
        f"model.kda.backend=triton: {'; '.join(reasons)} (allowed model.kda.backend=auto, fla "
        "or dense)"
    )


def measured(device: torch.device) -> bool:
    """Whether `auto` may take this backend there, if it can run."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) in MEASURED
