"""The check of kernels at the start of a run: what computes wrongly stops it before it costs."""

from __future__ import annotations

import torch

from megatron_ext.config.layout import LayerKind, layer_kinds
from megatron_ext.config.schema import KdaBackend, KdaCheck, Precision, RunConfig
from megatron_ext.errors import ConfigError
from megatron_ext.ops.kda import require_keeping, resolve_backend
from megatron_ext.ops.kda.check import Problem, rejection


def kda_backend(config: RunConfig, device: torch.device) -> KdaBackend:
    """The backend of KDA that a run takes on a device.

    Raises:
        ConfigError: cudnn or triton, which cannot run there; `train.kda_recompute=false` where the
            backend has no such choice.
    """
    kda = config.model.kda
    chosen = resolve_backend(
        kda.backend,
        device,
        torch.bfloat16 if config.run.precision is Precision.bf16 else torch.float32,
        head_dim=kda.head_dim,
        value_dim=kda.value_dim,
        gate=kda.gate,
        lower_bound=kda.lower_bound,
    )
    if not config.train.kda_recompute:
        require_keeping(chosen, kda.backend, device)
    return chosen


def check_kda(config: RunConfig, device: torch.device) -> None:
    """Compare the backend of KDA that this rank will use with the formula, at the rank's shape.

    Once a process, before anything large is built; it takes one layer's memory and, once kernels
    are compiled, less than a second. See `ops.kda.check`; `model.kda.check` says when.

    Raises:
        ConfigError: the backend is too inaccurate, fails, or (cudnn, triton) cannot run here.
    """
    model, kda = config.model, config.model.kda
    if not {LayerKind.kda, LayerKind.gated} & set(layer_kinds(model)):
        return
    chosen = kda_backend(config, device)
    kernels = chosen in (KdaBackend.fla, KdaBackend.cudnn, KdaBackend.triton)
    judged = kernels or kda.check is KdaCheck.always
    if kda.check is KdaCheck.never or not judged:
        return
    dtype = torch.bfloat16 if config.run.precision is Precision.bf16 else torch.float32
    reason = rejection(problem_of(config), backend=chosen, device=device, dtype=dtype)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if reason is None:
        return
    others = [name for name in ("fla", "dense") if name != chosen.value]
    raise ConfigError(
        f"model.kda.backend={kda.backend.value}: {chosen.value} is rejected on "
        f"{_name(device)}, since on the input of the check {reason} (allowed "
        f"model.kda.backend={' or '.join(others)}; where fla tuned itself here, other variants of "
        "its kernels (docs/kda.md); where only one GPU says so, leave it out; "
        "model.kda.check=never trains all the same)"
    )


def problem_of(config: RunConfig) -> Problem:
    """One call of KDA on a rank, in training."""
    kda, parallel, train = config.model.kda, config.parallel, config.train
    packed = config.data.isolate_documents
    rows = 1 if packed else train.micro_batch_size
    length = config.data.sequence_length * (train.micro_batch_size if packed else 1)
    return Problem(
        heads=kda.num_heads // parallel.tensor,
        tokens=length // parallel.context,
        width=kda.head_dim,
        batch=rows,
        gate=kda.gate,
        lower_bound=kda.lower_bound,
        documents=packed,
        recompute=train.kda_recompute,
    )


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
