"""Which backend of KDA runs."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ext.config.schema import Gate, KdaBackend
from megatron_ext.config.validate_kda import KEEPING, WHY_NOT
from megatron_ext.errors import ConfigError
from megatron_ext.ops.kda import cudnn, fla, own_fit


def resolve_backend(
    backend: KdaBackend,
    device: torch.device,
    dtype: torch.dtype,
    *,
    head_dim: int,
    value_dim: int,
    gate: Gate,
    lower_bound: float,
) -> KdaBackend:
    """The backend that will run: what is asked for where it can, else ``dense``; cudnn and triton
    are never replaced.

    Args:
        backend: what the configuration asks for; ``auto`` is triton where it can run and was
            measured (``own_fit``), else fla where that can run, else dense.
        device: of the tensors.
        dtype: of queries, keys and values; where they differ, the one that holds all of them.
        head_dim: width K of a key head.
        value_dim: width V of a value head.
        gate: form of the decay gate.
        lower_bound: smallest log-decay a token, in nats. Not used by ``softplus``.

    Returns:
        ``reference``, ``dense``, ``fla``, ``cudnn`` or ``triton``; never ``auto``.

    Raises:
        ConfigError: ``cudnn`` or ``triton``, which cannot run there.
    """
    if backend in (KdaBackend.reference, KdaBackend.dense):
        return backend
    if backend is KdaBackend.cudnn:
        cudnn.require(device, head_dim=head_dim, gate=gate)
        return backend
    if backend in (KdaBackend.auto, KdaBackend.triton):
        reasons = own_fit.misfits(
            device,
            dtype,
            head_dim=head_dim,
            value_dim=value_dim,
            gate=gate,
            lower_bound=lower_bound,
        )
        if backend is KdaBackend.triton and reasons:
            raise own_fit.refusal(reasons)
        if not reasons and (backend is KdaBackend.triton or own_fit.measured(device)):
            return KdaBackend.triton
    usable = fla.available(device) and head_dim <= fla.MAX_HEAD_DIM
    return KdaBackend.fla if usable else KdaBackend.dense


def require_keeping(chosen: KdaBackend, asked: KdaBackend, device: torch.device) -> None:
    """Refuse a backend that cannot keep what its backward pass needs.

    Args:
        chosen: by ``resolve_backend``, of what was ``asked`` for on a ``device``.

    Raises:
        ConfigError: it is neither fla nor triton.
    """
    if chosen not in KEEPING:
        raise ConfigError(
            f"train.kda_recompute=false: model.kda.backend={asked.value} is {chosen.value} on "
            f"{device.type}, and {WHY_NOT[chosen]} (allowed train.kda_recompute=true; or a GPU "
            "with fla-core and model.kda.backend=auto, fla or triton)"
        )


def choose(
    backend: KdaBackend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    gate: Gate,
    lower_bound: float,
    require: bool,
    recompute: bool,
) -> KdaBackend:
    """``resolve_backend`` for these tensors, arguments as ``megatron_ext.ops.kda.kda``.

    Raises:
        ConfigError: as ``kda``.
    """
    device, head_dim = q.device, q.shape[-1]
    chosen = resolve_backend(
        backend,
        device,
        torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype),
        head_dim=head_dim,
        value_dim=v.shape[-1],
        gate=gate,
        lower_bound=lower_bound,
    )
    if not recompute and torch.is_grad_enabled():  # nothing is kept without gradients
        require_keeping(chosen, backend, device)
    wanted = device.type == "cuda" if backend is KdaBackend.auto else backend is KdaBackend.fla
    if require and wanted and chosen is KdaBackend.dense:
        raise ConfigError(
            f"model.kda.backend: given {backend.value} with require on {device}, head_dim "
            f"{head_dim}; fla cannot run there (it needs a CUDA device, the package fla-core and "
            f"head_dim <= {fla.MAX_HEAD_DIM}); use dense, or model.kda.require=false"
        )
    return chosen
