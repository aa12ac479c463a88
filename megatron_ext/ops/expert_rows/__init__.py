"""Rows of tokens in the order of experts, and their sums back at the tokens.

Shapes: T tokens, E experts, M rows (taken places), L width.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_ext.config.schema import KernelBackend, KernelOptions
from megatron_ext.ops.backend import planned, rejection, resolver

CHECKED_TOKENS, CHECKED_EXPERTS = 37, 5


@dataclass(frozen=True)
class ExpertRows:
    """Which rows belong to which tokens.

    Attributes:
        token: int64 [M], the token of each row; rows are sorted by expert, then by token.
        expert: int64 [M], its expert.
        order: int64 [M], rows sorted by token, then by expert.
        starts: int64 [T + 1], where each token's rows begin in `order`.
    """

    token: Tensor
    expert: Tensor
    order: Tensor
    starts: Tensor


def expert_rows(chosen: Tensor, *, rows: int) -> ExpertRows:
    """The rows of a routing map. Waits for no device.

    Args:
        chosen: bool [T, E].
        rows: how many places are True: M.
    """
    expert, token = torch.nonzero_static(chosen.T, size=rows).unbind(1)
    starts = torch.nn.functional.pad(chosen.sum(1).cumsum(0), (1, 0))
    return ExpertRows(token, expert, torch.argsort(token, stable=True), starts)


def take_rows(x: Tensor, rows: ExpertRows, *, kernels: KernelOptions | None = None) -> Tensor:
    """``x[token]``: [T, L] to [M, L]; gradients are summed as in `sum_rows`."""
    taken: Tensor = _TakeRows.apply(x, rows, _fast(x, kernels))  # type: ignore[no-untyped-call]  # torch's
    return taken


def sum_rows(x: Tensor, rows: ExpertRows, *, kernels: KernelOptions | None = None) -> Tensor:
    """The sum of each token's rows: [M, L] to [T, L].

    The sum is in float32 (float64 for float64), in the order of experts by our kernel and on a CPU,
    and rounded once to x's dtype. megatron-core's sum of 16-bit rows is rounded after every expert.
    """
    total: Tensor = _SumRows.apply(x, rows, _fast(x, kernels))  # type: ignore[no-untyped-call]  # torch's
    return total


def order_by_expert(counts: Tensor, *, rows: int) -> tuple[Tensor, Tensor]:
    """How rows that lie by rank, and of a rank by expert, come to lie by expert, and by rank there.

    Args:
        counts: integer [R, E], rows of each rank for each expert.
        rows: their sum; a number on the host, so that no device is waited for.

    Returns:
        int64 [rows] each: of every row of the new order its place in the old one, and the reverse.
    """
    ranks, experts = counts.shape
    expert = torch.arange(experts, device=counts.device).repeat(ranks)
    expert = expert.repeat_interleave(counts.flatten(), output_size=rows)
    order = torch.argsort(expert, stable=True)
    back = torch.empty_like(order)
    return order, back.scatter_(0, order, torch.arange(rows, device=order.device))


def reorder(x: Tensor, order: Tensor, back: Tensor) -> Tensor:
    """``x[order]`` of a permutation and its inverse, both int64 [M]; of x [M, ...]."""
    out: Tensor = _Reorder.apply(x, order, back)  # type: ignore[no-untyped-call]  # torch's
    return out


def _fast(x: Tensor, kernels: KernelOptions | None) -> bool:
    options = kernels or KernelOptions()
    if planned(x, options.backend):
        return True
    chosen = resolve_backend(options.backend, x.device, x.dtype, require=options.require)
    return chosen is KernelBackend.triton


def _total(x: Tensor, rows: ExpertRows, *, fast: bool) -> Tensor:
    if fast and x.device.type == "meta":  # what the kernel allocates, for plans
        return x.new_empty(rows.starts.numel() - 1, x.shape[1])
    if fast:
        from megatron_ext.ops.expert_rows.triton import sum_rows_triton

        return sum_rows_triton(x, rows.order, rows.starts)
    wide = torch.promote_types(x.dtype, torch.float32)
    total = x.new_zeros(rows.starts.numel() - 1, x.shape[1], dtype=wide)
    return total.index_add_(0, rows.token, x.to(wide)).to(x.dtype)


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: ExpertRows, fast: bool) -> Tensor:
        ctx.rows, ctx.fast = rows, fast
        return x.index_select(0, rows.token)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _total(grads[0], ctx.rows, fast=ctx.fast), None, None


class _SumRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: ExpertRows, fast: bool) -> Tensor:
        ctx.rows = rows
        return _total(x, rows, fast=fast)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].index_select(0, ctx.rows.token), None, None


class _Reorder(torch.autograd.Function):
    """The gradient of a permutation is its inverse: a copy, where torch would add."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(order, back)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        order, back = ctx.saved_tensors
        return reorder(grads[0], back, order), None, None


@cache
def _rejection(device: torch.device, dtype: torch.dtype) -> str | None:
    generator = torch.Generator().manual_seed(0)
    chosen = torch.rand(CHECKED_TOKENS, CHECKED_EXPERTS, generator=generator) < 0.5
    rows = expert_rows(chosen.to(device), rows=int(chosen.sum()))
    x = torch.randn(CHECKED_TOKENS, 300, generator=generator)

    def there_and_back(x: Tensor, fast: bool) -> Tensor:
        taken = _TakeRows.apply(x, rows, fast)  # type: ignore[no-untyped-call]  # torch's
        total: Tensor = _SumRows.apply(taken * taken, rows, fast)  # type: ignore[no-untyped-call]  # torch's
        return total

    return rejection(
        "expert_rows",
        fast=lambda x: there_and_back(x, True),
        slow=lambda x: there_and_back(x, False),
        inputs=[x.to(device, dtype)],
    )


resolve_backend = resolver("expert_rows", _rejection)
