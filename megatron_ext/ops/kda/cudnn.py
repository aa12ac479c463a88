"""KDA through the kernels for Hopper that come with cuDNN's frontend, under our own norm and gate.

Fast and less accurate: see docs/kda.md. Nothing takes it unasked, and where it cannot run it is
refused, never replaced. Read from nvidia-cudnn-frontend 1.32.0: one forward kernel of 16-token
chunks, four backward ones of 64, compiled at the first call by NVRTC and kept on disk. Queries,
keys and values are bfloat16, log-decay, write strength and states float32; states are [V, K]. The
frontend is imported at the first call, not with this module.

Shapes: B batch, T tokens, H heads, K = V = 128 widths of a key and value head, N documents.
"""

# ruff: noqa: N803  (A_log is the name of the parameter in every checkpoint)
from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.config.schema import Gate
from megatron_ext.errors import ConfigError
from megatron_ext.ops import without_memory
from megatron_ext.ops.kda.documents import document_lengths
from megatron_ext.ops.kda.inputs import kda_inputs

HEAD_DIM = 128
# The forward kernel divides by the decay of up to 16 tokens: 80 nats fit float32 and bfloat16.
LOWEST_BOUND = -5.0
CAPABILITY = (9, 0)
PACKAGE = "nvidia-cudnn-frontend >= 1.32"
# By name: the frontend would take another of its engines, of other accuracy, without a word.
PLAN = "kda_hopper_cuda"
# Documents x heads are the second dimension of a launch's grid.
MOST_STATES = 65535


def misfits(device: torch.device, *, head_dim: int, gate: Gate) -> list[str]:
    """Why this backend cannot run, all reasons; empty where it can. Imports nothing large.

    On the meta device, where a plan counts memory, a stand-in runs.
    """
    reasons = []
    if device.type not in ("cuda", "meta"):
        reasons.append(f"needs a GPU, the tensors are on {device.type}")
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability != CAPABILITY:
            reasons.append(
                "needs a Hopper GPU (compute capability 9.0), got "
                f"{torch.cuda.get_device_name(device)} ({capability[0]}.{capability[1]})"
            )
        if not _installed():
            reasons.append(f"needs the package {PACKAGE} with cuda-bindings, which is missing")
    if head_dim != HEAD_DIM:
        reasons.append(f"needs model.kda.head_dim={HEAD_DIM}, got {head_dim}")
    if gate is Gate.softplus:
        reasons.append(
            "needs a bounded gate (model.kda.gate=bounded or bounded_plain), got softplus: its "
            "kernel overflows where 16 tokens decay by more than 88 nats"
        )
    return reasons


def require(device: torch.device, *, head_dim: int, gate: Gate) -> None:
    """Nothing where this backend can run.

    Raises:
        ConfigError: all that is in the way.
    """
    reasons = misfits(device, head_dim=head_dim, gate=gate)
    if reasons:
        raise ConfigError(
            f"model.kda.backend=cudnn: {'; '.join(reasons)} (allowed model.kda.backend=auto, fla "
            "or dense)"
        )


def _installed() -> bool:
    spec = importlib.util.find_spec("cudnn")
    places = None if spec is None else spec.submodule_search_locations
    kernels = "linear_attention/hopper/cuda_engine.py"
    found = any((Path(place) / kernels).is_file() for place in places or ())
    try:
        return found and importlib.util.find_spec("cuda.bindings") is not None
    except ModuleNotFoundError:  # no package `cuda` at all
        return False


def cudnn_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    beta_logits: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor,
    *,
    gate: Gate,
    lower_bound: float,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """``kda`` of this package. Arguments as ``megatron_ext.ops.kda.kda``, bfloat16 only.

    The gradient of the gate has some 2e-2 relative error, that of all else 4e-3, as with fla.

    Raises:
        ConfigError: this backend cannot run here.
        ValueError: an input that its kernels cannot take.
    """
    require(q.device, head_dim=q.shape[-1], gate=gate)
    _check(q, v, lower_bound=lower_bound, cu_seqlens=cu_seqlens)
    batch, tokens, heads, width = q.shape
    documents = batch if cu_seqlens is None else len(cu_seqlens) - 1
    if tokens == 0:
        return _nothing(v, initial_state, documents if output_final_state else None)
    offsets, state = _offsets(q, cu_seqlens), initial_state
    if state is not None:
        missing = len(offsets) - 1 - documents
        state = F.pad(state.float().transpose(-1, -2), (0, 0, 0, 0, 0, 0, 0, missing)).contiguous()
    run = without_memory.cudnn_kda if q.device.type == "meta" else _kernels
    # The kernel scales the queries by 1 / sqrt(K) itself; its backward pass knows no other scale.
    query, key, g, beta = kda_inputs(q, k, z, beta_logits, A_log, dt_bias, lower_bound=lower_bound)
    flat = [query, key, v.flatten(0, 1).contiguous(), g, beta]
    out, final = run(flat, offsets, state, output_final_state=output_final_state)
    out = out.view(batch, tokens, heads, width)
    if final is None:
        return out, None
    return out, final[:documents].transpose(-1, -2).contiguous()


def _kernels(
    inputs: list[Tensor], offsets: Tensor, state: Tensor | None, *, output_final_state: bool
) -> tuple[Tensor, Tensor | None]:
    """The frontend's operator of q, k, v, g, beta [B * T, H, ...]; states are [N, H, V, K]."""
    from cudnn.linear_attention.ops import kimi_delta_attention

    q, k, v, g, beta = inputs
    out, final = kimi_delta_attention(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        cu_seqlens=offsets,
        scale=q.shape[-1] ** -0.5,
        initial_state=state,
        output_final_state=output_final_state,
        plan_name=PLAN,
    )
    return out, final if output_final_state else None


def _check(q: Tensor, v: Tensor, *, lower_bound: float, cu_seqlens: Tensor | None) -> None:
    if {q.dtype, v.dtype} != {torch.bfloat16}:
        raise ValueError(
            f"dtype: given {q.dtype} (v {v.dtype}), allowed torch.bfloat16 with backend cudnn; use "
            "run.precision=bf16, or backend fla or dense"
        )
    if v.shape[-1] != HEAD_DIM:
        raise ValueError(
            f"value_dim: given {v.shape[-1]}, allowed {HEAD_DIM} with backend cudnn; use backend "
            "fla or dense"
        )
    if not LOWEST_BOUND <= lower_bound < 0:
        raise ValueError(
            f"lower_bound: given {lower_bound:g}, allowed [{LOWEST_BOUND:g}, 0) with backend cudnn"
        )
    if cu_seqlens is not None and q.shape[0] != 1:  # raises; offsets are not read back from the GPU
        document_lengths(cu_seqlens, batch=q.shape[0], tokens=q.shape[1])
    documents = q.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    most = MOST_STATES // q.shape[2]
    if documents > most:
        raise ValueError(
            f"documents: given {documents} in one call with {q.shape[2]} heads, allowed {most} "
            "with backend cudnn (documents x heads <= 65535); use backend fla or dense, fewer "
            "heads a rank (parallel.tensor) or fewer tokens a micro-batch"
        )


def _offsets(q: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Bounds of the documents in [B * T], int32 [N + 1]: each row of a batch is one.

    Of a packed row N is the next power of two, with empty documents at the end: the frontend keeps
    a plan, and N states of float32 five times, for every N that it has seen.
    """
    batch, tokens, heads, _ = q.shape
    if cu_seqlens is None:
        return torch.arange(0, (batch + 1) * tokens, tokens, dtype=torch.int32, device=q.device)
    documents = len(cu_seqlens) - 1
    kept = min(1 << (documents - 1).bit_length(), MOST_STATES // heads)
    return F.pad(cu_seqlens.int(), (0, kept - documents), value=tokens)


def _nothing(
    v: Tensor, initial_state: Tensor | None, documents: int | None
) -> tuple[Tensor, Tensor | None]:
    """Of no tokens: the state stays."""
    if documents is None:
        return v, None
    if initial_state is not None:
        return v, initial_state.float()
    return v, v.new_zeros(documents, v.shape[2], HEAD_DIM, HEAD_DIM, dtype=torch.float32)
