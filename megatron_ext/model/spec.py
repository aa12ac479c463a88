"""From the layer pattern of the configuration to megatron-core's layer specs, for one chunk."""

from __future__ import annotations

from functools import partial

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
)

from megatron_ext.config.layout import LayerKind, expert_layers, layer_kinds, stage_layers
from megatron_ext.config.schema import BalanceOptions, ContextOrder, ModelOptions, RunConfig
from megatron_ext.layers.core_attention import attention_class
from megatron_ext.layers.feed_forward import SituFeedForward
from megatron_ext.layers.gated_mla import GatedMLA, GatedMlaSubmodules
from megatron_ext.layers.hybrid import GatedHybrid, GatedHybridSubmodules
from megatron_ext.layers.kda import KimiDeltaAttention
from megatron_ext.layers.latent_moe import LatentMoE
from megatron_ext.layers.norms import ResidualRMSNorm, RMSNorm
from megatron_ext.model.residual import connect_layers
from megatron_ext.parallel.pipeline import SourceCache


def attention_spec(
    model: ModelOptions,
    *,
    kind: LayerKind,
    segment_tokens: int | None = None,
    kda_recompute: bool = True,
    context_order: ContextOrder = ContextOrder.contiguous,
) -> ModuleSpec:
    """The self-attention of one layer: KDA, gated MLA, or both under a gate."""
    if kind is LayerKind.kda:
        return ModuleSpec(
            module=KimiDeltaAttention,
            params={
                "options": model.kda,
                "kernels": model.kernels,
                "segment_tokens": segment_tokens,
                "recompute": kda_recompute,
            },
        )
    if kind is LayerKind.mla:
        kernel = attention_class(model.mla.backend, require=model.mla.require)
        return ModuleSpec(
            module=GatedMLA,
            params={
                "options": model.mla,
                "kernels": model.kernels,
                "context_order": context_order,
            },
            submodules=GatedMlaSubmodules(core_attention=kernel),
        )
    return ModuleSpec(
        module=GatedHybrid,
        submodules=GatedHybridSubmodules(
            kda=attention_spec(
                model,
                kind=LayerKind.kda,
                segment_tokens=segment_tokens,
                kda_recompute=kda_recompute,
            ),
            mla=attention_spec(model, kind=LayerKind.mla, context_order=context_order),
        ),
    )


def feed_forward_spec(
    model: ModelOptions, balance: BalanceOptions | None, *, chunk_tokens: int | None = None
) -> partial:
    """The feed-forward of one layer: a mixture of experts with a balancing rule, else dense."""
    if balance is None:
        return partial(
            SituFeedForward,
            feed_forward_size=model.feed_forward_size,
            beta=model.situ_beta,
            linear_beta=model.situ_linear_beta,
            kernels=model.kernels,
        )
    return partial(
        LatentMoE,
        options=model.experts,
        balance=balance,
        beta=model.situ_beta,
        linear_beta=model.situ_linear_beta,
        kernels=model.kernels,
        chunk_tokens=chunk_tokens,
    )


def layer_spec(
    model: ModelOptions,
    *,
    kind: LayerKind,
    balance: BalanceOptions | None = None,
    chunk_tokens: int | None = None,
    segment_tokens: int | None = None,
    kda_recompute: bool = True,
    context_order: ContextOrder = ContextOrder.contiguous,
) -> ModuleSpec:
    """One pre-norm layer: x + attention(norm(x)), then x + feed-forward(norm(x)).

    Args:
        balance: for a layer of experts, how their load is levelled; None for a dense one.
        chunk_tokens: tokens at the experts at once; None: all.
        segment_tokens: tokens in linear attention at once; None: all.
        kda_recompute: the backward pass of linear attention computes again what it could keep.
        context_order: which queries of full attention a context parallel rank computes.
    """
    norm = partial(ResidualRMSNorm, kernels=model.kernels)
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=attention_spec(
                model,
                kind=kind,
                segment_tokens=segment_tokens,
                kda_recompute=kda_recompute,
                context_order=context_order,
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm,
            mlp=feed_forward_spec(model, balance, chunk_tokens=chunk_tokens),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def block_spec(
    config: RunConfig,
    tc: TransformerConfig,
    *,
    pipeline_rank: int,
    virtual_stage: int,
    cache: SourceCache | None = None,
) -> TransformerBlockSubmodules:
    """The layers of one chunk, with the final norm for the chunk that megatron-core gives it to.

    Args:
        config: the pattern and its layout over stages.
        tc: megatron-core's form of the same; its number of layers must agree.
        pipeline_rank: which pipeline stage, from 0.
        virtual_stage: which of its chunks, from 0.
        cache: what this rank's chunks share of a micro-batch; one of its own for a lone chunk.
    """
    if tc.num_layers != config.model.num_layers:
        raise ValueError(
            f"the TransformerConfig has {tc.num_layers} layers, the model {config.model.num_layers}"
        )
    kinds, experts = layer_kinds(config.model), expert_layers(config.model)
    layers = stage_layers(config.parallel, config.model.num_layers)[pipeline_rank][virtual_stage]
    specs = [
        layer_spec(
            config.model,
            kind=kinds[layer],
            balance=config.balance if layer in experts else None,
            chunk_tokens=config.train.expert_chunk_tokens,
            segment_tokens=config.train.kda_segment_tokens,
            kda_recompute=config.train.kda_recompute,
            context_order=config.parallel.context_order,
        )
        for layer in layers
    ]
    elements = connect_layers(
        config,
        specs,
        layers=layers,
        chunk=virtual_stage * config.parallel.pipeline + pipeline_rank,
        cache=cache or SourceCache(),
    )
    norm = partial(RMSNorm, kernels=config.model.kernels)
    return TransformerBlockSubmodules(layer_specs=elements, layer_norm=norm)
