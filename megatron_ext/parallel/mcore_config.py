"""The only mapper from our configuration to megatron-core's configuration objects."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_ext.config.layout import expert_layers, sequence_parallel, stage_layers
from megatron_ext.config.schema import (
    AttentionPattern,
    Precision,
    Recompute,
    ResidualKind,
    RunConfig,
)


def transformer_config(config: RunConfig) -> TransformerConfig:
    """What megatron-core's modules and schedules read.

    - No weights are drawn while building: `model.init` does it, the same in every layout.
    - Losses are sums over tokens, divided once by the tokens of the global batch. This must be
      set before DDP is built, which takes its gradient scaling from it.
    - Fused kernels of Apex and Transformer Engine are off: they exist on GPUs only, and our
      modules choose their own backends.
    - Pipeline stages are given layer by layer, so that ours is the one place that splits them.
    """
    model, parallel = config.model, config.parallel
    dtype = parameter_dtype(config)
    interleaved = parallel.virtual_pipeline > 1
    heads = model.kda.num_heads if model.attention is AttentionPattern.kda else model.mla.num_heads
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.feed_forward_size,
        num_attention_heads=heads,
        kv_channels=model.mla.v_head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_eps,
        init_method_std=model.init_std,
        gated_linear_unit=True,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        # layout
        tensor_model_parallel_size=parallel.tensor,
        sequence_parallel=sequence_parallel(parallel),
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline if interleaved else None,
        pipeline_model_parallel_layout=pipeline_layout(config),
        context_parallel_size=parallel.context,
        # With two stages and overlap off, the interleaved schedule gives wrong numbers without a
        # word (megatron-core 0.19.2); batched sends and overlap exclude each other.
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        deallocate_pipeline_outputs=True,
        variable_seq_lengths=False,
        # numbers
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        pipeline_dtype=pipeline_dtype(config),
        autocast_dtype=dtype,
        calculate_per_token_loss=True,
        perform_initialization=False,
        # False on the CPU as well: the generator tracker's path is then the same as on GPUs.
        use_cpu_initialization=False,
        deterministic_mode=config.run.deterministic,
        # kernels that exist with Apex or Transformer Engine only
        transformer_impl="local",
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        moe_permute_fusion=False,
        moe_router_fusion=False,
        moe_grouped_gemm=False,
        **_experts(config),
        **_recompute(config),
    )


def ddp_config(config: RunConfig) -> DistributedDataParallelConfig:
    """How gradients are summed over data parallel ranks: always in float32."""
    parallel = config.parallel
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=parallel.distributed_optimizer,
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
        average_in_collective=False,
    )


def optimizer_config(config: RunConfig) -> OptimizerConfig:
    """AdamW with decoupled weight decay; float32 main weights and moments in a bf16 run."""
    optim, parallel = config.optim, config.parallel
    dtype = parameter_dtype(config)
    return OptimizerConfig(
        optimizer="adam",
        lr=optim.lr,
        min_lr=optim.lr * optim.min_lr_ratio,
        weight_decay=optim.weight_decay,
        decoupled_weight_decay=True,
        adam_beta1=optim.beta1,
        adam_beta2=optim.beta2,
        adam_eps=optim.eps,
        clip_grad=optim.clip_grad,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=parallel.distributed_optimizer,
        overlap_param_gather=parallel.overlap_param_gather,
    )


def parameter_dtype(config: RunConfig) -> torch.dtype:
    """The dtype of weights and activations; parameters that stay float32 choose it themselves."""
    return torch.bfloat16 if config.run.precision is Precision.bf16 else torch.float32


def pipeline_dtype(config: RunConfig) -> torch.dtype:
    """The dtype of what stages send each other, and of the gradients that come back."""
    return torch.float32 if config.residual.fp32 else parameter_dtype(config)


def pipeline_layout(config: RunConfig) -> list[list[str]] | None:
    """Our stages in megatron-core's form: one list a global chunk (chunk c of rank r is number
    c * pipeline + r), with the embedding first and the loss last. None for one chunk."""
    parallel = config.parallel
    if parallel.pipeline == 1:
        return None
    stages = stage_layers(parallel, config.model.num_layers)
    chunks = [
        ["decoder"] * len(stages[rank][virtual])
        for virtual in range(parallel.virtual_pipeline)
        for rank in range(parallel.pipeline)
    ]
    chunks[0].insert(0, "embedding")
    chunks[-1].append("loss")
    return chunks


def _experts(config: RunConfig) -> dict[str, Any]:
    """What megatron-core's token dispatchers and schedules ask for; its router is not used."""
    if not expert_layers(config.model):
        return {}
    experts, parallel = config.model.experts, config.parallel
    return {
        "num_moe_experts": experts.num_experts,
        "moe_router_topk": experts.top_k,
        "moe_ffn_hidden_size": experts.feed_forward_size,
        "moe_token_dispatcher_type": experts.dispatcher.value,
        # The balancers are ours; this keeps megatron-core from starting one of its own.
        "moe_router_load_balancing_type": "none",
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": parallel.expert_tensor,
    }


def _recompute(config: RunConfig) -> dict[str, Any]:
    """What the backward pass computes again: nothing, attention cores and feed-forwards, or every
    layer from its input. Layers between several tensors do the last by themselves."""
    recompute = config.train.recompute
    if recompute is Recompute.none:
        return {}
    if recompute is Recompute.selective:
        return {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]}
    if config.residual.kind is not ResidualKind.standard:
        return {}
    return {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
