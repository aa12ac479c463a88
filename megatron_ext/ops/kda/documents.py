"""Where documents begin in a packed sequence, and how their tokens are laid out in chunks.

Shapes: B batch, T tokens, N documents, C tokens a chunk, X chunks of all documents together.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def document_lengths(cu_seqlens: Tensor | None, *, batch: int, tokens: int) -> list[int] | None:
    """Lengths of the documents of a packed sequence; None without ``cu_seqlens``.

    Args:
        cu_seqlens: offsets [N + 1], int32 or int64, from 0 to ``tokens``, never decreasing.
        batch: size of the batch dimension; documents need 1 (flatten the batch into one row).
        tokens: length of that row.

    Raises:
        ValueError: the offsets do not describe the row.
    """
    if cu_seqlens is None:
        return None
    if batch != 1:
        raise ValueError(
            f"cu_seqlens: given with batch {batch}, allowed 1; flatten [B, T] to [1, B * T] and "
            "add the offset of each row"
        )
    if cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.ndim != 1:
        raise ValueError(
            f"cu_seqlens: given {cu_seqlens.dtype} with {cu_seqlens.ndim} dimensions, allowed one "
            "dimension of int32 or int64"
        )
    offsets: list[int] = cu_seqlens.tolist()
    lengths = [b - a for a, b in itertools.pairwise(offsets)]
    if not lengths or offsets[0] != 0 or offsets[-1] != tokens or min(lengths) < 0:
        raise ValueError(
            f"cu_seqlens: given {_short(offsets)} for {tokens} tokens, allowed offsets that start "
            f"at 0, never decrease and end at {tokens}"
        )
    return lengths


def _short(values: Sequence[int]) -> str:
    shown = ", ".join(str(v) for v in values[:4])
    return f"[{shown}]" if len(values) <= 4 else f"[{shown}, ..., {values[-1]}]"


@dataclass(frozen=True)
class ChunkLayout:
    """Order of the chunks: step-major, so that one step of the sweep is a contiguous block.

    Documents are ranked by their number of chunks, longest first. Block ``s`` holds chunk ``s`` of
    the first ``active[s]`` ranked documents, so the documents still running are always a prefix.
    """

    chunk: int  # C
    active: tuple[int, ...]  # documents that have a chunk at each step; sums to X
    order: Tensor | None  # int64 [N]: document of each rank; None: as given
    position: Tensor | None  # int64 [T]: padded position of each token; None: a plain reshape

    @property
    def chunks(self) -> int:
        """Number of chunks X."""
        return sum(self.active)


def chunk_layout(
    lengths: Sequence[int] | None,
    *,
    batch: int,
    tokens: int,
    chunk: int,
    tile: int,
    device: torch.device,
) -> ChunkLayout:
    """Lays documents out in chunks; each document is padded to whole chunks.

    Many short documents would be mostly padding, so the chunk then shrinks, down to one tile.

    Args:
        lengths: of the documents, or None for ``batch`` rows of ``tokens`` tokens.
        batch: rows when ``lengths`` is None.
        tokens: tokens a row.
        chunk: largest chunk; a multiple of ``tile``.
        tile: smallest chunk.
        device: where the index tensors go.
    """
    if lengths is None:
        size = chunk if tokens > chunk // 2 else tile * max(1, -(-tokens // tile))
        return ChunkLayout(size, (batch,) * -(-tokens // size), None, None)
    sizes = [chunk]
    while sizes[-1] % 2 == 0 and sizes[-1] // 2 % tile == 0:
        sizes.append(sizes[-1] // 2)
    length = torch.tensor(lengths, dtype=torch.int64)
    # A smaller chunk means more steps and less arithmetic in large products: worth it only when it
    # saves a fifth of the padded tokens.
    size, cost = sizes[0], int(_chunks(length, sizes[0]).sum()) * sizes[0]
    for candidate in sizes[1:]:
        padded = int(_chunks(length, candidate).sum()) * candidate
        if padded < 0.8 * cost:
            size, cost = candidate, padded
    counts = _chunks(length, size)
    order = torch.argsort(counts, descending=True, stable=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order))
    steps = int(counts.max()) if len(counts) else 0
    finished = torch.bincount(counts, minlength=steps + 1).cumsum(0)
    active = (len(counts) - finished[:steps]).tolist()
    block = torch.tensor([0, *active]).cumsum(0)  # first chunk of each step
    document = torch.repeat_interleave(length)
    within = torch.arange(int(length.sum())) - (length.cumsum(0) - length)[document]
    position = (block[within // size] + rank[document]) * size + within % size
    return ChunkLayout(size, tuple(active), order.to(device), position.to(device))


def _chunks(length: Tensor, size: int) -> Tensor:
    return (length + size - 1) // size


def to_chunks(x: Tensor, *, layout: ChunkLayout) -> Tensor:
    """[B, T, H, D] -> [X, H, C, D], contiguous, padded with zeros."""
    batch, tokens, heads, width = x.shape
    if layout.position is not None:
        padded = x.new_zeros(layout.chunks * layout.chunk, heads, width)
        padded = padded.index_copy(0, layout.position, x[0])
        return padded.view(-1, layout.chunk, heads, width).transpose(1, 2).contiguous()
    steps = len(layout.active)
    if steps * layout.chunk != tokens:
        pad = steps * layout.chunk - tokens
        x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, pad))
    x = x.view(batch, steps, layout.chunk, heads, width).permute(1, 0, 3, 2, 4)
    return x.reshape(steps * batch, heads, layout.chunk, width).contiguous()


def from_chunks(x: Tensor, *, layout: ChunkLayout, batch: int, tokens: int) -> Tensor:
    """[X, H, C, D] -> [B, T, H, D]; the inverse of ``to_chunks``."""
    _, heads, chunk, width = x.shape
    if layout.position is not None:
        rows = x.transpose(1, 2).reshape(-1, heads, width)
        return rows.index_select(0, layout.position)[None]
    steps = len(layout.active)
    x = x.view(steps, batch, heads, chunk, width).permute(1, 0, 3, 2, 4)
    return x.reshape(batch, steps * chunk, heads, width)[:, :tokens]
