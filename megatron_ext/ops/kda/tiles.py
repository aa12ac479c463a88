"""Decayed products between the tokens of a chunk, tile by tile.

Wanted: A[i, j] = sum_c q[i, c] k[j, c] exp(G[i, c] - G[j, c]) for j <= i, with G the running sum of
the log-decay. The exponent is never positive, but as a matrix product it must be split into a row
factor and a column factor, and one of them grows. So a chunk of C tokens is cut into tiles of t:

* Off the diagonal both factors refer to the boundary before the row tile: rows decay after it,
  columns decay towards it. Nothing can overflow, under any gate.
* On the diagonal both refer to the boundary before the tile itself: rows exp(x), columns exp(-x),
  with x >= t * lower_bound. For -5 and t = 16 that is at most e^80 = 5.5e34 < 3.4e38. Above the
  diagonal the product is junk, but finite junk, which a select removes afterwards (a product with
  zero would turn an infinity into NaN).

Row factors are multiplied by a power of two s near e^40 and column factors divided by it, so both
stay within e^(+-40). Else a row would be as small as e^-80 = 2e-35, and with it the gradients of a
loss averaged over a large batch would fall below the smallest float32. A power of two changes no
digit. A midpoint of the tile's own decay would centre as well, but then the rounding of early
tokens would depend on later gates: no longer strictly causal.

Forward and backward are written out: the backward of autograd multiplies by s and by exp(-x) one
after the other, which leaves the range again.

Shapes: X chunks, H heads, C tokens a chunk, n tiles of t tokens, K width of a key head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ext.ops.kda.diagonal import elementwise_tile

TILE = 16
CHUNK = 64
MAX_NATS = 87.0  # exp(87) = 6.1e37 is finite in float32 and exp(-87) = 1.6e-38 a normal number


@dataclass(frozen=True)
class Factors:
    """Row and column factors of one block of chunks, and the decays between tiles."""

    rise: Tensor  # [X, H, n, t, K] s * decay since the boundary before the tile
    q: Tensor  # [X, H, n, t, K] queries
    k: Tensor  # [X, H, n, t, K] keys
    rows: Tensor  # [X, H, n, 2t, K] queries, then keys, times rise
    fall: Tensor  # [X, H, n, t, K] factor of a key in its column
    column: Tensor  # [X, H, n, t, K] keys times fall
    total: Tensor  # [X, H, n, 1, K] decay over each tile
    before: Tensor  # [X, H, n, 1, K] decay from the start of the chunk to the tile, divided by s
    x: Tensor  # [X, H, n, t, K] log-decay since the boundary before the tile
    scale: float  # s
    matrix: bool  # diagonal tiles are matrix products (bounded gate)


@dataclass(frozen=True)
class Products:
    """What the chunk algorithm needs from the decay, or the gradients of these tensors."""

    square: Tensor  # [X, H, 2, C, C] query-key (lower triangle) and key-key (strictly lower)
    since: Tensor  # [X, H, 2, C, K] queries and keys, decayed since the start of the chunk
    k_out: Tensor  # [X, H, C, K] keys, decayed until the end of the chunk
    decay: Tensor  # [X, H, K] decay over the chunk

    def block(self, chunks: slice) -> Products:
        """Views of some of the chunks."""
        return Products(
            self.square[chunks], self.since[chunks], self.k_out[chunks], self.decay[chunks]
        )


def empty_products(k: Tensor) -> Products:
    """Room for the products of all chunks of keys [X, H, C, K]."""
    chunks, heads, size, width = k.shape
    return Products(
        square=k.new_empty(chunks, heads, 2, size, size),
        since=k.new_empty(chunks, heads, 2, size, width),
        k_out=torch.empty_like(k),
        decay=k.new_empty(chunks, heads, width),
    )


def centring(*, tile: int, lower_bound: float) -> float:
    """Power of two next to exp(tile * |lower_bound| / 2), the middle of a row factor's range."""
    return float(2.0 ** round(-lower_bound * tile / 2 / math.log(2.0)))


def max_inverse_decay(g: Tensor, *, tile: int = TILE) -> Tensor:
    """Largest |1 / Gamma| that the diagonal product of each tile meets; inf where it overflows.

    Gamma is the decay from the boundary before the tile to a token of it. With a gate in
    [lower_bound, 0] its inverse is at most exp(-tile * lower_bound).

    Args:
        g: log-decay [B, T, H, K] (each row one document), in nats.
        tile: tokens a tile.

    Returns:
        [B, ceil(T / tile), H], float32 or float64.
    """
    batch, tokens, heads, width = g.shape
    g = g.to(torch.promote_types(g.dtype, torch.float32))
    g = torch.nn.functional.pad(g, (0, 0, 0, 0, 0, -tokens % tile))
    total = g.view(batch, -1, tile, heads, width).cumsum(2)
    return total.neg().exp().amax(dim=(2, 4))


def factors(q: Tensor, k: Tensor, g: Tensor, *, tile: int, lower_bound: float | None) -> Factors:
    """Row and column factors of every tile; arguments as ``chunk_products``."""
    shape = (*q.shape[:2], q.shape[2] // tile, tile, q.shape[3])
    q, k = q.view(shape), k.view(shape)
    x = running_sum(g.view(shape).clone())
    rise = x.exp()
    total = rise[..., -1:, :].clone()
    scale = 1.0
    if lower_bound is None:
        fall = (x[..., -1:, :] - x).exp_()  # towards the boundary after the tile
    else:
        scale = centring(tile=tile, lower_bound=lower_bound)
        rise *= scale
        # Back to the boundary before the tile. Not 1 / rise, which would lose digits silently, not
        # overflow, where a tile is too long for its gate.
        fall = x.neg().exp_().mul_(1 / scale)
    before = torch.empty_like(total)
    before[:, :, 0] = 1 / scale
    torch.cumprod(total[:, :, :-1], 2, out=before[:, :, 1:])
    before[:, :, 1:] /= scale
    rows = rise.new_empty(*shape[:3], 2 * tile, shape[4])
    torch.mul(q, rise, out=rows[..., :tile, :])
    torch.mul(k, rise, out=rows[..., tile:, :])
    return Factors(
        rise, q, k, rows, fall, k * fall, total, before, x, scale, lower_bound is not None
    )


def chunk_products(
    q: Tensor, k: Tensor, g: Tensor, out: Products, *, tile: int, lower_bound: float | None
) -> None:
    """All decayed products of every chunk; no gradient (see ``chunk_products_backward``).

    Args:
        q: [X, H, C, K], contiguous; C is a multiple of ``tile``.
        k: [X, H, C, K].
        g: log-decay [X, H, C, K], within [lower_bound, 0]. Not checked here: a gate that breaks the
            bound overflows to inf and NaN.
        out: where the products go.
        tile: tokens a tile.
        lower_bound: of ``g``; None: no bound, the diagonal tiles are computed element by element.
    """
    f = factors(q, k, g, tile=tile, lower_bound=lower_bound)
    chunks, heads, size, _ = q.shape
    count = size // tile
    square = out.square.view(chunks, heads, 2, count, tile, size)
    columns = out.k_out
    for i in range(count):
        here = slice(i * tile, (i + 1) * tile)
        if f.matrix:
            columns[:, :, here] = f.column[:, :, i]
        else:
            diagonal = elementwise_tile(f.q[:, :, i], f.k[:, :, i], f.x[:, :, i])
            square[:, :, :, i, :, here] = torch.unflatten(diagonal, 2, (2, tile))
        stop = (i + 1) * tile if f.matrix else i * tile
        block = f.rows[:, :, i] @ columns[:, :, :stop].transpose(-1, -2)
        square[:, :, :, i, :, :stop] = block.view(chunks, heads, 2, tile, stop)
        columns[:, :, :stop] *= f.total[:, :, i]
        if not f.matrix:
            columns[:, :, here] = f.column[:, :, i]
    # tril selects: it writes zeros whatever stood there, be it junk or memory never written
    out.square.tril_()
    out.square[:, :, 1].diagonal(dim1=-2, dim2=-1).zero_()
    rows = torch.unflatten(f.rows, 3, (2, tile)).transpose(2, 3)
    torch.mul(rows, f.before[:, :, None], out=torch.unflatten(out.since, 3, (count, tile)))
    columns.mul_(f.scale)
    torch.mul(f.before[:, :, -1, 0], f.total[:, :, -1, 0] * f.scale, out=out.decay)


def chunk_products_backward(
    q: Tensor,
    k: Tensor,
    g: Tensor,
    grad: Products,
    out: tuple[Tensor, Tensor, Tensor],
    *,
    tile: int,
    lower_bound: float | None,
) -> None:
    """Gradients of q, k and g, given those of every product.

    Args:
        q: as for ``chunk_products``, as ``k`` and ``g``.
        k: [X, H, C, K].
        g: [X, H, C, K].
        grad: ``square`` may hold anything above its triangles; overwritten.
        out: where the gradients of q, k and g go [X, H, C, K].
        tile: tokens a tile.
        lower_bound: as for ``chunk_products``.
    """
    f = factors(q, k, g, tile=tile, lower_bound=lower_bound)
    chunks, heads, size, width = q.shape
    count = size // tile
    d_q, d_k, d_g = (x.view(f.q.shape) for x in out)
    # q_i k_i on the diagonal does not decay. Left to the tiles, its two gradients of the gate would
    # cancel only up to rounding, and under strong decay that rounding would be all there is.
    diagonal = grad.square[:, :, 0].diagonal(dim1=-2, dim2=-1).clone()[..., None]
    square = grad.square.tril_(-1).view(chunks, heads, 2, count, tile, size)

    columns: list[Tensor] = []  # that each row tile met
    for i in range(count):
        stop = (i + 1) * tile if f.matrix else i * tile
        met = q.new_empty(chunks, heads, stop, width)
        if i > 0:
            known = columns[-1].shape[2]
            torch.mul(columns[-1], f.total[:, :, i - 1], out=met[:, :, :known])
            if not f.matrix:
                met[:, :, known:] = f.column[:, :, i - 1]
        if f.matrix:
            met[:, :, i * tile :] = f.column[:, :, i]
        columns.append(met)

    d_rows = torch.empty_like(f.rows)
    d_since = torch.unflatten(grad.since, 3, (count, tile))
    rows = torch.unflatten(d_rows, 3, (2, tile)).transpose(2, 3)
    torch.mul(d_since, f.before[:, :, None], out=rows)
    # Of log(total), a tile at a time: first what reaches it through `before` of later tiles and
    # through the decay of the chunk.
    d_before = (f.rows * d_rows).sum(3)
    d_total = d_before.flip(2).cumsum(2).flip(2) - d_before
    chunk_decay = f.before[:, :, -1, 0] * f.total[:, :, -1, 0] * f.scale
    d_total += (grad.decay * chunk_decay)[:, :, None]

    d_columns = grad.k_out.mul_(f.scale)
    d_column = torch.empty_like(f.column)
    for i in reversed(range(count)):
        here = slice(i * tile, (i + 1) * tile)
        if not f.matrix:
            d_column[:, :, i] = d_columns[:, :, here]
        stop = (i + 1) * tile if f.matrix else i * tile
        part = d_columns[:, :, :stop]
        part *= f.total[:, :, i]
        d_total[:, :, i] += (part * columns[i]).sum(2)
        block = square[:, :, :, i, :, :stop].reshape(chunks, heads, 2 * tile, stop)
        part += block.transpose(-1, -2) @ f.rows[:, :, i]
        d_rows[:, :, i] += block @ columns[i]
        if f.matrix:
            d_column[:, :, i] = d_columns[:, :, here]

    torch.mul(d_rows[..., :tile, :], f.rise, out=d_q)
    torch.mul(d_rows[..., tile:, :], f.rise, out=d_k)
    fallen = d_column * f.fall
    d_x = torch.mul(d_q, f.q).addcmul_(d_k - fallen, f.k)
    d_k += fallen
    if not f.matrix:
        d_total += (d_column * f.column).sum(-2)
        for i in range(count):
            here = slice(i * tile, (i + 1) * tile)
            block = square[:, :, :, i, :, here].reshape(chunks, heads, 2 * tile, tile)
            tile_grads = _elementwise_backward(f, i, block)
            for target, value in zip((d_q, d_k, d_x), tile_grads, strict=True):
                target[:, :, i] += value
    d_x[..., -1, :] += d_total
    out[0].addcmul_(diagonal, k)
    out[1].addcmul_(diagonal, q)
    d_g.copy_(running_sum(d_x, reverse=True))


def running_sum(x: Tensor, *, reverse: bool = False) -> Tensor:
    """Running sum over the second to last dimension, in place on a CPU.

    torch.cumsum is slow there along an inner dimension of 16.
    """
    if x.device.type != "cpu":
        return x.flip(-2).cumsum(-2).flip(-2) if reverse else x.cumsum(-2)
    last = x.shape[-2] - 1
    for i in range(last):
        if reverse:
            x[..., last - i - 1, :] += x[..., last - i, :]
        else:
            x[..., i + 1, :] += x[..., i, :]
    return x


def _elementwise_backward(f: Factors, index: int, grad: Tensor) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        leaves = [t[:, :, index].detach().requires_grad_() for t in (f.q, f.k, f.x)]
        return torch.autograd.grad(elementwise_tile(*leaves), leaves, grad)
