"""How states of KDA pass between ranks that hold consecutive parts of a sequence.

What a rank does to a state is affine: S_out = M S_in + E, with E the state it leaves when it starts
from zero, and M its transition, the product of (I - beta k k^T) Diag(e^g) over its tokens. So one
all-gather of [E | M], whose size does not depend on the length, gives every rank its first state:

    S_0 = 0,  S_{r+1} = M_r S_r + E_r             forward, from the first rank on
    D_last = 0,  D_{r-1} = M_r^T D_r + G_r        backward, from the last rank on

with D_r the gradient of the state that rank r leaves, G_r that of its first state through its own
outputs. A rank on which a document begins passes nothing on: its M is zero. One whose first token
begins a document also hands no gradient back: its G is zero.

No decay, however strong, makes M negligible in general: it is never left out. Everything is in
float32, or float64 for float64 inputs. Source: Kimi K3 report, section 5.1.2.

Shapes: b rows of a batch that are chained (1 with documents), H heads, K, V widths of key, value.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def first_state(left: Tensor, transition: Tensor | None, *, group: dist.ProcessGroup) -> Tensor:
    """The state that the ranks before this one leave. Collective.

    Args:
        left: E [b, H, K, V], contributed by this rank.
        transition: M [b, H, K, K]; None: zero.
        group: ranks in the order of the sequence.

    Returns:
        [b, H, K, V]; zero on the first rank.
    """
    pairs = _gather(left, transition, group)
    state = torch.zeros_like(left)
    for rank in range(group.rank()):
        added, carried = torch.split(pairs[rank], [left.shape[-1], left.shape[-2]], -1)
        state = torch.add(added, carried @ state)
    return state


def last_gradient(
    gradient: Tensor, transition: Tensor | None, *, group: dist.ProcessGroup
) -> Tensor:
    """The gradient of the state that this rank leaves, through all ranks after it. Collective.

    Args:
        gradient: G [b, H, K, V] of this rank; zero where its first token begins a document.
        transition: M [b, H, K, K]; None: zero.
        group: ranks in the order of the sequence.

    Returns:
        [b, H, K, V]; zero on the last rank.
    """
    pairs = _gather(gradient, transition, group)
    result = torch.zeros_like(gradient)
    for rank in reversed(range(group.rank() + 1, group.size())):
        own, carried = torch.split(pairs[rank], [gradient.shape[-1], gradient.shape[-2]], -1)
        result = torch.add(own, carried.transpose(-1, -2) @ result)
    return result


def _gather(value: Tensor, transition: Tensor | None, group: dist.ProcessGroup) -> Tensor:
    """[value | transition] of all ranks, [ranks, b, H, K, V + K]."""
    if transition is None:
        transition = value.new_zeros(*value.shape[:-1], value.shape[-2])
    mine = torch.cat((value, transition), -1)
    # Concatenated along the first axis: gloo takes no other shape.
    everyone = mine.new_empty(group.size() * mine.shape[0], *mine.shape[1:])
    dist.all_gather_into_tensor(everyone, mine, group=group)
    return everyone.view(group.size(), *mine.shape)
