"""Attention residuals: a learned softmax over depth in place of the plain residual sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from megatron_ext.config.schema import AttentionResidualBackend as Backend
from megatron_ext.errors import ConfigError
from megatron_ext.ops import without_memory
from megatron_ext.ops.attn_res import fla
from megatron_ext.ops.attn_res.dense import depth_mix_dense, depth_weights
from megatron_ext.ops.attn_res.gradients import with_gradient_sum
from megatron_ext.ops.attn_res.reference import depth_mix_reference, depth_weights_reference
from megatron_ext.ops.backend import rejection, triton_misfit

__all__ = [
    "depth_mix",
    "depth_mix_reference",
    "depth_weights",
    "depth_weights_reference",
    "resolve_backend",
]


# Our kernel holds a row in registers, and takes a token's sources as arguments.
TRITON_WIDTH, TRITON_SOURCES = 8192, 16


def resolve_backend(
    backend: Backend, device: torch.device, *, dtype: torch.dtype, width: int, count: int = 1
) -> Backend:
    """The backend that will run for `count` sources [..., width]; never ``auto``.

    What is asked for where it can run, else ``dense``; ``auto`` is the first that can of
    our kernel, where it passes its check (`ops.backend`), fla and dense.
    """
    if backend in (Backend.reference, Backend.dense):
        return backend
    if backend is not Backend.fla:
        usable = width <= TRITON_WIDTH and count <= TRITON_SOURCES
        usable &= device.type == "meta" or triton_misfit(device, dtype) is None
        if usable and backend is Backend.auto and device.type != "meta":
            usable = _rejection(device, dtype, width) is None
        if usable:
            return Backend.triton
        if backend is Backend.triton:
            return Backend.dense
    usable = fla.available(device) and fla.fits(dtype, width)
    return Backend.fla if usable else Backend.dense


@cache
def _rejection(device: torch.device, dtype: torch.dtype, width: int) -> str | None:
    from megatron_ext.ops.attn_res.triton import depth_mix_triton

    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(3, width, generator=generator) / width**0.5
    vectors += torch.tensor([[0.0], [1.0], [1.0]])  # query, and weights of the two norms
    inputs = [*vectors, *torch.randn(3, 70, width, generator=generator)]

    def by(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def two_readers(query: Tensor, key: Tensor, norm: Tensor, *sources: Tensor) -> Tensor:
            first, *finished = sources
            read = (*map(with_gradient_sum, finished), first)
            once = run(read, query, key, eps=1e-5, norm_weight=norm)
            return once + run(read, 2 * query, key, eps=1e-5, norm_weight=norm)

        return two_readers

    return rejection(
        "depth_mix",
        fast=by(depth_mix_triton),
        slow=by(depth_mix_reference),
        inputs=[x.to(device, dtype) for x in inputs],
    )


def depth_mix(
    sources: Sequence[Tensor],
    query: Tensor,
    key_weight: Tensor,
    *,
    eps: float,
    norm_weight: Tensor | None = None,
    backend: Backend = Backend.auto,
    require: bool = False,
) -> Tensor:
    """Softmax-weighted sum of the sources, each token by itself, and optionally its RMS norm.

        a = softmax_j( query . (key_weight * v_j / rms(v_j)) );  h = sum_j a_j v_j

    Scores, weights and sums are in float32, or float64 for float64 sources. A query of zeros gives
    the mean of the sources.

    Args:
        sources: at least one tensor [..., D], all of one shape and dtype; v_j.
        query: pseudo-query [D].
        key_weight: of the keys' norm, [D].
        eps: inside the square roots.
        norm_weight: [D]; given, the result is norm_weight * h / rms(h), the pre-norm of the
            sublayer that reads h, fused so that h need not be stored.
        backend: which implementation.
        require: make a fallback of the backend an error.

    Returns:
        [..., D] in the dtype of the sources.

    Raises:
        ConfigError: ``require``, and the backend asked for cannot run here.
        ValueError: no sources, or shapes or dtypes differ.
    """
    _check(sources, query, key_weight, norm_weight)
    first = sources[0]
    chosen = resolve_backend(
        backend, first.device, dtype=first.dtype, width=first.shape[-1], count=len(sources)
    )
    _check_fallback(backend, chosen, first, require=require)
    if chosen is Backend.triton and first.device.type == "meta":
        return without_memory.depth_mix(sources, query, key_weight, norm_weight, numbers=3)
    if chosen is Backend.triton:
        from megatron_ext.ops.attn_res.triton import depth_mix_triton as run
    else:
        run = {
            Backend.reference: depth_mix_reference,
            Backend.dense: depth_mix_dense,
            Backend.fla: fla.depth_mix_fla,
        }[chosen]
    return run(sources, query, key_weight, eps=eps, norm_weight=norm_weight)


def _check_fallback(backend: Backend, chosen: Backend, source: Tensor, *, require: bool) -> None:
    if require and backend is Backend.triton and chosen is not backend:
        raise ConfigError(
            f"residual.backend: given triton with require on {source.device}, {source.dtype}, "
            f"width {source.shape[-1]}; it cannot run there (it needs a CUDA device of compute "
            f"capability 8.0, Triton, 16 or 32 bits, a width <= {TRITON_WIDTH} and at most "
            f"{TRITON_SOURCES} sources); use dense, or residual.require=false"
        )
    wanted = source.is_cuda if backend is Backend.auto else backend is Backend.fla
    if require and wanted and chosen is Backend.dense:
        raise ConfigError(
            f"residual.backend: given {backend.value} with require on {source.device}, "
            f"{source.dtype}, width {source.shape[-1]}; fla cannot run there (it needs a CUDA "
            f"device, the package fla-core >= 0.6, 16 or 32 bits and a width <= {fla.MAX_WIDTH}); "
            "use dense, or residual.require=false"
        )


def _check(
    sources: Sequence[Tensor], query: Tensor, key_weight: Tensor, norm_weight: Tensor | None
) -> None:
    if not sources:
        raise ValueError("sources: given none, allowed at least one")
    first = sources[0]
    wrong = [
        f"source {index}: given {tuple(v.shape)} {v.dtype}, allowed {tuple(first.shape)} "
        f"{first.dtype}"
        for index, v in enumerate(sources)
        if v.shape != first.shape or v.dtype != first.dtype
    ]
    vectors = {"query": query, "key_weight": key_weight, "norm_weight": norm_weight}
    wrong += [
        f"{name}: given {tuple(vector.shape)}, allowed {tuple(first.shape[-1:])}"
        for name, vector in vectors.items()
        if vector is not None and vector.shape != first.shape[-1:]
    ]
    if wrong:
        raise ValueError("; ".join(wrong))
