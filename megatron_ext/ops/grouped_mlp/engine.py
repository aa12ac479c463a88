"""Grouped matrix product by Transformer Engine: one call for all groups, on GPUs in bfloat16.

Its `general_grouped_gemm` takes one matrix a group, as lists: views of our stacked tensors. Nothing
of it is imported before it is asked for.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# What our calls name; older versions took workspaces of the caller instead.
NEEDED = {"quantization_params", "layout", "m_splits", "grad", "single_output"}


def misfit(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the kernel cannot take such tensors; None if it can."""
    if importlib.util.find_spec("transformer_engine") is None:
        return "Transformer Engine is not installed (pip install 'megatron-ext[gpu]')"
    if device.type != "cuda":
        return f"it needs a CUDA device, the tensors are on {device.type}"
    if dtype is not torch.bfloat16:
        return f"it takes bfloat16 only, not {dtype}"
    missing = NEEDED - {*inspect.signature(grouped_gemm()).parameters}
    if missing:
        return f"this Transformer Engine's general_grouped_gemm has no {', '.join(sorted(missing))}"
    return None


def grouped_gemm() -> Callable[..., Any]:
    """Transformer Engine's function. Of row-major matrices it makes op(B) op(A) for each group:

    layout TN: out [M, N] = B [M, K] A [N, K]^T; NN: out [M, K] = B [M, N] A [N, K];
    NT: out [N, K] = B [M, N]^T A [M, K].
    """
    module = importlib.import_module("transformer_engine.pytorch.cpp_extensions")
    found: Callable[..., Any] = module.general_grouped_gemm
    return found


class EngineLinear(torch.autograd.Function):
    """x [M, K], weight [E, N, K] to [M, N]; group e is the next ``sizes[e]`` rows. M is not 0.

    Experts without rows get zeros, as in `loop.LoopLinear`.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, sizes: list[int], product: Callable[..., Any]
    ) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.sizes, ctx.product = sizes, product
        out = x.new_empty(x.shape[0], weight.shape[1])
        product(
            list(weight.unbind()),
            list(torch.split(x, sizes)),
            [out],
            quantization_params=[None] * len(sizes),
            out_dtype=out.dtype,
            layout="TN",
            m_splits=sizes,
            single_output=True,
        )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad, sizes = grads[0].contiguous(), ctx.sizes
        options = {
            "quantization_params": [None] * len(sizes),
            "out_dtype": x.dtype,
            "m_splits": sizes,
            "grad": True,
        }
        d_x = d_weight = None
        if ctx.needs_input_grad[0]:
            d_x = torch.empty_like(x)
            ctx.product(
                list(weight.unbind()),
                list(torch.split(grad, sizes)),
                [d_x],
                layout="NN",
                single_output=True,
                **options,
            )
        if ctx.needs_input_grad[1]:
            d_weight = torch.empty_like(weight)
            ctx.product(
                list(torch.split(x, sizes)),
                list(torch.split(grad, sizes)),
                list(d_weight.unbind()),
                layout="NT",
                **options,
            )
            for expert, size in enumerate(sizes):
                if not size:  # a product over no rows: not left to the library
                    d_weight[expert].zero_()
        return d_x, d_weight, None, None
