"""What each kind of residual makes of the layers of a chunk; a plain one leaves them alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_ext.config.residual import chunk_sources, mixes, opens_source
from megatron_ext.config.schema import Recompute, ResidualKind, RunConfig
from megatron_ext.layers.attn_res import (
    AttentionResidualLayer,
    ChunkEnd,
    FirstNorm,
    MixNorm,
    OutputMix,
    start_sum,
)
from megatron_ext.layers.shared_heads import HeadShare, SharingLayer
from megatron_ext.parallel.pipeline import Boundary, SourceCache


def connect_layers(
    config: RunConfig,
    specs: Sequence[ModuleSpec],
    *,
    layers: Sequence[int],
    chunk: int,
    cache: SourceCache,
) -> list[ModuleSpec]:
    """The elements of one chunk under `residual.kind`.

    Args:
        specs: of plain pre-norm layers.
        layers: their numbers in the model, from 0.
        chunk: global number of the chunk.
        cache: of this rank; the same for all of its chunks.
    """
    options = config.residual
    if options.kind is ResidualKind.shared:
        pairs = zip(specs, layers, strict=True)
        return [_sharing(config, spec, layer=layer) for spec, layer in pairs]
    if not mixes(options):
        return list(specs)
    plans = chunk_sources(config)
    boundary = Boundary(plans[chunk], cache, dtype=torch.float32 if options.fp32 else None)
    elements = [
        _mixing(config, spec, layer=layer, boundary=boundary)
        for spec, layer in zip(specs, layers, strict=True)
    ]
    if chunk == len(plans) - 1:
        end = ModuleSpec(module=OutputMix, params={"options": options, "boundary": boundary})
    else:
        end = ModuleSpec(module=ChunkEnd, params={"boundary": boundary})
    return [*elements, end]


def _sharing(config: RunConfig, spec: ModuleSpec, *, layer: int) -> ModuleSpec:
    """A block never lies in two chunks (`validate_residual`)."""
    options, number = config.residual, config.model.num_layers
    earlier = layer % options.block_size
    attention = spec.submodules.self_attention
    share = partial(HeadShare, earlier=earlier, std=options.share_std)
    return ModuleSpec(
        module=SharingLayer,
        params={
            "earlier": earlier,
            "last": layer + 1 == number or (layer + 1) % options.block_size == 0,
            "recompute": config.train.recompute is Recompute.full,
        },
        submodules=replace(
            spec.submodules,
            self_attention=replace(attention, params={**attention.params, "share": share}),
        ),
    )


def _mixing(config: RunConfig, spec: ModuleSpec, *, layer: int, boundary: Boundary) -> ModuleSpec:
    options = config.residual
    norm, plain_add = partial(MixNorm, options=options), spec.submodules.self_attn_bda
    attention_opens, feed_forward_opens = opens_source(options, layer)
    return ModuleSpec(
        module=AttentionResidualLayer,
        params={
            "opens": (attention_opens, feed_forward_opens),
            "boundary": boundary,
            "recompute": config.train.recompute is Recompute.full,
        },
        submodules=replace(
            spec.submodules,
            input_layernorm=norm if layer else partial(FirstNorm, kernels=config.model.kernels),
            self_attn_bda=start_sum if attention_opens else plain_add,
            pre_mlp_layernorm=norm,
            mlp_bda=start_sum if feed_forward_opens else plain_add,
        ),
    )
