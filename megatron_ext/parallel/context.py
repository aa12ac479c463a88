"""Context parallelism: the part of a sequence that a rank holds, and what it takes from others.

The ranks of a context group hold consecutive parts of equal length, the first rank the first part.
Linear attention needs them in order and softmax attention can have them so; what little they say to
each other is here and, for states and latents, in the operators.

Shapes: s tokens of the whole row, L = s / ranks tokens of a rank, b batch, C channels, H heads.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_ext.parallel.runtime import to_device


@dataclass(frozen=True)
class Span:
    """The documents on one part of a row: a rank's, or a segment of it.

    Attributes:
        before: tokens of the first document that lie before the part; 0: it begins here.
        first_end: where the first document ends in the part, if it began earlier; else 0.
        cu_seqlens: bounds of documents within the part, int32 [n + 1], 0 first and L last, none of
            them empty; None without documents.
        longest: tokens of the longest document within the part.
        ended: the last document, or the row, ends with the part.
    """

    before: int
    first_end: int
    cu_seqlens: Tensor | None
    longest: int
    ended: bool

    @property
    def continued(self) -> bool:
        """Whether the first document began before the part."""
        return self.before > 0


@dataclass
class ContextDocuments(PackedSeqParams):
    """megatron-core's description of packed documents (`cu_seqlens_q`: of the whole row) with the
    part of one rank and its segments, worked out once for all layers.

    Attributes:
        bounds: of the documents of the row, on the host.
        span: of this rank.
        segments: of this rank's part, by their size; filled by `segment_spans`.
        firsts: of every rank; filled by `first_documents`.
    """

    bounds: tuple[int, ...] = ()
    span: Span | None = None
    segments: dict[int, list[Span]] = field(default_factory=dict)
    firsts: list[tuple[int, int]] = field(default_factory=list)


def part_of(bounds: Sequence[int], *, start: int, end: int) -> tuple[list[int], int]:
    """Bounds of documents within a part of a row, and how much of the first one lies before it.

    Args:
        bounds: of the documents of the row, 0 first, rising; empty documents are passed over.
        start, end: first token of the part, and the one after its last.
    """
    begin = max(bound for bound in bounds if bound <= start)
    inside = sorted({bound - start for bound in bounds if start < bound < end})
    return [0, *inside, end - start], start - begin


def pack_documents(bounds: Tensor, *, group: dist.ProcessGroup) -> ContextDocuments:
    """Describes isolated documents to the layers of one rank.

    Args:
        bounds: int32 [n + 1] on the host, of the documents of the whole row.
        group: context parallel ranks.
    """
    cu_seqlens = bounds.to(torch.cuda.current_device(), non_blocking=True)
    longest = int((bounds[1:] - bounds[:-1]).max())
    on_host = tuple(bounds.tolist())
    return ContextDocuments(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        bounds=on_host,
        span=_rank_span(on_host, group, cu_seqlens.device),
    )


def span_of(packed: PackedSeqParams | None, *, tokens: int, group: dist.ProcessGroup) -> Span:
    """What a layer has to know about its rank's part.

    Args:
        packed: documents of the row; None: every sequence is one. Made by others than
            `pack_documents` its bounds are read back from the device, at every layer.
        tokens: L.
        group: context parallel ranks.
    """
    if packed is None:
        before = group.rank() * tokens
        last = group.rank() == group.size() - 1
        return Span(before, tokens if before else 0, None, tokens, ended=last)
    if isinstance(packed, ContextDocuments) and packed.span is not None:
        return packed.span
    return _rank_span(packed.cu_seqlens_q.tolist(), group, packed.cu_seqlens_q.device)


def segment_spans(
    packed: PackedSeqParams | None, *, tokens: int, size: int, group: dist.ProcessGroup | None
) -> list[Span]:
    """The spans of consecutive segments of a rank's part.

    Args:
        packed, tokens: as for `span_of`.
        size: tokens of a segment; the last one may be shorter.
        group: context parallel ranks; None: this rank has the whole row.
    """
    first = 0 if group is None else group.rank() * tokens
    starts = range(first, first + tokens, size)
    ends = [min(start + size, first + tokens) for start in starts]
    if packed is None:
        whole = tokens if group is None else tokens * group.size()
        return [
            Span(start, end - start if start else 0, None, end - start, ended=end == whole)
            for start, end in zip(starts, ends, strict=True)
        ]
    known = packed.segments if isinstance(packed, ContextDocuments) else {}
    if size not in known:
        bounds = packed.bounds if isinstance(packed, ContextDocuments) else ()
        bounds = bounds or tuple(packed.cu_seqlens_q.tolist())
        known[size] = [
            _span(bounds, start=start, end=end, device=packed.cu_seqlens_q.device)
            for start, end in zip(starts, ends, strict=True)
        ]
    return known[size]


def first_documents(
    packed: PackedSeqParams | None, *, tokens: int, group: dist.ProcessGroup
) -> list[tuple[int, int]]:
    """Of the first document on every rank's part: its tokens there, and those on earlier ranks.

    Args: as `span_of`.
    """
    starts = [rank * tokens for rank in range(group.size())]
    if packed is None:
        return [(tokens, start) for start in starts]
    known = packed.firsts if isinstance(packed, ContextDocuments) else []
    if not known:
        bounds = packed.bounds if isinstance(packed, ContextDocuments) else ()
        bounds = bounds or tuple(packed.cu_seqlens_q.tolist())
        for start in starts:
            local, before = part_of(bounds, start=start, end=start + tokens)
            known.append((local[1], before))
    return known


def _rank_span(bounds: Sequence[int], group: dist.ProcessGroup, device: torch.device) -> Span:
    length = bounds[-1] // group.size()
    start = group.rank() * length
    return _span(bounds, start=start, end=start + length, device=device)


def _span(bounds: Sequence[int], *, start: int, end: int, device: torch.device) -> Span:
    local, before = part_of(bounds, start=start, end=end)
    return Span(
        before=before,
        first_end=local[1] if before else 0,
        cu_seqlens=to_device(torch.tensor(local, dtype=torch.int32), device),
        longest=max(b - a for a, b in itertools.pairwise(local)),
        ended=end in bounds,
    )


def with_previous(x: Tensor, count: int, *, before: int, group: dist.ProcessGroup) -> Tensor:
    """``x`` with the last ``count`` tokens of the previous rank in front: what a convolution needs.

    Collective, and so is its backward pass, which hands their gradients back.

    Args:
        x: [L, b, C], L >= ``count``.
        count: tokens to put in front.
        before: of them, how many belong to the first document here (or more); the others are zero,
            as they are before the start of any document.
        group: context parallel ranks.
    """
    halo = previous_tail(x[x.shape[0] - count :], group=group)
    return after_tail(halo, x, before=before)


def previous_tail(tail: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    """The last tokens [w, b, C] of the previous rank, in exchange for this one's; zeros on the
    first rank. Collective, and so is its backward pass."""
    halo: Tensor = _PreviousTail.apply(tail, group)
    return halo


def after_tail(tail: Tensor, x: Tensor, *, before: int) -> Tensor:
    """[w + L, b, C]: ``x`` with the w tokens before it in front, of which the last ``before``
    belong to its first document, and the others are made zero."""
    known = torch.arange(len(tail), 0, -1, device=x.device) <= before
    return torch.cat((torch.where(known[:, None, None], tail, 0), x))


class _PreviousTail(torch.autograd.Function):
    """Every rank's [w, b, C] moves to the next rank; the first one gets zeros."""

    @staticmethod
    def forward(ctx: Any, tail: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _from(tail, group, group.rank() - 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _from(grads[0], ctx.group, ctx.group.rank() + 1), None


def _from(x: Tensor, group: dist.ProcessGroup, rank: int) -> Tensor:
    """``x`` of another rank; zeros if there is no such rank. Collective."""
    # An all-gather of a few tokens: sends in pairs would each need a connection of their own.
    everyone = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(everyone, x.contiguous(), group=group)
    if not 0 <= rank < group.size():
        return torch.zeros_like(x)
    return everyone.view(group.size(), *x.shape)[rank].clone()


def sequence_to_heads(x: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    """All heads of a rank's tokens [L, b, H, D] to some heads of all tokens [s, b, H / ranks, D].

    Collective, and so is its backward pass, which is `heads_to_sequence`.
    """
    ranks = group.size()
    length, batch, heads, width = x.shape
    x = x.view(length, batch, ranks, heads // ranks, width).permute(2, 0, 1, 3, 4)
    return tensor_parallel.all_to_all(group, x.contiguous()).flatten(0, 1)


def heads_to_sequence(x: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    """The inverse of `sequence_to_heads`."""
    ranks = group.size()
    x = x.contiguous().view(ranks, x.shape[0] // ranks, *x.shape[1:])
    return tensor_parallel.all_to_all(group, x).permute(1, 2, 0, 3, 4).flatten(2, 3)
