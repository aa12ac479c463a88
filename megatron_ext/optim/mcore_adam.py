"""The one place that replaces megatron-core's choice of Adam and of gradient norm.

Why: with neither Transformer Engine nor Apex installed, megatron-core falls back to
`torch.optim.AdamW`, which keeps its step count as a tensor in each parameter's state. Its
distributed optimizer cannot load that from a checkpoint (`state_dict` wants one step where a fresh
optimizer has none, `fully_reshardable` raises KeyError 'step'). Its fallback norm copies one scalar
a gradient from the device: 150 to 590 waits a step on a GPU. `install` puts what is below in their
place and does nothing where Transformer Engine or Apex is installed: theirs are right and fused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import megatron.core.optimizer as mcore_optimizer
import torch
from megatron.core.optimizer import clip_grads, distrib_optimizer
from megatron.core.optimizer import optimizer as mcore_optimizer_base
from torch import Tensor


class Adam(torch.optim.Optimizer):
    """Adam with decoupled weight decay, shaped like Transformer Engine's FusedAdam.

    Loshchilov and Hutter, "Decoupled weight decay regularization", algorithm 2, with the order of
    operations of `torch.optim.AdamW`, whose results it repeats:

        p <- p (1 - lr wd);  m <- m + (1 - b1)(g - m);  v <- b2 v + (1 - b2) g^2
        p <- p - lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps)

    What differs is where state lives: `step` is an int in the parameter group, the state of a
    parameter is `exp_avg` and `exp_avg_sq` only, in float32 or wider. CUDA tensors take torch's
    fused kernel, others the formula.

    Args:
        params: parameters or groups; a group may have its own lr, betas, eps, weight_decay.
        lr: learning rate.
        betas: decay of the first and second moment, each in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: decoupled decay, relative to lr.
        adam_w_mode: must be True. Given by megatron-core.
        capturable: must be False (the step is an int, so a CUDA graph cannot hold it). Given by
            megatron-core.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        capturable: bool = False,
    ) -> None:
        if not adam_w_mode:
            raise ValueError("adam_w_mode=False: only decoupled weight decay is implemented")
        if capturable:
            raise ValueError("capturable=True: not implemented; turn optimizer_cuda_graph off")
        if not (0.0 <= betas[0] < 1.0 and 0.0 <= betas[1] < 1.0):
            raise ValueError(f"betas={betas}: each must be in [0, 1)")
        if eps < 0.0 or weight_decay < 0.0:
            raise ValueError(f"eps={eps}, weight_decay={weight_decay}: neither may be negative")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient. Takes no closure."""
        if closure is not None:
            raise ValueError("Adam.step takes no closure")
        for group in self.param_groups:
            # Every group counts, also one that is empty on this rank: a later layout may fill it.
            group["step"] = int(group.get("step", 0)) + 1
            # One call for each device and dtype: the fused kernel takes no mixture.
            batches: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
            for param in group["params"]:
                if param.grad is not None and param.numel() > 0:
                    batches.setdefault((param.device, param.dtype), []).append(param)
            for (device, _), params in batches.items():
                states = [self._moments(param) for param in params]
                update = _fused_update if device.type == "cuda" else _formula_update
                update(
                    params,
                    [param.grad for param in params if param.grad is not None],
                    [state["exp_avg"] for state in states],
                    [state["exp_avg_sq"] for state in states],
                    step=group["step"],
                    lr=float(group["lr"]),
                    betas=group["betas"],
                    eps=group["eps"],
                    weight_decay=group["weight_decay"],
                )

    def _moments(self, param: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[param]
        if "exp_avg" not in state:
            dtype = torch.promote_types(param.dtype, torch.float32)
            state["exp_avg"] = torch.zeros_like(param, dtype=dtype)
            state["exp_avg_sq"] = torch.zeros_like(param, dtype=dtype)
        return state


def _formula_update(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """The update as lists of tensors, operation by operation as the class docstring has it."""
    beta1, beta2 = betas
    if weight_decay != 0.0:
        torch._foreach_mul_(params, 1 - lr * weight_decay)
    torch._foreach_lerp_(exp_avgs, grads, 1 - beta1)
    torch._foreach_mul_(exp_avg_sqs, beta2)
    torch._foreach_addcmul_(exp_avg_sqs, grads, grads, 1 - beta2)
    denominators = torch._foreach_sqrt(exp_avg_sqs)
    torch._foreach_div_(denominators, math.sqrt(1 - beta2**step))
    torch._foreach_add_(denominators, eps)
    torch._foreach_addcdiv_(params, exp_avgs, denominators, -(lr / (1 - beta1**step)))


def _fused_update(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """The same in torch's fused CUDA kernel: a few launches for all parameters, no wait."""
    # `full` fills on the device; `tensor` would copy from the host. The kernel only reads it, so
    # all parameters share it.
    device_step = torch.full((), float(step), dtype=torch.float32, device=params[0].device)
    torch._fused_adamw_(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        [device_step] * len(params),
        lr=lr,
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
        grad_scale=None,
        found_inf=None,
    )


def multi_tensor_l2_norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Sequence[Sequence[Tensor]], per_tensor: bool
) -> tuple[Tensor, None]:
    """Euclidean norm of all tensors together, left on the device.

    Same arguments as Apex's `multi_tensor_l2norm`; `chunk_size` and `noop_flag` are not needed.

    Returns:
        The norm, float32 [1], and None (`per_tensor` must be False). float32 since megatron-core
        reduces it together with the float32 zero of ranks that have no gradient.
    """
    if per_tensor:
        raise ValueError("per_tensor=True: not implemented")
    tensors = [tensor for tensors in tensor_lists for tensor in tensors if tensor.numel() > 0]
    if not tensors:
        return noop_flag.new_zeros(1, dtype=torch.float32), None
    # A CPU reduction in float32 is off by 1e-6 and more for long tensors, which would make the norm
    # depend on how they are cut. CUDA reduces in a tree, which is good to about 1e-7.
    dtype = torch.float64 if tensors[0].device.type == "cpu" else None
    norms = torch.stack([n.double() for n in torch._foreach_norm(tensors, 2.0, dtype=dtype)])
    return torch.linalg.vector_norm(norms).float().reshape(1), None


def multi_tensor_scale(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Sequence[list[Tensor]], scale: float
) -> None:
    """`tensor_lists[1] <- scale * tensor_lists[0]`, cast to the target's dtype. No device wait."""
    source, target = tensor_lists
    if not source:
        return
    if scale == 1.0:
        if source is not target:
            torch._foreach_copy_(target, source)
    elif all(a is b for a, b in zip(source, target, strict=True)):
        torch._foreach_mul_(target, scale)
    else:
        torch._foreach_copy_(target, torch._foreach_mul(source, scale))


def install() -> bool:
    """Give megatron-core the functions above, where it would use its own fallback. Can be repeated.

    Returns:
        True when they are in use, False when Transformer Engine or Apex is installed.
    """
    if mcore_optimizer.Adam is Adam:
        return True
    if not mcore_optimizer.USING_PYTORCH_OPTIMIZER:
        return False
    # Which Adam is built, and with which arguments (adam_w_mode instead of a choice of class).
    mcore_optimizer.Adam = Adam
    mcore_optimizer.USING_PYTORCH_OPTIMIZER = False
    # Where the distributed optimizer finds the step: in the group, as with Apex.
    distrib_optimizer.Adam = Adam
    distrib_optimizer.HAVE_APEX_OR_TE = True
    distrib_optimizer.USING_APEX_OPTIMIZER = True
    # Norm and clipping without one wait a tensor; the copies between model and main parameters too.
    clip_grads.l2_norm_impl = multi_tensor_l2_norm
    clip_grads.multi_tensor_scale_impl = multi_tensor_scale
    mcore_optimizer_base.multi_tensor_scale_impl = multi_tensor_scale
    return True
