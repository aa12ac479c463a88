"""Copies between model and main parameters of a sharded optimizer, all in one call.

megatron-core 0.19.2 looks up where a parameter lies and copies it, one after the other, between the
gradient norm and the next forward pass, when the GPU has nothing to do. Places do not change in a
run, so they are looked up once.
"""

from __future__ import annotations

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor


def fuse_copies(part: DistributedOptimizer) -> None:
    """Replace an optimizer's two methods that copy, where main parameters are plain float32.

    Does nothing for what has other storage (FP8, FP4, FSDP, moments of low precision).
    """
    ddp = part.ddp_config
    if (
        ddp.use_megatron_fsdp
        or ddp.fp8_param_gather
        or ddp.fp4_param_gather
        or part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
    ):
        return
    mains, weights, grads = _places(part)
    if any(grad.dtype != torch.float32 for grad in grads):
        return

    def copy_grads() -> None:
        for main, grad in zip(mains, grads, strict=True):
            main.grad = grad

    def copy_weights() -> None:
        if weights:  # this rank's share of the buffers may be padding alone
            torch._foreach_copy_(weights, mains)

    part._copy_model_grads_to_main_grads = copy_grads
    part._copy_main_params_to_model_params = copy_weights


def _places(part: DistributedOptimizer) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Main parameters of this rank, and its pieces of their weights and gradients, all flat."""
    mains: list[Tensor] = []
    weights: list[Tensor] = []
    grads: list[Tensor] = []
    for main_groups, model_groups in (
        (part.shard_fp32_from_float16_groups, part.model_float16_groups),
        (part.shard_fp32_groups, part.model_fp32_groups),
    ):
        for main_group, model_group in zip(main_groups, model_groups, strict=True):
            for main, model in zip(main_group, model_group, strict=True):
                own = part._get_model_param_range_map(model)
                number, _, bucket = part.model_param_gbuf_map[model]
                data = part.buffers[number].buckets[bucket].param_data
                place = own["gbuf_world_in_bucket"]
                mains.append(main)
                weights.append(data.view(-1)[place.start : place.end])
                piece = own["param"]
                grads.append(model.main_grad.view(-1)[piece.start : piece.end])
    return mains, weights, grads
