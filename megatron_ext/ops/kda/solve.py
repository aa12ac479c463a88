"""Inverse of a unit lower triangular matrix, blockwise.

Shapes: C rows, a multiple of the tile width t.
"""

from __future__ import annotations

import torch
from torch import Tensor


def invert_unit_lower(lower: Tensor, out: Tensor, *, tile: int) -> None:
    """(I + L)^-1 of a strictly lower triangular L; no gradient.

    The diagonal tiles are inverted by forward substitution and the block rows below merged one by
    one. A Neumann product would need no substitution, but its powers of L cancel badly when keys
    are nearly identical.

    Args:
        lower: [..., C, C]; must be zero on and above the diagonal.
        out: where the inverse goes [..., C, C].
        tile: width of a tile; divides C.
    """
    count = lower.shape[-1] // tile
    parts = [slice(i * tile, (i + 1) * tile) for i in range(count)]
    diagonal = torch.stack([lower[..., part, part] for part in parts], -3)
    eye = torch.eye(tile, dtype=lower.dtype, device=lower.device)
    solved = torch.linalg.solve_triangular(
        diagonal, eye.expand_as(diagonal), upper=False, unitriangular=True
    )
    out.zero_()
    for i, part in enumerate(parts):
        out[..., part, part] = solved[..., i, :, :]
        if i > 0:
            # [[A, 0], [B, D]]^-1 = [[A^-1, 0], [-D^-1 B A^-1, D^-1]]
            above = slice(0, i * tile)
            product = lower[..., part, above] @ out[..., above, above]
            out[..., part, above] = (solved[..., i, :, :] @ product).neg_()
