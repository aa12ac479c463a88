"""The experts' feed-forward as its formula reads: one expert after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ext.ops.situ import situ_glu_reference


def grouped_mlp_reference(
    x: Tensor,
    counts: Tensor,
    scale: Tensor,
    fc1: Tensor,
    fc2: Tensor,
    *,
    beta: float | None,
    linear_beta: float | None,
) -> Tensor:
    """Expert e takes the next ``counts[e]`` rows: W2_e [ scale * SiTU_GLU(W1_e x) ].

    Shapes as in `grouped_mlp`.
    """
    outputs = []
    sizes: list[int] = counts.tolist()
    parts = zip(torch.split(x, sizes), torch.split(scale, sizes), fc1, fc2, strict=True)
    for rows, factor, (gate, up), out in parts:
        hidden = situ_glu_reference(rows @ gate.T, rows @ up.T, beta=beta, linear_beta=linear_beta)
        outputs.append((hidden * factor[:, None]).to(x.dtype) @ out.T)
    return torch.cat(outputs)
