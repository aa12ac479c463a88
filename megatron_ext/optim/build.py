"""From the configuration to megatron-core's optimizer, and what is done with it each step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import (
    ChainedOptimizer,
    MegatronOptimizer,
    get_megatron_optimizer,
)
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_ext.config.schema import RunConfig
from megatron_ext.model.freeze import parameter_names
from megatron_ext.optim import groups, mcore_adam
from megatron_ext.optim.copies import fuse_copies
from megatron_ext.parallel.mcore_config import optimizer_config

group_table = groups.group_table


def build_optimizer(
    config: RunConfig,
    chunks: Sequence[DistributedDataParallel],
    mesh: ProcessGroupCollection,
    *,
    late: Callable[[str], int] = lambda name: 0,
) -> MegatronOptimizer:
    """AdamW over the trainable parameters of all chunks of this rank.

    Fused where there is a fused one, sharded over data parallel ranks with
    `parallel.distributed_optimizer`, with float32 main weights for bf16 chunks. The norm that
    `step()` returns is never None: `optim.clip_grad=0` turns clipping off, not the norm.

    Args:
        config: the validated configuration.
        chunks: the model chunks, wrapped in megatron-core's DistributedDataParallel.
        mesh: the process groups.
        late: by name of a parameter, the updates of the run that its moments have not seen.
    """
    for chunk in chunks:
        for name, parameter in parameter_names(chunk.module):
            setattr(parameter, groups.LATE, late(name))
    mcore_adam.install()
    options = optimizer_config(config)
    if options.clip_grad <= 0.0:
        # megatron-core computes no norm at 0; no norm exceeds infinity.
        options = replace(options, clip_grad=float("inf"))
    optimizer = get_megatron_optimizer(
        options,
        list(chunks),
        config_overrides=groups.config_overrides(chunks),
        use_gloo_process_groups=False,
        pg_collection=mesh,
    )
    # megatron-core leaves wd_mult to its own scheduler, which is not used here.
    for group in optimizer.param_groups:
        group["weight_decay"] = config.optim.weight_decay * group["wd_mult"]
    chained = isinstance(optimizer, ChainedOptimizer)
    for part in optimizer.chained_optimizers if chained else [optimizer]:
        if isinstance(part, DistributedOptimizer) and not part.is_stub_optimizer:
            _number_by_dtype(part)
            fuse_copies(part)
    return optimizer


def _number_by_dtype(part: DistributedOptimizer) -> None:
    """Correct the map from a model parameter to its place in a group of the sharded optimizer.

    megatron-core 0.19.2 makes the map in the order of the gradient buffers and then puts a group's
    float32 parameters first. In a bf16 model with float32 parameters in the same group (A_log
    beside norms) the map then names other parameters, and checkpoints mix up their moments.
    """
    for index, (fp32, low) in enumerate(
        zip(part.model_fp32_groups, part.model_float16_groups, strict=True)
    ):
        for order, param in enumerate([*fp32, *low]):
            part.model_param_group_index_map[param] = (index, order)


def set_learning_rate(optimizer: MegatronOptimizer, lr: float) -> None:
    """Set the rate of every group to `lr` times the group's `lr_mult` (1 unless set)."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_mult", 1.0)
