"""The mix over depth by the fused Triton kernel of flash-linear-attention (fla), on GPUs.

One pass over the sources each way; float32 scores and sums inside. It stores the sources, and four
bytes a token and source twice. fla is imported at the first call: its import takes seconds.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_ext.ops import without_memory

# Beyond this one program cannot hold a row of float32 in registers without spilling.
MAX_WIDTH = 16384
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def available(device: torch.device) -> bool:
    """Whether an fla with this kernel is installed and ``device`` can run it. Imports nothing."""
    if device.type == "meta":  # a stand-in runs, for plans
        return True
    if device.type != "cuda" or importlib.util.find_spec("fla") is None:
        return False
    return importlib.util.find_spec("fla.ops.attnres") is not None


def fits(dtype: torch.dtype, width: int) -> bool:
    """Whether the kernel takes sources [..., width]."""
    return dtype in DTYPES and width <= MAX_WIDTH


def depth_mix_fla(
    sources: Sequence[Tensor],
    query: Tensor,
    key_weight: Tensor,
    *,
    eps: float,
    norm_weight: Tensor | None = None,
) -> Tensor:
    """See `ops.attn_res.depth_mix`.

    Raises:
        ValueError: no CUDA tensors, or a dtype or width that the kernel does not take.
    """
    first = sources[0]
    if first.device.type not in ("cuda", "meta") or not fits(first.dtype, first.shape[-1]):
        raise ValueError(
            f"backend fla: given {first.dtype} [..., {first.shape[-1]}] on {first.device}, allowed "
            f"float32, bfloat16 or float16 up to width {MAX_WIDTH} on cuda; use backend dense"
        )
    if first.device.type == "meta":
        return without_memory.depth_mix(sources, query, key_weight, norm_weight, numbers=2)
    from fla.ops.attnres import fused_attnres

    # checkpoint_level 1: the mixture before its norm is not stored but computed again.
    out: Tensor = fused_attnres(
        query,
        list(sources),
        key_weight,
        output_rms_weight=norm_weight,
        rms_eps=eps,
        checkpoint_level=1,
    )
    return out
