"""Grouped matrix product in FP8 by Transformer Engine: forward and both gradients.

The recipes keep no state between calls. `current`: one scale for all rows of a call and one for
each expert's weight, from their largest magnitudes; E4M3 forward, E5M2 for gradients (Micikevicius
et al., "FP8 formats for deep learning", 2022). `blockwise`: one scale for 1 x 128 numbers of rows
and gradients and 128 x 128 of weights, powers of two, E4M3 throughout (DeepSeek-V3 report, section
3.3). Products are summed in float32 and come out in bfloat16.

FP8 products on Hopper read both matrices along the inner axis, so every matrix has a second,
transposed form for the gradients. Rows keep that form alone, a byte a number where bfloat16 keeps
two; weights are quantised again in the backward pass, since theirs would be a byte a weight and
micro-batch in flight.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_ext.config.architecture import FP8_ALIGNMENT
from megatron_ext.config.schema import ExpertFp8
from megatron_ext.ops.grouped_mlp import engine

LARGEST = {"E4M3": 448.0, "E5M2": 57344.0}
SMALLEST = 1e-30  # of a largest magnitude: what is all zeros has a finite scale too


@dataclass(frozen=True)
class Library:
    """What is used of Transformer Engine."""

    pytorch: Any  # transformer_engine.pytorch
    kernels: Any  # transformer_engine_torch, its compiled part
    product: Any  # general_grouped_gemm


def library() -> Library:
    """Import it."""
    pytorch = importlib.import_module("transformer_engine.pytorch")
    kernels = importlib.import_module("transformer_engine_torch")
    return Library(pytorch, kernels, engine.grouped_gemm())


NEEDED = (
    "Float8Quantizer",
    "Float8BlockQuantizer",
    "Fp8Padding",
    "Fp8Unpadding",
    "prepare_for_saving",
    "restore_from_saved",
)


def misfit(
    recipe: ExpertFp8, device: torch.device, dtype: torch.dtype, widths: Iterable[int]
) -> str | None:
    """Why the products cannot be in FP8; None if they can. Plans (device meta) ask widths only."""
    if dtype is not torch.bfloat16:
        return f"it takes bfloat16 only, not {dtype}"
    widths = tuple(widths)
    if any(width % FP8_ALIGNMENT for width in widths):
        return (
            f"widths must be multiples of {FP8_ALIGNMENT}, they are {', '.join(map(str, widths))}"
        )
    if device.type == "meta":
        return None
    if reason := engine.misfit(device, dtype):
        return reason
    major, minor = torch.cuda.get_device_capability(device)
    if major < 9:
        return f"it needs Hopper or newer (compute capability 9.0), this GPU has {major}.{minor}"
    if recipe is ExpertFp8.blockwise and major > 9:
        return f"blockwise needs Hopper (9.0), this GPU has {major}.{minor}; current runs on it"
    used = library()
    missing = [name for name in NEEDED if not hasattr(used.pytorch, name)]
    if not hasattr(used.kernels, "split_quantize"):
        missing.append("split_quantize")
    return f"this Transformer Engine has no {', '.join(missing)}" if missing else None


def padded(sizes: list[int]) -> list[int]:
    """Rows of each group with its rows of zeros: inner axes of the weights' gradients."""
    return [-(-size // FP8_ALIGNMENT) * FP8_ALIGNMENT for size in sizes]


def pad(x: Tensor, scale: Tensor, sizes: list[int]) -> tuple[Tensor, Tensor]:
    """Rows of zeros at the end of every group of x [M, K] and scale [M], up to `padded(sizes)`."""
    wider = padded(sizes)
    if wider == sizes:
        return x, scale
    given, made = _with_rows(sizes), _with_rows(wider)
    rows, found = library().pytorch.Fp8Padding(len(given), FP8_ALIGNMENT)(x.contiguous(), given)
    if found != made:
        raise RuntimeError(f"Transformer Engine padded {given} to {found}, expected {made}")
    shifts = torch.tensor([0, *(b - a for a, b in zip(given, made, strict=True))][:-1]).cumsum(0)
    places = torch.arange(len(x)) + shifts.repeat_interleave(torch.tensor(given))
    places = places.to(x.device, non_blocking=True)
    return rows, scale.new_zeros(sum(made)).index_copy(0, places, scale)


def unpad(x: Tensor, sizes: list[int]) -> Tensor:
    """Without the rows that `pad` added."""
    if padded(sizes) == sizes:
        return x
    given = _with_rows(sizes)
    out: Tensor = library().pytorch.Fp8Unpadding(len(given), FP8_ALIGNMENT)(x.contiguous(), given)
    return out


def _with_rows(sizes: list[int]) -> list[int]:
    return [size for size in sizes if size]


class Fp8Linear(torch.autograd.Function):
    """x [M, K], weight [E, N, K], bfloat16, to [M, N]; group e is the next ``sizes[e]`` rows.

    M is not 0, sizes, K and N are multiples of 16. Experts without rows get zeros.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, sizes: list[int], recipe: ExpertFp8) -> Tensor:
        used, given = library(), _with_rows(sizes)
        kept = ctx.needs_input_grad[1]
        rows = _quantised_rows(used, x.contiguous(), given, recipe, gradient=False, kept=kept)
        weights = _quantised_weights(used, weight, sizes, recipe, transposed=False)
        out = x.new_empty(x.shape[0], weight.shape[1])
        used.product(
            weights,
            rows,
            [out],
            quantization_params=[None] * len(given),
            out_dtype=out.dtype,
            layout="TN",
            m_splits=given,
            single_output=True,
            # `current` adds up in the tensor cores' own precision, as its recipe has it forward.
            use_split_accumulator=recipe is ExpertFp8.blockwise,
        )
        tensors: list[Tensor | None] = []
        if kept:
            for group in rows:
                group.update_usage(rowwise_usage=False, columnwise_usage=True)
            tensors, ctx.rows = used.pytorch.prepare_for_saving(*rows)
        ctx.save_for_backward(weight, *tensors)
        ctx.sizes, ctx.recipe, ctx.shape = sizes, recipe, x.shape
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        used, given = library(), _with_rows(ctx.sizes)
        weight, *tensors = ctx.saved_tensors
        for_x, for_weight = ctx.needs_input_grad[:2]
        grad = _quantised_rows(
            used, grads[0].contiguous(), given, ctx.recipe, gradient=True, kept=for_weight
        )
        options = {
            "quantization_params": [None] * len(given),
            "out_dtype": weight.dtype,
            "m_splits": given,
            "grad": True,
            "use_split_accumulator": True,
        }
        d_x = d_weight = None
        if for_x:
            d_x = weight.new_empty(ctx.shape)
            weights = _quantised_weights(used, weight, ctx.sizes, ctx.recipe, transposed=True)
            used.product(weights, grad, [d_x], layout="NN", single_output=True, **options)
            del weights
        if for_weight:
            d_weight = torch.empty_like(weight)
            rows = used.pytorch.restore_from_saved(ctx.rows, tensors)
            targets = [d_weight[e] for e, size in enumerate(ctx.sizes) if size]
            used.product(rows, grad, targets, layout="NT", **options)
            used.pytorch.prepare_for_saving(*rows)  # the node outlives its tensors
            for expert, size in enumerate(ctx.sizes):
                if not size:
                    d_weight[expert].zero_()
        return d_x, d_weight, None, None


def _scaled(used: Library, largest: Tensor, form: str) -> list[Any]:
    """For each of the numbers [n] a quantiser to `form` that takes it to the largest number there.

    A tensor that is not finite gives what is not finite: the health checks see it.
    """
    scales = LARGEST[form] / largest.float().clamp(min=SMALLEST)
    return [
        used.pytorch.Float8Quantizer(
            scale=scale,
            amax=unused,
            fp8_dtype=_form(used, form),
            rowwise=True,
            columnwise=True,  # both come from one kernel for all groups
        )
        for scale, unused in zip(
            torch.split(scales, 1), torch.split(torch.zeros_like(scales), 1), strict=True
        )
    ]


def _form(used: Library, form: str) -> Any:
    return getattr(used.kernels.DType, f"kFloat8{form}")


def _quantised_rows(
    used: Library, x: Tensor, sizes: list[int], recipe: ExpertFp8, *, gradient: bool, kept: bool
) -> list[Any]:
    """Rows of each group, and if `kept` transposed too."""
    if recipe is ExpertFp8.current:
        largest = torch.linalg.vector_norm(x, ord=float("inf")).view(1)
        (quantiser,) = _scaled(used, largest, "E5M2" if gradient else "E4M3")
    else:
        quantiser = _by_blocks(used, dims=1, transposed=kept)
    return _split(used, x, sizes, [quantiser] * len(sizes))


def _quantised_weights(
    used: Library, weight: Tensor, sizes: list[int], recipe: ExpertFp8, *, transposed: bool
) -> list[Any]:
    """The weight of each expert that has rows."""
    experts, width, _ = weight.shape
    if recipe is ExpertFp8.current:
        largest = torch.linalg.vector_norm(weight, ord=float("inf"), dim=(1, 2))
        quantisers = _scaled(used, largest, "E4M3")
    else:
        quantisers = [_by_blocks(used, dims=2, transposed=transposed)] * experts
    found = _split(used, weight.detach().flatten(0, 1), [width] * experts, quantisers)
    return [one for one, size in zip(found, sizes, strict=True) if size]


def _by_blocks(used: Library, *, dims: int, transposed: bool) -> Any:
    return used.pytorch.Float8BlockQuantizer(
        fp8_dtype=_form(used, "E4M3"),
        rowwise=True,
        columnwise=transposed,
        block_scaling_dim=dims,
    )


def _split(used: Library, x: Tensor, sizes: list[int], quantisers: list[Any]) -> list[Any]:
    for quantiser in quantisers:
        quantiser.internal = True  # plain storage, without a tensor's overhead
        quantiser.optimize_for_gemm = True
    return list(used.kernels.split_quantize(x, sizes, quantisers))
