"""The sweep over the states of chunks, cut into segments where few heads leave a GPU idle.

A sweep goes through a row chunk by chunk and runs on as many multiprocessors as there are heads and
blocks of values: 12 heads leave most of an H200 idle. Cut into S segments, each starting from a
state of its own, it fills it. The states at the bounds take two sweeps of the segments by
themselves, both at once for all: one from zero, and one from the identity without values, whose
result is the matrix that takes a state through the segment. They are kept, so that the backward
pass sweeps once.

Shapes: B batch, T tokens, H heads, K = V width, S segments, X chunks of 64 tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megatron_ext.ops.kda.tiles import CHUNK

# A GPU is full with this many heads; below it S is this by H.
FULL_HEADS = 96
# Fewer segments do not pay for three sweeps in place of one, nor do shorter ones.
FEWEST, SHORTEST = 4, 1024


@dataclass(frozen=True)
class Segments:
    """Of one row of tokens, as documents are given to fla's sweep.

    Attributes:
        cu_seqlens: bounds, int64 [S + 1], multiples of 64 but for the last.
        chunk_indices: segment, and chunk within it, of each chunk, int64 [X, 2].
        chunk_offsets: first chunk of each segment, int64 [S + 1].
    """

    cu_seqlens: Tensor
    chunk_indices: Tensor
    chunk_offsets: Tensor

    def arguments(self) -> dict[str, Tensor]:
        """Of fla's sweep."""
        return dict(vars(self))


def segments(*, batch: int, tokens: int, heads: int, device: torch.device) -> Segments | None:
    """How a row without documents is cut; None where it is swept as a whole."""
    count = min(FULL_HEADS // max(heads, 1), tokens // SHORTEST)
    return _cut(tokens, count, device) if batch == 1 and count >= FEWEST else None


@cache
def _cut(tokens: int, count: int, device: torch.device) -> Segments:
    chunks = -(-tokens // CHUNK)
    each = -(-chunks // count)
    first = list(range(0, chunks, each))
    bounds = [*(CHUNK * x for x in first), tokens]
    places = [(x // each, x % each) for x in range(chunks)]
    tensors = [torch.tensor(x, device=device) for x in (bounds, places, [*first, chunks])]
    return Segments(*tensors)


def starts(
    sweep: Callable[..., Any], cut: Segments, k: Tensor, w: Tensor, u: Tensor, decay: Tensor,
    state: Tensor | None,
) -> Tensor:  # fmt: skip
    """The state before each segment [S, H, K, V] float32.

    Args:
        sweep: fla's `chunk_gated_delta_rule_fwd_h`.
        cut: the segments.
        k, w, u, decay: as it takes them, [1, T, H, K or V].
        state: before the first one [1, H, K, V]; None: zero.
    """
    _, _, heads, width = k.shape
    count = len(cut.cu_seqlens) - 1
    options = {
        "k": k,
        "w": w,
        "gk": decay,
        "output_final_state": True,
        "save_new_value": False,
        "chunk_size": CHUNK,
        **cut.arguments(),
    }
    eye = torch.eye(width, dtype=torch.float32, device=k.device)
    eye = eye.expand(count, heads, -1, -1).contiguous()
    _, _, own = sweep(u=u, initial_state=None, **options)
    _, _, through = sweep(u=torch.zeros_like(k), initial_state=eye, **options)
    found = torch.zeros_like(own)
    if state is not None:
        found[0] = state[0]
    for i in range(count - 1):
        torch.baddbmm(own[i], through[i], found[i], out=found[i + 1])
    return found
