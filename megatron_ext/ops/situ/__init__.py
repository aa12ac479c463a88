"""SiTU-GLU, the bounded gated activation of Kimi K3."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from megatron_ext.config.schema import KernelBackend
from megatron_ext.ops import without_memory
from megatron_ext.ops.backend import planned, rejection, resolver
from megatron_ext.ops.situ.dense import situ_glu_dense
from megatron_ext.ops.situ.reference import situ_glu_reference

__all__ = ["resolve_backend", "situ_glu", "situ_glu_reference"]

CHECKED_ROWS = 37


def situ_glu(
    gate: Tensor,
    up: Tensor | None = None,
    *,
    beta: float | None,
    linear_beta: float | None,
    scale: Tensor | None = None,
    backend: KernelBackend = KernelBackend.auto,
    require: bool = False,
) -> Tensor:
    """``scale * beta tanh(gate/beta) sigmoid(gate) * linear_beta tanh(up/linear_beta)``.

    Bounded by ``scale * beta * linear_beta`` whatever the input. Without a bound a branch is what
    it tends to: ``gate * sigmoid(gate)`` and ``up``; without both it is SwiGLU. First derivatives
    only.

    Args:
        gate: [..., F], any floating dtype; without ``up``, both branches [..., 2F], gate first.
            As one tensor they get one gradient; two halves of a tensor would have theirs copied
            together.
        up: [..., F], same shape and dtype as ``gate``.
        beta: bound of the gate branch, > 0 (K3: 4); None: none.
        linear_beta: bound of the linear branch, > 0 (K3: 25); None: none.
        scale: a factor a row [...], such as the router's weight; float32 or wider.
        backend: which implementation.
        require: make a fallback of the backend an error.

    Returns:
        [..., F] in the dtype of ``gate``; computed in float32, or float64 for float64 input.

    Raises:
        ValueError: shapes or dtypes do not fit, or a bound is not positive.
        ConfigError: ``require``, and the backend asked for cannot run here.
    """
    if up is not None and (gate.shape != up.shape or gate.dtype != up.dtype):
        raise ValueError(
            f"situ_glu: given gate {tuple(gate.shape)} {gate.dtype} and up {tuple(up.shape)} "
            f"{up.dtype}, allowed equal shapes and dtypes"
        )
    if up is None and (gate.dim() == 0 or gate.shape[-1] % 2):
        raise ValueError(f"situ_glu: given {tuple(gate.shape)} for both, allowed [..., 2F]")
    if scale is not None and scale.shape != gate.shape[:-1]:
        raise ValueError(
            f"situ_glu: given scale {tuple(scale.shape)}, allowed {tuple(gate.shape[:-1])}"
        )
    if any(bound is not None and bound <= 0 for bound in (beta, linear_beta)):
        raise ValueError(f"situ_glu: given bounds {beta} and {linear_beta}, allowed > 0")
    if planned(gate, backend):
        return without_memory.situ_glu(gate, up, scale)
    width = gate.shape[-1] // (2 if up is None else 1)
    chosen = resolve_backend(backend, gate.device, gate.dtype, width, require=require)
    if chosen is KernelBackend.triton:
        from megatron_ext.ops.situ.triton import situ_glu_triton as run
    else:
        run = situ_glu_reference if chosen is KernelBackend.reference else situ_glu_dense
    return run(gate, up, beta=beta, linear_beta=linear_beta, scale=scale)


@cache
def _rejection(device: torch.device, dtype: torch.dtype, width: int) -> str | None:
    from megatron_ext.ops.situ.triton import situ_glu_triton

    generator = torch.Generator().manual_seed(0)
    x = 8 * torch.randn(CHECKED_ROWS, 2 * width, generator=generator)
    scale = torch.rand(CHECKED_ROWS, generator=generator)
    return rejection(
        "situ_glu",
        fast=lambda x, s: situ_glu_triton(x, None, beta=4.0, linear_beta=25.0, scale=s),
        slow=lambda x, s: situ_glu_reference(x, None, beta=4.0, linear_beta=25.0, scale=s),
        inputs=[x.to(device, dtype), scale.to(device)],
    )


resolve_backend = resolver("situ_glu", _rejection)
