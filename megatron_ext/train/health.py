"""Measures attention in some of the training steps: hands each layer its statistics, adds them up.

In all other steps the layers hold none and do nothing for it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_ext.checkpoint.state import unwrap
from megatron_ext.config.layout import row_length, stage_layers
from megatron_ext.layers.gated_mla import GatedMLA
from megatron_ext.layers.kda import KimiDeltaAttention
from megatron_ext.ops.kda.health import (
    MAXIMA,
    SUMS,
    AttentionHealth,
    LayerHealth,
    layer_health,
)
from megatron_ext.train.state import TrainState
from megatron_ext.train.step import sharing


class HealthWatch:
    """Call `begin` before a training step that is to be measured, and `end` after it.

    Args:
        state: whose model is measured.
    """

    def __init__(self, state: TrainState) -> None:
        self._device, self._mesh = state.runtime.device, state.mesh
        self._layers = state.config.model.num_layers
        self._modules = attention_layers(state)
        self._valid_tokens = valid_tokens(state)
        self._measured: dict[int, AttentionHealth] = {}

    def begin(self) -> None:
        """From here on every attention layer counts."""
        self._measured = {
            layer: AttentionHealth(self._device, valid_tokens=self._valid_tokens)
            for layer in self._modules
        }
        self._hand_out(self._measured)

    def end(self) -> list[LayerHealth]:
        """Stop, and add up over all ranks. Collective.

        Returns:
            A record for every layer of the model that measured something, on every rank.
        """
        self._hand_out({})
        sums = torch.zeros(self._layers, SUMS, dtype=torch.float64, device=self._device)
        maxima = torch.zeros(self._layers, MAXIMA, dtype=torch.float64, device=self._device)
        for layer, health in self._measured.items():
            sums[layer], maxima[layer] = health.sums, health.maxima
        self._measured = {}
        # Tensor parallel ranks hold other heads, data and context parallel ones other tokens,
        # pipeline stages other layers: nothing is there twice.
        for group in (self._mesh.tp, self._mesh.dp_cp, self._mesh.pp):
            dist.all_reduce(sums, group=group)
            dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
        rows = zip(sums.cpu(), maxima.cpu(), strict=True)
        records = [layer_health(layer, *row) for layer, row in enumerate(rows)]
        return [record for record in records if record.values]

    def _hand_out(self, health: dict[int, AttentionHealth]) -> None:
        for layer, modules in self._modules.items():
            for module in modules:
                module.health = health.get(layer)


def valid_tokens(state: TrainState, *, shard: bool = False) -> int | None:
    """Tokens of this rank's part of a row before its padding; None: rows are not padded.

    Args:
        shard: of what the rank holds between sublayers, where tensor parallel ranks shard its part.
    """
    share = sharing(state)
    length = row_length(state.config)
    total = share.padded(length)
    if total == length:
        return None
    own = total // share.context.size()
    first = share.context.rank() * own
    if shard and share.tensor is not None:
        own //= share.tensor.size()
        first += share.tensor.rank() * own
    return min(max(length - first, 0), own)


def own_layers(state: TrainState) -> dict[int, TransformerLayer]:
    """The layers of this rank by 0-based number in the model."""
    stage = stage_layers(state.config.parallel, state.config.model.num_layers)
    own = stage[state.mesh.pp.rank()]
    found: dict[int, TransformerLayer] = {}
    for numbers, chunk in zip(own, state.chunks, strict=True):
        decoder: Any = unwrap(chunk).decoder
        # Attention residuals have elements of their own among a chunk's layers.
        layers = [layer for layer in decoder.layers if isinstance(layer, TransformerLayer)]
        found |= zip(numbers, layers, strict=True)
    return found


def attention_layers(state: TrainState) -> dict[int, list[KimiDeltaAttention | GatedMLA]]:
    """The attention modules of this rank by number of their layer."""
    return {
        number: [
            module
            for module in layer.modules()
            if isinstance(module, KimiDeltaAttention | GatedMLA)
        ]
        for number, layer in own_layers(state).items()
    }
