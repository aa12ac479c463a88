"""Measures attention residuals in some of the training steps, as `train.health` does attention."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_ext.checkpoint.state import unwrap
from megatron_ext.config.layout import sequence_parallel
from megatron_ext.config.residual import mix_sources
from megatron_ext.layers.attn_res import MixNorm, OutputMix
from megatron_ext.ops.attn_res.health import DepthHealth, MixHealth, mix_health
from megatron_ext.train import balance
from megatron_ext.train.health import own_layers, valid_tokens
from megatron_ext.train.state import TrainState


class DepthWatch:
    """Call `begin` before a training step that is to be measured, and `end` after it.

    Without attention residuals both do nothing.

    Args:
        state: whose model is measured.
    """

    def __init__(self, state: TrainState) -> None:
        config = state.config
        self._device = state.runtime.device
        self._sources = mix_sources(config.residual, config.model.num_layers)
        self._mixes = own_mixes(state) if self._sources else {}
        sequence = sequence_parallel(config.parallel)
        tokens = balance.distinct_tokens(state.mesh, sequence_parallel=sequence)
        self._groups = [group for group in (tokens, state.mesh.pp) if group is not None]
        self._valid_tokens = valid_tokens(state, shard=True)
        self._measured: dict[int, DepthHealth] = {}

    def begin(self) -> None:
        """From here on every mix counts."""
        self._measured = {
            sublayer: DepthHealth(
                self._sources[sublayer], self._device, valid_tokens=self._valid_tokens
            )
            for sublayer in self._mixes
        }
        self._hand_out(self._measured)

    def end(self) -> list[MixHealth]:
        """Stop, and add up over all ranks. Collective.

        Returns:
            A record for every mix of the model, in order, on every rank.
        """
        self._hand_out({})
        if not self._sources:
            return []
        widths = [2 + 2 * count for count in self._sources.values()]
        sums = torch.zeros(sum(widths), dtype=torch.float64, device=self._device)
        parts = dict(zip(self._sources, sums.split(widths), strict=True))
        for sublayer, health in self._measured.items():
            parts[sublayer].copy_(health.sums)
        self._measured = {}
        # Ranks with other tokens, then stages with other sublayers: nothing is there twice.
        for group in self._groups:
            dist.all_reduce(sums, group=group)
        host = sums.cpu().split(widths)
        return [mix_health(*pair) for pair in zip(self._sources, host, strict=True)]

    def _hand_out(self, health: dict[int, DepthHealth]) -> None:
        for sublayer, mix in self._mixes.items():
            mix.health = health.get(sublayer)


def own_mixes(state: TrainState) -> dict[int, MixNorm | OutputMix]:
    """The mixes of this rank by sublayer (`config.residual.mix_sources`)."""
    found: dict[int, MixNorm | OutputMix] = {}
    for number, layer in own_layers(state).items():
        for place, norm in enumerate((layer.input_layernorm, layer.pre_mlp_layernorm)):
            if isinstance(norm, MixNorm):
                found[2 * number + place] = norm
    for chunk in state.chunks:
        for module in unwrap(chunk).modules():
            if isinstance(module, OutputMix):
                found[2 * state.config.model.num_layers] = module
    return found
