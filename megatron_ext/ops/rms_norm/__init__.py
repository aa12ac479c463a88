"""The RMS norm, alone or with its input handed on to the residual sum."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from megatron_ext.config.schema import KernelBackend, KernelOptions
from megatron_ext.ops import without_memory
from megatron_ext.ops.backend import planned, rejection, resolver
from megatron_ext.ops.rms_norm.dense import rms_norm_dense
from megatron_ext.ops.rms_norm.reference import rms_norm_reference

__all__ = ["resolve_backend", "rms_norm", "rms_norm_reference", "rms_norm_residual"]

CHECKED_ROWS = 37


def rms_norm(
    x: Tensor, weight: Tensor, *, eps: float, kernels: KernelOptions | None = None
) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight``, the mean over the last axis. First derivatives only.

    Args:
        x: [..., D], any floating dtype.
        weight: [D].
        eps: inside the square root.
        kernels: backend; None takes the defaults.

    Returns:
        [..., D] in the dtype of ``x``; computed in float32, or float64 for float64 input. Beside
        the inputs the kernel keeps four bytes a row for the backward pass.

    Raises:
        ValueError: shapes do not fit.
        ConfigError: ``kernels.require``, and the backend asked for cannot run here.
    """
    chosen = _choose(x, weight, kernels)
    if chosen is None:
        return without_memory.rms_norm(x, weight)
    if chosen is KernelBackend.triton:
        from megatron_ext.ops.rms_norm.triton import rms_norm_triton as run
    else:
        run = rms_norm_reference if chosen is KernelBackend.reference else rms_norm_dense
    return run(x, weight, eps)


def rms_norm_residual(
    x: Tensor, weight: Tensor, *, eps: float, kernels: KernelOptions | None = None
) -> tuple[Tensor, Tensor]:
    """`rms_norm` of x, and x itself: for a pre-norm layer that adds its result to x.

    If the sum reads the second result instead of x, the gradients of both meet in one backward
    kernel, and autograd has nothing to add. Arguments and errors as of `rms_norm`.
    """
    chosen = _choose(x, weight, kernels)
    if chosen is None:
        return without_memory.rms_norm_residual(x, weight)
    if chosen is KernelBackend.triton:
        from megatron_ext.ops.rms_norm.triton import rms_norm_residual_triton

        return rms_norm_residual_triton(x, weight, eps)
    run = rms_norm_reference if chosen is KernelBackend.reference else rms_norm_dense
    return run(x, weight, eps), x


def _choose(x: Tensor, weight: Tensor, kernels: KernelOptions | None) -> KernelBackend | None:
    """The backend that runs; None where a plan counts what the kernel would allocate."""
    if x.dim() == 0 or weight.shape != x.shape[-1:]:
        raise ValueError(
            f"rms_norm: given x {tuple(x.shape)} and weight {tuple(weight.shape)}, allowed "
            "[..., D] and [D]"
        )
    options = kernels or KernelOptions()
    if planned(x, options.backend):
        return None
    return resolve_backend(options.backend, x.device, x.dtype, x.shape[-1], require=options.require)


@cache
def _rejection(device: torch.device, dtype: torch.dtype, width: int) -> str | None:
    from megatron_ext.ops.rms_norm.triton import rms_norm_residual_triton

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(CHECKED_ROWS, width, generator=generator)
    weight = 1 + 0.1 * torch.randn(width, generator=generator)
    return rejection(
        "rms_norm",
        fast=lambda x, weight: torch.add(*rms_norm_residual_triton(x, weight, 1e-5)),
        slow=lambda x, weight: x + rms_norm_reference(x, weight, 1e-5),
        inputs=[x.to(device, dtype), weight.to(device, dtype)],
    )


resolve_backend = resolver("rms_norm", _rejection)
