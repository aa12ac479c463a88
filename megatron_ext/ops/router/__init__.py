"""The router: its matrix product in a precision of its own, and from logits to experts."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from megatron_ext.config.schema import KernelBackend, KernelOptions, RouterMatmul
from megatron_ext.ops import without_memory
from megatron_ext.ops.backend import (
    choose_backend,
    planned,
    rejection,
    rejection_exact,
    triton_misfit,
)
from megatron_ext.ops.quantile import select_top_k
from megatron_ext.ops.router.dense import RouterMatmulFunction
from megatron_ext.ops.router.reference import router_logits_reference
from megatron_ext.ops.router.routing import Routing, route_tokens_dense, weights_of

__all__ = [
    "Routing",
    "resolve_backend",
    "route_tokens",
    "router_logits",
    "router_logits_reference",
    "weights_of",
]

# The kernel has all scores of a token in registers.
MAX_EXPERTS = 1024
CHECKED_TOKENS = 37


def router_logits(x: Tensor, weight: Tensor, *, precision: RouterMatmul) -> Tensor:
    """``x weight^T`` with products and sums in the chosen precision, forward and backward.

    Args:
        x: [T, h], any floating dtype.
        weight: [E, h], any floating dtype.
        precision: ``fp32``: true float32, also where the run allows TensorFloat-32. ``tf32``:
            operands cut to 10 bits of mantissa on GPUs that can. ``bf16``: operands cut to 7 bits.
            ``auto``: ``bf16`` where x and weight are bfloat16, so that only the gradient of the
            logits is cut; else ``fp32``. Sums are float32 in all of them.

    Returns:
        [T, E] float32, or float64 for float64 input, which is never cut.

    Raises:
        ValueError: shapes do not fit.
    """
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"router_logits: given x {tuple(x.shape)} and weight {tuple(weight.shape)}, allowed "
            "[T, h] and [E, h]"
        )
    out: Tensor = RouterMatmulFunction.apply(x, weight, precision)  # type: ignore[no-untyped-call]
    return out


def route_tokens(
    logits: Tensor,
    bias: Tensor,
    *,
    top_k: int,
    scaling: float,
    valid: Tensor | None = None,
    positions: Tensor | None = None,
    kernels: KernelOptions | None = None,
) -> Routing:
    """The experts with the largest biased scores, and their weights from the unbiased ones.

        score = sigmoid(logit);  weight = scaling * score / (sum of the taken scores + 1e-20)

    First derivatives only, of the weights; the map is `select_top_k`'s, given the scores that are
    returned.

    Args:
        logits: float32 or wider [T, E].
        bias: float32 [E].
        top_k: k, 1 to E.
        scaling: the sum of a token's weights.
        valid: bool [T], False for padding, which takes no expert; None: no padding.
        positions: int64 [T], by which ties are dealt out; see `select_top_k`.
        kernels: backend; None takes the defaults.

    Raises:
        ConfigError: ``kernels.require``, and the backend asked for cannot run here.
    """
    options, experts = kernels or KernelOptions(), logits.shape[1]
    if planned(logits, options.backend) and experts <= MAX_EXPERTS:
        return Routing(*without_memory.route(logits, top_k))
    chosen = resolve_backend(
        options.backend, logits.device, logits.dtype, experts=experts, require=options.require
    )
    if chosen is KernelBackend.triton:
        from megatron_ext.ops.router.triton import route_tokens_triton as run
    else:
        run = route_tokens_dense
    return run(logits, bias, top_k=top_k, scaling=scaling, valid=valid, positions=positions)


@cache
def resolve_backend(
    backend: KernelBackend,
    device: torch.device,
    dtype: torch.dtype,
    *,
    experts: int,
    require: bool = False,
) -> KernelBackend:
    """The backend of `route_tokens` that will run; never ``auto``. See `ops.backend`."""
    misfit = triton_misfit(device, dtype)
    if misfit is None and experts > MAX_EXPERTS:
        misfit = f"it takes at most {MAX_EXPERTS} experts, given {experts}"
    if misfit is None and dtype is not torch.float32:
        misfit = f"it takes float32 logits, given {dtype}"
    return choose_backend(
        backend,
        operator="route_tokens",
        device=device,
        misfit=misfit,
        check=lambda: _rejection(device, experts),
        require=require,
    )


@cache
def _rejection(device: torch.device, experts: int) -> str | None:
    """The weights and their gradient, and the map bit for bit where scores tie."""
    from megatron_ext.ops.router.triton import route_tokens_triton

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(CHECKED_TOKENS, experts, generator=generator).to(device)
    bias = (0.1 * torch.randn(experts, generator=generator)).to(device)
    top_k = (experts + 2) // 3

    def run(logits: Tensor, bias: Tensor) -> Routing:
        return route_tokens_triton(
            logits, bias, top_k=top_k, scaling=2.0, valid=None, positions=None
        )

    def slow(wide: Tensor) -> Tensor:
        # The same choice: at a near tie float64 may choose otherwise.
        return weights_of(torch.sigmoid(wide), run(wide.float(), bias).map, scaling=2.0)

    def choice(logits: Tensor) -> Tensor:
        found = run(logits, bias)
        return torch.cat([found.map, found.cutoff.unsqueeze(1)], 1)

    def slow_choice(logits: Tensor) -> Tensor:
        map, cutoff = select_top_k(run(logits, bias).scores + bias, top_k)
        return torch.cat([map, cutoff.unsqueeze(1)], 1)

    found = rejection(
        "route_tokens",
        fast=lambda logits: run(logits, bias).weights,
        slow=slow,
        inputs=[logits],
    )
    if found is None:
        few = (2 * logits).round() / 2  # scores that tie
        bias = 0 * bias
        found = rejection_exact("route_tokens", fast=choice, slow=slow_choice, inputs=[few])
    return found
