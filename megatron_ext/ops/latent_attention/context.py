"""Latent attention over a sequence whose consecutive parts lie on the ranks of a group.

The latents of all ranks are gathered, which is little: C + R numbers a token, not 2 H D. A rank's
queries then meet the keys and values of the causal prefix block by block, each expanded from the
latents when its turn comes, and the results are merged by their normalisers. Nothing of size
(length x heads) exists but queries and outputs; the backward pass gathers and expands once more,
and the gradients of the latents go back in one reduce-scatter.

Shapes: b batch, L tokens of a rank, E of them attending here, H heads of this rank, N and R widths
of the two key parts, V of a value, C of the compressed latent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_ext.ops.latent_attention.blocks import (
    Kernel,
    attend,
    attend_backward,
    choose_kernel,
)
from megatron_ext.ops.latent_attention.head_tail import HeadTail, Queries

BLOCK_BYTES = 1 << 28


@dataclass(frozen=True)
class LatentWidths:
    """Heads of this rank and widths: of the key from the latent, of the shared key, of a value."""

    heads: int
    nope: int
    shared: int
    value: int

    @property
    def key(self) -> int:
        """Width of a whole key."""
        return self.nope + self.shared


def block_for(widths: LatentWidths, *, batch: int, element_bytes: int) -> int:
    """Tokens whose keys and values take 256 MiB; at least 1."""
    token = batch * widths.heads * (widths.key + widths.value) * element_bytes
    return max(1, BLOCK_BYTES // token)


def context_latent_attention(
    q: Tensor,
    latent: Tensor,
    weight: Tensor,
    *,
    widths: LatentWidths,
    scale: float,
    before: int,
    group: dist.ProcessGroup,
    firsts: Sequence[tuple[int, int]] | None = None,
    block_tokens: int | None = None,
    kernel: Kernel | None = None,
) -> Tensor:
    """Causal attention of this rank's first E tokens, which belong to one document.

    Collective, and so is its backward pass, also with E = 0.

    Args:
        q: queries of the first E tokens of this rank [b, E, H, N + R].
        latent: compressed latent and shared key of all tokens of this rank [L, b, C + R]. L is the
            same on all ranks.
        weight: [H (N + V), C], makes [k_n | v] of each head from the compressed latent.
        widths: of keys and values.
        scale: factor on q k^T.
        before: tokens of that document on earlier ranks.
        group: ranks in the order of the sequence.
        firsts: (E, before) of every rank: queries are computed in head-tail order, see
            `head_tail`. None: each rank computes its own.
        block_tokens: tokens whose keys and values exist at once; None: as many as take 256 MiB.
        kernel: of a block; None: what suits device and dtype.

    Returns:
        [b, E, H, V] in the dtype of q. The gradient of ``weight`` is this rank's share: sum it over
        the group. That of ``latent`` is complete.
    """
    block = block_tokens or block_for(widths, batch=q.shape[0], element_bytes=latent.element_size())
    order = None if firsts is None else HeadTail(firsts, length=latent.shape[0], group=group)
    own = Queries(group.rank() * latent.shape[0], q.shape[1], before)
    out: Tensor = _ContextLatentAttention.apply(  # type: ignore[no-untyped-call]
        q, latent, weight, widths, scale, own, order, group, block, kernel or choose_kernel(q)
    )
    return out


@dataclass(frozen=True)
class _Part:
    """Queries [first, last) of those computed here against keys [start, stop) of the row."""

    first: int
    last: int
    start: int
    stop: int
    causal: bool


class _ContextLatentAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        latent: Tensor,
        weight: Tensor,
        widths: LatentWidths,
        scale: float,
        own: Queries,
        order: HeadTail | None,
        group: dist.ProcessGroup,
        block: int,
        kernel: Kernel,
    ) -> Tensor:
        everyone = _gather(latent, group)
        if order is not None:
            q = order.to_owners(q)
        computed = [own] if order is None else order.computed
        wide = torch.promote_types(q.dtype, torch.float32)
        batch, queries = q.shape[:2]
        merged = torch.zeros(*q.shape[:3], widths.value, dtype=wide, device=q.device)
        total = torch.full((batch, widths.heads, queries), -torch.inf, dtype=wide, device=q.device)
        for parts in _blocks(computed, size=block):
            rows = everyone[parts[0].start : parts[0].stop]
            k, v = _expand(rows, weight, widths)
            for part in parts:
                some = slice(part.first, part.last)
                o, lse = attend(q[:, some], k, v, scale=scale, causal=part.causal, kernel=kernel)
                _merge(merged[:, some], total[:, :, some], o, lse)
        out = merged.to(q.dtype)
        ctx.save_for_backward(q, latent, weight, out, total)
        ctx.options = (widths, scale, computed, order, group, block, kernel)
        return out if order is None else order.to_home(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, latent, weight, out, total = ctx.saved_tensors
        widths, scale, computed, order, group, block, kernel = ctx.options
        everyone = _gather(latent, group)
        d_o = grads[0].contiguous()
        if order is not None:
            d_o = order.to_owners(d_o)
        d_q = torch.zeros_like(q, dtype=total.dtype)
        d_weight = torch.zeros_like(weight, dtype=total.dtype)
        d_everyone = torch.zeros_like(everyone)
        for parts in _blocks(computed, size=block):
            keys = slice(parts[0].start, parts[0].stop)
            k, v = _expand(everyone[keys], weight, widths)
            d_k, d_v = (torch.zeros_like(x, dtype=total.dtype) for x in (k, v))
            for part in parts:
                some = slice(part.first, part.last)
                found = attend_backward(
                    d_o[:, some],
                    q[:, some],
                    k,
                    v,
                    out[:, some],
                    total[:, :, some],
                    scale=scale,
                    causal=part.causal,
                    kernel=kernel,
                )
                for target, value in zip((d_q[:, some], d_k, d_v), found, strict=True):
                    target += value
            _contract(everyone[keys], weight, widths, d_k, d_v, d_everyone[keys], d_weight)
        d_latent = torch.empty_like(latent)
        dist.reduce_scatter_tensor(d_latent, d_everyone, group=group)
        d_q = d_q.to(q.dtype)
        if order is not None:
            d_q = order.to_home(d_q)
        return d_q, d_latent, d_weight.to(weight.dtype), *(None,) * 7


def _gather(latent: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[L, b, C + R] of every rank, one after the other along the first axis."""
    everyone = latent.new_empty(group.size() * latent.shape[0], *latent.shape[1:])
    dist.all_gather_into_tensor(everyone, latent.contiguous(), group=group)
    return everyone


def _blocks(computed: Sequence[Queries], *, size: int) -> Iterator[list[_Part]]:
    """Blocks of keys, each with the queries that see it: all of some consecutive ones when it lies
    before them, else its own, causally, and those after it."""
    first = 0
    for queries in computed:
        last, place = first + queries.count, queries.place
        if queries.count:
            for start in range(place - queries.before, place, size):
                yield [_Part(first, last, start, min(place, start + size), causal=False)]
        for begin in range(first, last, size):
            end, start = min(last, begin + size), place + begin - first
            stop = start + end - begin
            parts = [_Part(begin, end, start, stop, causal=True)]
            if end < last:
                parts.append(_Part(end, last, start, stop, causal=False))
            yield parts
        first = last


def _expand(rows: Tensor, weight: Tensor, widths: LatentWidths) -> tuple[Tensor, Tensor]:
    """Keys [b, n, H, N + R] and values [b, n, H, V] of latents [n, b, C + R]."""
    compressed, shared = _split(rows, widths)
    both = torch.unflatten(compressed @ weight.t(), -1, (widths.heads, -1))
    key, value = torch.split(both, [widths.nope, widths.value], -1)
    key = torch.cat((key, shared.unsqueeze(2).expand(-1, -1, widths.heads, -1)), -1)
    return key, value


def _contract(
    rows: Tensor,
    weight: Tensor,
    widths: LatentWidths,
    d_k: Tensor,
    d_v: Tensor,
    d_rows: Tensor,
    d_weight: Tensor,
) -> None:
    """The backward pass of ``_expand``: adds to ``d_rows`` and ``d_weight``."""
    compressed, _ = _split(rows, widths)
    d_nope, d_shared = torch.split(d_k, [widths.nope, widths.shared], -1)
    d_both = torch.cat((d_nope, d_v), -1).flatten(2).to(weight.dtype)
    d_weight += d_both.flatten(0, 1).t() @ compressed.flatten(0, 1)
    d_compressed, d_key = _split(d_rows, widths)
    d_compressed += d_both @ weight
    d_key += d_shared.sum(2)


def _split(rows: Tensor, widths: LatentWidths) -> tuple[Tensor, Tensor]:
    """Compressed latents [b, n, C] and shared keys [b, n, R] of [n, b, C + R], as views."""
    compressed, shared = torch.split(
        rows.transpose(0, 1), [rows.shape[-1] - widths.shared, widths.shared], -1
    )
    return compressed, shared


def _merge(merged: Tensor, total: Tensor, o: Tensor, lse: Tensor) -> None:
    """Takes one more block into ``merged`` [b, m, H, V] and ``total`` [b, H, m], in place."""
    new = torch.logaddexp(total, lse)
    keep, add = ((x - new).exp().transpose(1, 2).unsqueeze(-1) for x in (total, lse))
    merged.mul_(keep).addcmul_(o.to(merged.dtype), add)
    total.copy_(new)
