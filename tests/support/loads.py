"""Loads of expert layers that no model had to be trained for."""

from __future__ import annotations

import torch

from megatron_ext.ops.quantile.load import LayerLoad


def draw_loads(
    step: int, *, layers: int = 3, experts: int = 16, tokens: int = 512, top_k: int = 4
) -> list[LayerLoad]:
    """Layers 1, 2, ... in a step: even loads but for chance, and a hot expert that cools down.

    A function of its arguments alone, so that a second run of a step gives the same.
    """
    found = []
    for layer in range(1, layers + 1):
        generator = torch.Generator().manual_seed(1000 * step + layer)
        logits = torch.rand(tokens, experts, generator=generator)
        logits[:, layer % experts] += 2.0 / (step * layer)
        chosen = logits.topk(top_k, dim=1).indices
        counts = torch.bincount(chosen.flatten(), minlength=experts)
        bias = torch.linspace(-0.1, 0.1, experts) / layer
        found.append(
            LayerLoad(
                layer=layer,
                top_k=top_k,
                tokens=torch.tensor(tokens),
                counts=counts,
                bias=bias * step,
                new_bias=bias * (step + 1),
                predicted=torch.full((experts,), tokens * top_k / experts, dtype=torch.float64),
                out_of_range=torch.tensor(layer),
                bin_width=torch.tensor(0.002, dtype=torch.float64),
                dropped=torch.tensor(0),
            )
        )
    return found
