"""The mix over depth as one Triton kernel each way, with the norm of the sublayer that reads it.

A program takes whole tokens, in two walks over their channels that take all sources at once: the
first gives what is summed over channels, in one reduction for all sources; the second, which reads
from the cache, gives the result. All that norm and softmax need backward follows from
two sums a source:

    mix = sum_j weight_j v_j      p_j = <v_j, dout * norm>      q_j = <v_j, mix>
    |mix|^2 = sum_j weight_j q_j  <mix, dout * norm> = sum_j weight_j p_j

Kept for the backward pass are the sources and eight bytes a token and source; four more where a
second query mixes them too. Sums over tokens are
partial sums of a fixed number of programs: the same bits on every run.

Shapes: T tokens, N sources, each [T, D]. Internal precision is float32. Formulas: `dense`, kernels:
`triton_kernels`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_ext.ops.attn_res.gradients import GradientSum, gradient_sum
from megatron_ext.ops.attn_res.reference import BankMix
from megatron_ext.ops.attn_res.triton_kernels import _depth_mix_backward, _depth_mix_forward
from megatron_ext.ops.launch import launch_settings, rows_of


def depth_mix_triton(
    sources: Sequence[Tensor],
    query: Tensor,
    key_weight: Tensor,
    *,
    eps: float,
    norm_weight: Tensor | None = None,
) -> Tensor:
    """See `ops.attn_res.depth_mix`. First derivatives only."""
    out: Tensor = _DepthMix.apply(
        query, key_weight, norm_weight, None, None, None, None, _Form(eps), *sources
    )
    return out


def first_phase_triton(
    sources: Sequence[Tensor],
    query: Tensor,
    key_weight: Tensor,
    *,
    bank_query: Tensor,
    bank_key_weight: Tensor,
    bank_sources: int,
    eps: float,
    norm_weight: Tensor | None = None,
) -> tuple[Tensor, BankMix]:
    """See `two_phase.first_phase`."""
    form = _Form(eps, bank=bank_sources)
    mixed, *bank = _DepthMix.apply(
        query, key_weight, norm_weight, bank_query, bank_key_weight, None, None, form, *sources
    )
    return mixed, BankMix(*bank)


def second_phase_triton(
    bank: BankMix,
    running: Tensor,
    query: Tensor,
    key_weight: Tensor,
    *,
    eps: float,
    norm_weight: Tensor | None = None,
) -> Tensor:
    """See `two_phase.second_phase`."""
    mixed, log_sum, slot = bank
    out: Tensor = _DepthMix.apply(
        query, key_weight, norm_weight, None, None, log_sum, slot, _Form(eps), mixed, running
    )
    return out


class _Form(NamedTuple):
    eps: float
    bank: int = 0  # so many of the sources are mixed by the query of the bank too


def _settings(
    kernel: str, width: int, sources: int, *, bank: int = 0, merge: bool = False
) -> dict[str, int]:
    """No register spills; and where registers allow it, 16 warps run on a multiprocessor
    (`tests/kernels/compile_main.py` counts them)."""
    padded = max(8, triton.next_power_of_2(width))
    settings = dict(launch_settings(kernel, padded))
    backward = kernel == "depth_mix_backward"
    # A thread has some channels of every source: sums over sources stay inside of it. As many as
    # its registers hold.
    own = 8 if sources <= 8 else 4
    if bank or (merge and backward):
        own = 2 if backward and sources > 8 else 4
    # Too many registers for two programs at once: one, twice as wide.
    lone = (merge and backward) or (bank and sources > 8 and not backward)
    if lone and 128 * own * settings["num_warps"] <= padded:
        settings["num_warps"] *= 2
    block = min(padded, 32 * own * settings["num_warps"])
    return {"WIDTH": padded, "BLOCK": block, "OWN": own, **settings}


class _DepthMix(torch.autograd.Function):
    """The mix; with a bank also that of the bank, its score, and a slot for its gradient; with
    `log_sum` the second phase, whose first source is that mix and has that score.

    The mix of the bank has the dtype of the sources, and autograd would round its gradient to that.
    Hence the slot: float32, of the same shape without memory, and its gradient is that of the mix.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key_weight: Tensor,
        norm_weight: Tensor | None,
        bank_query: Tensor | None,
        bank_key_weight: Tensor | None,
        log_sum: Tensor | None,
        slot: Tensor | None,
        form: _Form,
        *sources: Tensor,
    ) -> Tensor | tuple[Tensor, ...]:
        rows = [rows_of(v).contiguous() for v in sources]
        (tokens, width), count = rows[0].shape, len(rows)
        out = torch.empty_like(rows[0])
        bank = torch.empty_like(out) if form.bank else out
        numbers = out.new_empty(3 if form.bank else 2, tokens, count, dtype=torch.float32)
        ctx.merge = log_sum is not None
        if log_sum is None:
            log_sum = numbers.new_empty(tokens if form.bank else 0)
        if out.numel():
            _depth_mix_forward[(tokens,)](
                tuple(rows),
                query,
                key_weight,
                query if norm_weight is None else norm_weight,
                query if bank_query is None else bank_query,
                query if bank_key_weight is None else bank_key_weight,
                out,
                bank,
                numbers[0],
                numbers[1],
                numbers[-1],
                log_sum.contiguous(),
                width,
                form.eps,
                N=count,
                PADDED=triton.next_power_of_2(count),
                BANK=form.bank,
                MERGE=ctx.merge,
                NORM=norm_weight is not None,
                **_settings("depth_mix_forward", width, count, bank=form.bank, merge=ctx.merge),
            )
        ctx.save_for_backward(
            query, key_weight, norm_weight, bank_query, bank_key_weight, numbers, *rows
        )
        ctx.form, ctx.shape = form, sources[0].shape
        ctx.sums = [gradient_sum(v) for v in sources]
        if not form.bank:
            return out.view(ctx.shape)
        bank = bank.view(ctx.shape)
        ctx.mark_non_differentiable(bank)
        slot = numbers.new_empty(1).expand(ctx.shape)
        return out.view(ctx.shape), bank, log_sum.view(ctx.shape[:-1]), slot

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key_weight, norm_weight, bank_query, bank_key, numbers, *rows = ctx.saved_tensors
        bank, merge, (tokens, width) = ctx.form.bank, ctx.merge, rows[0].shape
        grad = rows_of(grads[0]).contiguous()
        if merge:  # of the bank through the slot, in the kernel; what stands here is not written
            d_last, added = _gradients(rows[1:], ctx.sums[1:])
            d_rows, added = [rows[0], *d_last], added << 1
        else:
            d_rows, added = _gradients(rows, ctx.sums)
        d_log_sum = d_bank = numbers
        if bank:
            d_log_sum, d_bank = grads[2].contiguous(), rows_of(grads[3]).contiguous()
        elif merge:
            d_log_sum, d_bank = numbers.new_empty(tokens), numbers.new_empty(tokens, width)
        settings = _settings("depth_mix_backward", width, len(rows), bank=bank, merge=merge)
        programs = min(tokens, settings.pop("PROGRAMS"))
        # Of the query's key, of the norm, of the key of the bank.
        sums = numbers.new_empty(3 if bank else 2, programs, width)
        if programs:
            _depth_mix_backward[(programs,)](
                tuple(rows),
                tuple(d_rows),
                added,
                query,
                key_weight,
                query if norm_weight is None else norm_weight,
                query if bank_query is None else bank_query,
                query if bank_key is None else bank_key,
                grad,
                d_bank,
                numbers[0],
                numbers[1],
                numbers[-1],
                d_log_sum,
                sums[0],
                sums[1],
                sums[-1],
                tokens,
                triton.cdiv(tokens, programs),
                width,
                ctx.form.eps,
                N=len(rows),
                PADDED=triton.next_power_of_2(len(rows)),
                BANK=bank,
                MERGE=merge,
                NORM=norm_weight is not None,
                **settings,
            )
        along, *rest = sums.sum(1) if norm_weight is not None or bank else sums[:1].sum(1)
        return (
            (along * key_weight.float()).to(query.dtype),
            (along * query.float()).to(key_weight.dtype),
            None if norm_weight is None else rest[0].to(norm_weight.dtype),
            (rest[-1] * bank_key.float()).to(bank_query.dtype) if bank else None,
            (rest[-1] * bank_query.float()).to(bank_key.dtype) if bank else None,
            d_log_sum.view(ctx.shape[:-1]) if merge else None,
            d_bank.view(ctx.shape) if merge else None,
            None,
            *(
                d.view(ctx.shape) if sum_here is None and needed else None
                for d, sum_here, needed in zip(
                    d_rows, ctx.sums, ctx.needs_input_grad[8:], strict=True
                )
            ),
        )


def _gradients(
    rows: Sequence[Tensor], sums: Sequence[GradientSum | None]
) -> tuple[list[Tensor], int]:
    """Where the gradient of each source goes; and as bits, which are added to what is there."""
    found, added = [], 0
    for number, (row, sum_here) in enumerate(zip(rows, sums, strict=True)):
        total = None if sum_here is None else sum_here.total
        if total is None:
            total = torch.empty_like(row)
        else:
            added |= 1 << number
        if sum_here is not None:
            sum_here.total = total
        found.append(total)
    return found, added
