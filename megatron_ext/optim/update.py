"""An optimizer step in two halves, so that the gradient norm can be judged before it is applied."""

from __future__ import annotations

import torch
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32


@torch.no_grad()
def gradient_norm(optimizer: MegatronOptimizer) -> float:
    """Hand the reduced gradients to the optimizer and return the L2 norm of all of them.

    Collective. Changes no weight: without `apply_update` the step has left no trace. It waits for
    the device.
    """
    # No loss scale is used, so nothing is unscaled or found infinite here.
    optimizer.prepare_grads()
    return float(optimizer.get_grad_norm())


@torch.no_grad()
def apply_update(optimizer: MegatronOptimizer, *, grad_norm: float) -> None:
    """Clip by the norm of all gradients and update the weights: megatron-core's `step` from there.

    Args:
        optimizer: after `gradient_norm`.
        grad_norm: what that returned; finite.
    """
    chained = isinstance(optimizer, ChainedOptimizer)
    for part in optimizer.chained_optimizers if chained else [optimizer]:
        parameters = [] if getattr(part, "is_stub_optimizer", False) else part.get_parameters()
        if parameters:
            clip_grad_by_total_norm_fp32(
                parameters, max_norm=part.config.clip_grad, total_norm=grad_norm
            )
    optimizer.step_with_ready_grads()
