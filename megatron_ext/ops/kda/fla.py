"""KDA and its convolution through the Triton kernels of flash-linear-attention (fla), on GPUs.

fla is imported at the first call, not with this module: its import takes seconds.
"""

# ruff: noqa: N803  (A_log is the name of the parameter in every checkpoint)
from __future__ import annotations

import importlib.util
import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.config.schema import Gate
from megatron_ext.errors import ConfigError
from megatron_ext.ops import without_memory
from megatron_ext.ops.kda.documents import document_lengths

MAX_HEAD_DIM = 256
LOWEST_BOUND = -5.0
KEEP = "disable_recompute"  # fla's word
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def available(device: torch.device) -> bool:
    """Whether fla is installed and ``device`` can run it. Does not import it. On the meta device,
    where a plan counts memory, a stand-in runs."""
    if device.type == "meta":
        return True
    return device.type == "cuda" and importlib.util.find_spec("fla") is not None


def fla_kda(
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
    recompute: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """``kda`` of this package with norm, gate and sigmoid fused into fla's kernels.

    Products run on tensor cores: bfloat16 inputs give about 4e-3 relative error, float32 inputs
    that of TF32. Arguments as ``megatron_ext.ops.kda.kda``.

    Raises:
        ConfigError: not ``recompute``, and the installed fla has no such choice.
        ValueError: an input that fla cannot take.
    """
    _check(q)
    if q.shape[-1] > MAX_HEAD_DIM:
        raise ValueError(
            f"head_dim: given {q.shape[-1]}, allowed up to {MAX_HEAD_DIM} with backend fla; "
            "use backend dense"
        )
    bounded = gate is not Gate.softplus
    if bounded and not LOWEST_BOUND <= lower_bound < 0:
        raise ValueError(
            f"lower_bound: given {lower_bound:g}, allowed [{LOWEST_BOUND:g}, 0) with backend fla"
        )
    if cu_seqlens is not None and q.shape[0] != 1:  # raises; offsets are not read back from the GPU
        document_lengths(cu_seqlens, batch=q.shape[0], tokens=q.shape[1])
    # A slope of exp(0) = 1 is the gate without A_log; older releases of fla do not accept None.
    slope = A_log if A_log is not None else dt_bias.new_zeros(q.shape[2])
    keep = not recompute and torch.is_grad_enabled()
    if q.device.type == "meta":
        return without_memory.kda(
            q.contiguous(),
            k.contiguous(),
            v.contiguous(),
            z.contiguous(),
            beta_logits.float().contiguous(),
            slope.float(),
            dt_bias.float().flatten(),
            initial_state,
            documents=q.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1,
            output_final_state=output_final_state,
            keep=without_memory.KeptByKda.fla if keep else None,
        )
    from fla.ops.kda import chunk_kda

    # It takes any other word without a complaint.
    if keep and KEEP not in inspect.signature(chunk_kda).parameters:
        raise ConfigError(
            f"train.kda_recompute=false: the fla-core installed has no {KEEP} (allowed fla-core "
            "0.6; or train.kda_recompute=true)"
        )

    result: tuple[Tensor, Tensor | None] = chunk_kda(
        q=q.contiguous(),
        k=k.contiguous(),
        v=v.contiguous(),
        g=z.contiguous(),
        beta=beta_logits.float().contiguous(),
        A_log=slope.float(),
        dt_bias=dt_bias.float().flatten(),
        scale=q.shape[-1] ** -0.5,
        initial_state=None if initial_state is None else initial_state.float().contiguous(),
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        safe_gate=bounded,
        lower_bound=lower_bound if bounded else None,
        cu_seqlens=None if cu_seqlens is None else cu_seqlens.long(),
        **({KEEP: True} if keep else {}),
    )
    return result


def fla_short_conv(
    x: Tensor,
    weight: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """``short_conv`` of this package by fla's kernel. Arguments and result as ``short_conv_dense``.

    Raises:
        ValueError: an input that fla cannot take.
    """
    _check(x)
    if x.device.type == "meta":
        return without_memory.short_conv(x.contiguous(), weight.contiguous()), None
    from fla.modules.convolution import causal_conv1d

    # fla's state is as wide as the filter; its oldest column meets no tap.
    state = None if initial_state is None else F.pad(initial_state.to(x.dtype), (1, 0))
    y, final = causal_conv1d(
        x.contiguous(),
        weight=weight.contiguous(),
        initial_state=state,
        output_final_state=output_final_state,
        activation="silu",
        cu_seqlens=None if cu_seqlens is None else cu_seqlens.long(),
    )
    return y, final[..., 1:].float() if output_final_state else None


def _check(x: Any) -> None:
    if x.device.type not in ("cuda", "meta"):
        raise ValueError(f"backend fla: given tensors on {x.device}, allowed cuda; use dense")
    if x.dtype not in DTYPES:
        raise ValueError(f"backend fla: given {x.dtype}, allowed float32, bfloat16; use dense")
