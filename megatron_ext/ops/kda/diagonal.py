"""Diagonal tiles of an unbounded gate: element by element, since no reference point fits.

Shapes: X chunks, H heads, t tokens a tile, K width of a key head.
"""

from __future__ import annotations

import torch
from torch import Tensor


def elementwise_tile(q: Tensor, k: Tensor, x: Tensor) -> Tensor:
    """sum_c (q or k)[i, c] k[j, c] exp(min(x[i, c] - x[j, c], 0)), one column j at a time.

    The minimum acts above the diagonal only, where the result is not used: it keeps the exponential
    and its gradient finite.

    Args:
        q: [X, H, t, K].
        k: [X, H, t, K].
        x: log-decay since a common point [X, H, t, K].

    Returns:
        [X, H, 2 t, t]: rows of q, then rows of k.
    """
    both = torch.stack((q, k), 2)
    columns: list[Tensor] = []
    for j in range(q.shape[2]):
        weight = (x - x[:, :, j : j + 1]).clamp(max=0.0).exp() * k[:, :, j : j + 1]
        columns.append((both * weight[:, :, None]).sum(-1))
    return torch.stack(columns, -1).flatten(2, 3)
