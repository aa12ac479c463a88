"""Statistics of steps for which no model had to be trained: expert load, attention, depth."""

from __future__ import annotations

import torch

from megatron_ext.config.residual import mix_sources
from megatron_ext.config.schema import Gate, ResidualKind, ResidualOptions
from megatron_ext.ops.attn_res.health import DepthHealth, MixHealth, mix_health
from megatron_ext.ops.kda.health import AttentionHealth, LayerHealth, Sum, layer_health
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


def draw_health(step: int, *, layers: int = 4) -> list[LayerHealth]:
    """Layers 0, 1, ... in a step, every fourth of full attention; gates open as training goes on.

    A function of its arguments alone.
    """
    found = []
    for layer in range(layers):
        generator = torch.Generator().manual_seed(1000 * step + layer)
        health = AttentionHealth("cpu")
        logits = torch.randn(2, 32, 2, 4, generator=generator) + 0.1 * step
        if layer % 4 == 3:
            health.add_gate(Sum.ATTENTION_OUTPUTS, Sum.ATTENTION_GATE, logits)
        else:
            bias = torch.full((2, 4), -2.0 - layer)
            health.add_decay(logits, None, bias, gate=Gate.bounded_plain, lower_bound=-5.0)
            health.add_gate(Sum.WRITES, Sum.BETA, logits[..., 0])
            health.add_gate(Sum.OUTPUTS, Sum.OUTPUT_GATE, logits)
            health.add_state(torch.randn(2, 2, 4, 4, generator=generator))
        found.append(layer_health(layer, health.sums, health.maxima))
    return found


def draw_depth(
    step: int, *, layers: int = 4, kind: ResidualKind = ResidualKind.block
) -> list[MixHealth]:
    """The mixes of a model in blocks of two layers; queries grow as training goes on.

    A function of its arguments alone.
    """
    found = []
    options = ResidualOptions(kind=kind, block_size=2)
    for sublayer, count in mix_sources(options, layers).items():
        generator = torch.Generator().manual_seed(1000 * step + sublayer)
        query, *sources = torch.randn(1 + count, 8, 4, generator=generator)
        health = DepthHealth(count, "cpu")
        health.add(sources, 0.1 * step * query[0], torch.ones(4), eps=1e-5)
        found.append(mix_health(sublayer, health.sums))
    return found
