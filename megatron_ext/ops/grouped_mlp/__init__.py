"""The feed-forward of many experts at once, on rows sorted by expert."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from megatron_ext.config.schema import ExpertBackend, ExpertFp8, KernelOptions
from megatron_ext.errors import ConfigError
from megatron_ext.ops import without_memory
from megatron_ext.ops.grouped_mlp import engine, fp8, fused
from megatron_ext.ops.grouped_mlp.loop import LoopLinear
from megatron_ext.ops.grouped_mlp.reference import grouped_mlp_reference
from megatron_ext.ops.situ import situ_glu

__all__ = ["grouped_mlp", "grouped_mlp_reference", "resolve_backend"]


def resolve_backend(
    backend: ExpertBackend,
    device: torch.device,
    *,
    dtype: torch.dtype,
    widths: Iterable[int],
    precision: ExpertFp8 = ExpertFp8.none,
    require: bool = False,
) -> ExpertBackend:
    """The backend that will run: what is asked for where it can, else ``loop``.

    Transformer Engine has to be asked for by name, so that it is never replaced; but a plan, on
    the meta device, takes grouped_mm for it. Neither is FP8 ever replaced.

    Args:
        backend: what the configuration asks for; ``auto`` is grouped_mm on a GPU.
        device: of the tensors.
        dtype: of rows and weights.
        widths: latent width and width inside an expert, as they are on a rank.
        precision: of the products.
        require: make a fallback an error.

    Returns:
        ``loop``, ``grouped_mm`` or ``transformer_engine``.

    Raises:
        ConfigError: Transformer Engine or FP8 is asked for and cannot run; or ``require``, and the
            backend asked for (on a GPU: the fast one) cannot.
    """
    if precision is not ExpertFp8.none:
        reason = (
            f"it needs model.experts.backend=transformer_engine, given {backend.name}"
            if backend is not ExpertBackend.transformer_engine
            else fp8.misfit(precision, device, dtype, widths)
        )
        if reason:
            raise ConfigError(
                f"model.experts.fp8={precision.name}: cannot run: {reason} (allowed none)"
            )
        return backend
    if backend is ExpertBackend.loop:
        return backend
    if backend is ExpertBackend.transformer_engine and device.type != "meta":
        if reason := engine.misfit(device, dtype):
            raise ConfigError(
                f"model.experts.backend=transformer_engine: cannot run: {reason} (allowed auto, "
                "grouped_mm, loop)"
            )
        return backend
    reason = fused.misfit(device, dtype, widths)
    if reason is None:
        return ExpertBackend.grouped_mm
    if require and (backend is ExpertBackend.grouped_mm or device.type == "cuda"):
        raise ConfigError(
            f"model.experts.backend={backend.name}: with model.experts.require=true grouped_mm "
            f"must run, and cannot: {reason} (allowed model.experts.backend=loop, or "
            "model.experts.require=false)"
        )
    return ExpertBackend.loop


def grouped_mlp(
    x: Tensor,
    counts: Tensor,
    scale: Tensor,
    fc1: Tensor,
    fc2: Tensor,
    *,
    beta: float | None,
    linear_beta: float | None,
    kernels: KernelOptions | None = None,
    backend: ExpertBackend = ExpertBackend.auto,
    precision: ExpertFp8 = ExpertFp8.none,
    require: bool = False,
) -> Tensor:
    """W2_e [ scale * SiTU_GLU(W1_e x) ] where expert e takes the next ``counts[e]`` rows.

    The weight of a row is applied before the second map instead of after it, which is the same up
    to rounding (the map is linear) and needs no second tensor of its output.

    Args:
        x: [M, L], rows of the same expert next to each other, in the order of experts.
        counts: integer [E] on the CPU or x's device, rows of each expert; adds up to M.
        scale: [M], the router's weight of each row, float32 or wider.
        fc1: [E, 2, F, L], gate and up.
        fc2: [E, L, F].
        beta: bound of the gate branch of SiTU-GLU; None: none.
        linear_beta: bound of its linear branch; None: none.
        kernels: backend of the activation; None takes the defaults.
        backend: which implementation of the matrix products.
        precision: of these products: that of the tensors, or FP8 by Transformer Engine.
        require: make a fallback of the backend an error.

    Returns:
        [M, L] in the dtype of ``x``. Experts without rows get gradients of zero.

    Raises:
        ValueError: shapes do not fit.
        ConfigError: FP8, or ``require``, and the backend asked for cannot run here.
    """
    experts, _, width, latent = fc1.shape
    if fc2.shape != (experts, latent, width) or x.shape[1:] != (latent,) or fc1.shape[1] != 2:
        raise ValueError(
            f"grouped_mlp: given x {tuple(x.shape)}, fc1 {tuple(fc1.shape)} and fc2 "
            f"{tuple(fc2.shape)}, allowed [M, L], [E, 2, F, L] and [E, L, F]"
        )
    if counts.shape != (experts,) or scale.shape != x.shape[:1]:
        raise ValueError(
            f"grouped_mlp: given counts {tuple(counts.shape)} and scale {tuple(scale.shape)}, "
            f"allowed ({experts},) and ({x.shape[0]},)"
        )
    chosen = resolve_backend(
        backend,
        x.device,
        dtype=x.dtype,
        widths=(latent, width),
        precision=precision,
        require=require,
    )
    # The kernels have no case without rows; the loop makes the zero gradients.
    if x.shape[0] == 0:
        chosen, precision = ExpertBackend.loop, ExpertFp8.none
    in_fp8 = precision is not ExpertFp8.none
    ends, sizes = torch.empty(0), []
    if chosen is ExpertBackend.grouped_mm:
        ends = counts.to(x.device, non_blocking=True).cumsum(0).to(torch.int32)
    else:
        sizes = counts.tolist()
    rows = sizes
    if in_fp8 and x.device.type != "meta":
        x, scale = fp8.pad(x, scale, rows)
        sizes = fp8.padded(rows)

    def linear(rows: Tensor, weight: Tensor) -> Tensor:
        if chosen is ExpertBackend.grouped_mm:
            return fused.fused_linear(rows, weight, ends)
        if x.device.type == "meta":
            return without_memory.loop_linear(rows, weight, fp8=in_fp8)
        if in_fp8:
            out: Tensor = fp8.Fp8Linear.apply(  # type: ignore[no-untyped-call]  # torch's
                rows, weight, sizes, precision
            )
        elif chosen is ExpertBackend.transformer_engine:
            product = engine.grouped_gemm()
            out = engine.EngineLinear.apply(  # type: ignore[no-untyped-call]  # torch's
                rows, weight, sizes, product
            )
        else:
            out = LoopLinear.apply(rows, weight, sizes)  # type: ignore[no-untyped-call]  # torch's
        return out

    kernels = kernels or KernelOptions()
    hidden = situ_glu(
        linear(x, fc1.flatten(1, 2)),
        beta=beta,
        linear_beta=linear_beta,
        scale=scale,
        backend=kernels.backend,
        require=kernels.require,
    )
    out = linear(hidden, fc2)
    return fp8.unpad(out, rows) if sizes != rows else out
