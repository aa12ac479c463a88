"""From logits to experts and weights as one Triton kernel each way.

A program takes a token, whose scores stay in registers. The cut-off, the (k+1)-th largest, is found
by halving the interval of what it can be and counting the scores above: some ten counts for random
scores, at most 32, instead of k + 1 maxima. Floats are compared as integers in the same order,
which can be halved whatever their size. Kept for the backward pass are six bytes for each of a
token's k experts. Internal precision is float32.

Shapes: T tokens, E experts, k experts a token.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_ext.ops.launch import launch_settings, rows_of
from megatron_ext.ops.router.routing import Routing


@triton.jit
def _sigmoid(x):
    # Not `minimum`, which loses NaN; beyond, the inverse would be no normal number.
    d = 1.0 + tl.exp(tl.where(x < -87.0, 87.0, -x))
    # A quotient is quick to 2 units in the last place, and one step from there is exact to one. It
    # ends in a sum, which nothing is contracted with: what is stored is what is added to the bias.
    r = 1.0 / d
    return tl.fma(tl.fma(-d, r, 1.0), r, r)


@triton.jit
def _in_order(x):
    """int32 in the order of the float32, NaN before all. There is no negative zero: scores, which x
    are sums with, have none."""
    bits = tl.where(x == x, x, float("-inf")).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _route_forward(
    logits, bias, positions, valid, weights, map, scores, cutoff, expert, taken_scores,
    width, top_k, ranked, scaling, logits_row,
    PLACES: tl.constexpr, VALID: tl.constexpr, KEEP: tl.constexpr, FOURS: tl.constexpr,
    SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    logit = tl.load(logits + row * logits_row + column, mask=inside, other=0.0)
    score = _sigmoid(logit)
    tl.store(scores + row * width + column, score, mask=inside)
    key = _in_order(score + tl.load(bias + column, mask=inside, other=0.0))
    key = tl.where(inside, key, -2147483648)  # below minus infinity
    # The `ranked`-th largest lies in [low, high], and at least so many are not below low.
    low = tl.min(tl.where(inside, key, 2147483647))
    high = tl.max(key)
    while low < high:
        middle = (low | high) - ((low ^ high) >> 1)  # rounded up, without overflow
        found = tl.sum((key >= middle).to(tl.int32))
        high = tl.where(found < ranked, middle - 1, tl.where(found == ranked, middle, high))
        low = tl.where(found < ranked, low, middle)
    last = tl.min(tl.where(key >= low, key, 2147483647))
    taken = key > last
    above = tl.sum(taken.to(tl.int32))
    if above < top_k:
        # Some tie at the cut-off, and are dealt out in turn: see `select_top_k`.
        tied = key == last
        rank = tl.cumsum(tied.to(tl.int32)) - 1
        total = tl.sum(tied.to(tl.int32))
        position = tl.load(positions + row) if PLACES else row
        places = top_k - above
        start = ((position * places) % total).to(tl.int32)
        end = start + places
        taken = taken | (tied & (((rank >= start) & (rank < end)) | (rank < end - total)))
    if VALID:
        taken = taken & (tl.load(valid + row) != 0)
    # Not a choice: a score that is no number makes all weights of the token none.
    chosen = score * taken.to(tl.float32)
    inverse = scaling / (tl.sum(chosen) + 1e-20)
    tl.store(weights + row * width + column, chosen * inverse, mask=inside)
    # As four bytes at once a thread; with sixteen all else would be laid out for this.
    first = tl.multiple_of(row * width, 4) if FOURS else row * width
    tl.store(map + first + column, taken.to(tl.uint8), mask=inside)
    bits = last ^ ((last >> 31) & 0x7FFFFFFF)
    tl.store(cutoff + row, bits.to(tl.float32, bitcast=True))
    if KEEP:
        place = tl.cumsum(taken.to(tl.int32)) - 1
        tl.store(expert + row * top_k + place, column.to(tl.int16), mask=taken)
        # The few scores are read back rather than sorted out of all in registers.
        tl.debug_barrier()
        slot = tl.arange(0, SLOTS)
        there = slot < top_k
        if VALID:
            there = there & (tl.load(valid + row) != 0)
        own = tl.load(expert + row * top_k + slot, mask=there, other=0).to(tl.int32)
        few = tl.load(scores + row * width + own, mask=there, other=0.0)
        tl.store(taken_scores + row * top_k + slot, few, mask=there)


@triton.jit
def _route_backward(
    grad, expert, taken_scores, valid, d_logits, width, top_k, scaling, grad_row,
    VALID: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, SLOTS)
    there = slot < top_k
    if VALID:
        there = there & (tl.load(valid + row) != 0)
    column = tl.load(expert + row * top_k + slot, mask=there, other=0).to(tl.int32)
    score = tl.load(taken_scores + row * top_k + slot, mask=there, other=0.0)
    dy = tl.load(grad + row * grad_row + column, mask=there, other=0.0)
    inverse = 1.0 / (tl.sum(score) + 1e-20)
    # weight = scaling s / sum(s), and s' = s (1 - s)
    d_score = (dy - tl.sum(dy * score) * inverse) * (inverse * scaling)
    columns = tl.arange(0, BLOCK)
    nothing = tl.zeros([BLOCK], tl.float32)
    tl.store(d_logits + row * width + columns, nothing, mask=columns < width)
    tl.debug_barrier()  # other threads' zeros are written before these
    tl.store(d_logits + row * width + column, d_score * score * (1.0 - score), mask=there)


def route_tokens_triton(
    logits: Tensor,
    bias: Tensor,
    *,
    top_k: int,
    scaling: float,
    valid: Tensor | None,
    positions: Tensor | None,
) -> Routing:
    """See `ops.router.route_tokens`; logits and bias are float32. The scores have no gradient."""
    keep = torch.is_grad_enabled() and logits.requires_grad
    return Routing(*_Route.apply(logits, bias, top_k, scaling, valid, positions, keep))


def _bytes(mask: Tensor | None, *, instead: Tensor) -> Tensor:
    return instead if mask is None else mask.contiguous().view(torch.uint8)


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        bias: Tensor,
        top_k: int,
        scaling: float,
        valid: Tensor | None,
        positions: Tensor | None,
        keep: bool,
    ) -> tuple[Tensor, ...]:
        x = rows_of(logits)
        tokens, width = x.shape
        kept = tokens if keep else 0
        weights, scores = (x.new_empty(tokens, width) for _ in range(2))
        map = torch.empty(tokens, width, dtype=torch.bool, device=x.device)
        cutoff = x.new_empty(tokens)
        expert = torch.empty(kept, top_k, dtype=torch.int16, device=x.device)
        taken_scores = x.new_empty(kept, top_k)
        if tokens:
            _route_forward[(tokens,)](
                x,
                bias.contiguous(),
                cutoff if positions is None else positions.contiguous(),
                _bytes(valid, instead=cutoff),
                weights,
                map.view(torch.uint8),
                scores,
                cutoff,
                expert,
                taken_scores,
                width,
                top_k,
                min(top_k + 1, width),
                scaling,
                x.stride(0),
                PLACES=positions is not None,
                VALID=valid is not None,
                KEEP=keep,
                FOURS=width % 4 == 0,
                SLOTS=triton.next_power_of_2(top_k),
                BLOCK=triton.next_power_of_2(width),
                **launch_settings("route_forward", width),
            )
        ctx.save_for_backward(expert, taken_scores, valid)
        ctx.width, ctx.top_k, ctx.scaling = width, top_k, scaling
        ctx.mark_non_differentiable(map, scores, cutoff)
        ctx.set_materialize_grads(False)  # the others' would be zeros of full size
        return weights, map, scores, cutoff

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        nothing = (None,) * 6
        if grads[0] is None:
            return None, *nothing
        expert, taken_scores, valid = ctx.saved_tensors
        grad = rows_of(grads[0])
        tokens, width = grad.shape
        d_logits = grad.new_empty(tokens, width)
        if tokens:
            _route_backward[(tokens,)](
                grad,
                expert,
                taken_scores,
                _bytes(valid, instead=taken_scores),
                d_logits,
                width,
                ctx.top_k,
                ctx.scaling,
                grad.stride(0),
                VALID=valid is not None,
                SLOTS=triton.next_power_of_2(ctx.top_k),
                BLOCK=triton.next_power_of_2(width),
                **launch_settings("route_backward", width),
            )
        return d_logits, *nothing
