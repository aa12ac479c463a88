"""The output gate of attention, with the norm of each head before it where there is one."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from megatron_ext.config.schema import KernelBackend, KernelOptions
from megatron_ext.ops import without_memory
from megatron_ext.ops.backend import planned, rejection, resolver
from megatron_ext.ops.gating.dense import head_gate_dense
from megatron_ext.ops.gating.reference import head_gate_reference

__all__ = ["head_gate", "head_gate_reference", "resolve_backend"]


def head_gate(
    o: Tensor,
    gate: Tensor,
    *,
    weight: Tensor | None = None,
    eps: float = 0.0,
    kernels: KernelOptions | None = None,
) -> Tensor:
    """``norm(o) * sigmoid(gate)``, from the layout of attention to that of projections.

    With a weight the norm is ``o / sqrt(mean(o^2) + eps) * weight``, the mean over a head's
    channels; without one it is ``o``. First derivatives only.

    Args:
        o: [b, s, H, D], what attention gives, any floating dtype.
        gate: [s, b, H * D], logits.
        weight: [D], shared by all heads; None: no norm.
        eps: inside the square root.
        kernels: backend; None takes the defaults.

    Returns:
        [s, b, H * D] in the dtype of ``o``, contiguous; computed in float32, or wider for wider
        input. Only the inputs are kept for the backward pass, as they are.

    Raises:
        ValueError: shapes do not fit.
        ConfigError: ``kernels.require``, and the backend asked for cannot run here.
    """
    batch, length, heads, width = o.shape
    if gate.shape != (length, batch, heads * width) or (
        weight is not None and weight.shape != (width,)
    ):
        raise ValueError(
            f"head_gate: given o {tuple(o.shape)}, gate {tuple(gate.shape)} and weight "
            f"{None if weight is None else tuple(weight.shape)}, allowed [b, s, H, D], "
            "[s, b, H * D] and [D]"
        )
    options = kernels or KernelOptions()
    if planned(o, options.backend):
        return without_memory.head_gate(o, gate, weight)
    chosen = resolve_backend(options.backend, o.device, o.dtype, width, require=options.require)
    if chosen is KernelBackend.triton:
        from megatron_ext.ops.gating.triton import head_gate_triton as run
    else:
        run = head_gate_reference if chosen is KernelBackend.reference else head_gate_dense
    return run(o, gate, weight, eps)


@cache
def _rejection(device: torch.device, dtype: torch.dtype, width: int) -> str | None:
    from megatron_ext.ops.gating.triton import head_gate_triton

    generator = torch.Generator().manual_seed(0)
    o = torch.randn(2, 37, 3, width, generator=generator)
    gate = torch.randn(37, 2, 3 * width, generator=generator)
    weight = 1 + 0.1 * torch.randn(width, generator=generator)
    return rejection(
        "head_gate",
        fast=lambda o, gate, weight: head_gate_triton(o, gate, weight, 1e-5),
        slow=lambda o, gate, weight: head_gate_reference(o, gate, weight, 1e-5),
        inputs=[x.to(device, dtype) for x in (o, gate, weight)],
    )


resolve_backend = resolver("head_gate", _rejection)
