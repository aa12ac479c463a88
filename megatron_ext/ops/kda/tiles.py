"""Decayed products between the tokens of a chunk, tile by tile.

Wanted: A[i, j] = sum_c q[i, c] k[j, c] exp(G[i, c] - G[j, c]) for j <= i, where G is the running sum
of the log-decay. The exponent is never positive, but as a matrix product it must be split into a row
factor and a column factor, and one of them grows. So a chunk of C tokens is cut into tiles of t:

* Off the diagonal both factors refer to the boundary before the row tile: rows decay after it,
  columns decay towards it, every exponent is <= 0, and nothing can overflow under any gate.
* On the diagonal both refer to the boundary before the tile itself: rows exp(x), columns exp(-x) with
  x >= t * lower_bound. With lower_bound -5 and t = 16 that is at most e^80 = 5.5e34 < 3.4e38.
  Above the diagonal the product is junk, but finite junk, which a select removes afterwards; it
  must not be a multiplication by zero, or one infinity would turn into NaN.

Rows are multiplied by a power of two and columns divided by it, so that both factors stay within
e^(+-40): without it a row would be as small as e^-80 = 1.8e-35, and a gradient below 1e-3 times that is
a denormal number. A power of two changes no digit. A data-dependent midpoint would centre as well, but
then the rounding of early tokens would depend on later gates: no longer strictly causal.

Shapes: X chunks, H heads, C tokens a chunk, n tiles of t tokens, K width of a key head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

TILE = 16
CHUNK = 64
MAX_NATS = 87.0  # exp(87) = 6.1e37 is finite in float32 and exp(-87) = 1.6e-38 a normal number


@dataclass(frozen=True)
class ChunkProducts:
    """What the rest of the chunk algorithm needs from the decay."""

    qk: Tensor  # [X, H, C, C] lower triangle with the diagonal
    kk: Tensor  # [X, H, C, C] strictly lower triangle
    q_in: Tensor  # [X, H, C, K] queries, decayed since the start of the chunk
    k_in: Tensor  # [X, H, C, K] keys, decayed since the start of the chunk
    k_out: Tensor  # [X, H, C, K] keys, decayed until the end of the chunk
    decay: Tensor  # [X, H, K] decay over the chunk


def centring(*, tile: int, lower_bound: float) -> float:
    """Power of two next to exp(tile * |lower_bound| / 2), the middle of the range of a row factor."""
    return 2.0 ** round(-lower_bound * tile / 2 / math.log(2.0))


def max_inverse_decay(g: Tensor, *, tile: int = TILE) -> Tensor:
    """Largest |1 / Gamma| that the diagonal product of each tile meets; inf where it overflows.

    Gamma is the decay from the boundary before the tile to a token of it. With a gate in
    [lower_bound, 0] it is at most exp(-tile * lower_bound).

    Args:
        g: log-decay [B, T, H, K] (each row one document), in nats.
        tile: tokens a tile.

    Returns:
        [B, ceil(T / tile), H] in the dtype of the computation.
    """
    batch, tokens, heads, width = g.shape
    g = g.to(torch.promote_types(g.dtype, torch.float32))
    g = torch.nn.functional.pad(g, (0, 0, 0, 0, 0, -tokens % tile))
    total = g.view(batch, -1, tile, heads, width).cumsum(2)
    return total.neg().exp().amax(dim=(2, 4))


def chunk_products(
    q: Tensor, k: Tensor, g: Tensor, *, tile: int, lower_bound: float | None
) -> ChunkProducts:
    """All decayed products of every chunk.

    Args:
        q: [X, H, C, K]; C is a multiple of ``tile``.
        k: [X, H, C, K].
        g: log-decay [X, H, C, K], within [lower_bound, 0]. Not checked here: a gate that breaks the
            bound overflows to inf and NaN.
        tile: tokens a tile.
        lower_bound: of ``g``; None: no bound, and the diagonal tiles are computed element by element.
    """
    chunks, heads, size, width = q.shape
    count = size // tile
    shape = (chunks, heads, count, tile, width)
    q, k = q.view(shape), k.view(shape)
    x = g.view(shape).cumsum(-2)  # decay since the boundary before the tile, own token included
    total = x[..., -1:, :]
    rise = x.exp()
    q_rise, k_rise = q * rise, k * rise
    k_fall = k * (total - x).exp()  # decayed until the boundary after the tile
    if lower_bound is None:
        scale = 1.0
        column = None
    else:
        scale = centring(tile=tile, lower_bound=lower_bound)
        column = k * (x.neg().exp() * (1 / scale))
    rows = (
        torch.cat((q_rise, k_rise), -2) * scale if scale != 1.0 else torch.cat((q_rise, k_rise), -2)
    )
    decay = total.exp()

    products: list[Tensor] = []
    columns: Tensor | None = (
        None  # of all earlier tiles, decayed until the boundary before this one
    )
    for i in range(count):
        parts: list[Tensor] = []
        if columns is not None:
            parts.append(columns * (1 / scale) if scale != 1.0 else columns)
        if column is not None:
            parts.append(column[:, :, i])
        row = rows[:, :, i]
        width_ij = (i + 1) * tile if column is not None else i * tile
        if parts:
            right = torch.cat(parts, -2) if len(parts) > 1 else parts[0]
            block = row @ right.transpose(-1, -2)
        else:
            block = row.new_zeros(chunks, heads, 2 * tile, 0)
        if column is None:
            block = torch.cat((block, _elementwise(q[:, :, i], k[:, :, i], x[:, :, i])), -1)
            width_ij += tile
        products.append(torch.nn.functional.pad(block, (0, size - width_ij)))
        here = k_fall[:, :, i]
        if columns is None:
            columns = here
        else:
            columns = torch.cat((columns * decay[:, :, i], here), -2)
    assert columns is not None
    both = torch.stack(products, 2).view(chunks, heads, count, 2, tile, size)
    qk = both[:, :, :, 0].reshape(chunks, heads, size, size)
    kk = both[:, :, :, 1].reshape(chunks, heads, size, size)
    index = torch.arange(size, device=q.device)
    zero = qk.new_zeros(())
    before = torch.cat((torch.ones_like(total[:, :, :1]), decay.cumprod(2)[:, :, :-1]), 2)
    return ChunkProducts(
        qk=torch.where(index[:, None] >= index, qk, zero),
        kk=torch.where(index[:, None] > index, kk, zero),
        q_in=(q_rise * before).view(chunks, heads, size, width),
        k_in=(k_rise * before).view(chunks, heads, size, width),
        k_out=columns,
        decay=total.sum(2).squeeze(-2).exp(),
    )


def _elementwise(q: Tensor, k: Tensor, x: Tensor) -> Tensor:
    """Diagonal tiles under any gate: one column at a time, exponent clamped before the exponential.

    Never holds more than one [X, H, t, K] exponent at once in the forward.
    """
    tile = q.shape[-2]
    both = torch.stack((q, k), -3)  # [X, H, 2, t, K]
    columns: list[Tensor] = []
    for j in range(tile):
        weight = (x - x[..., j : j + 1, :]).clamp(max=0.0).exp() * k[..., j : j + 1, :]
        columns.append((both * weight.unsqueeze(-3)).sum(-1))
    return torch.stack(columns, -1).flatten(-3, -2)
