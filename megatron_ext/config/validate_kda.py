"""Rules of linear attention. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_ext.config.problem import Problem
from megatron_ext.config.schema import Device, Gate, KdaBackend, KdaOptions, Precision, RunConfig

FLA_LARGEST_HEAD = 256
KERNEL_HEAD = 128  # of the backends cudnn and triton
# What `train.kda_recompute=false` can be had with, and why not with others.
KEEPING = (KdaBackend.fla, KdaBackend.triton)
WHY_NOT = {
    KdaBackend.reference: "it keeps all that it makes already",
    KdaBackend.dense: "it keeps all that it makes already",
    KdaBackend.cudnn: "its kernels hand nothing over to keep",
}


def kda_problems(config: RunConfig) -> Iterator[Problem]:
    """What is wrong with `model.kda`, for a model that has such layers."""
    kda = config.model.kda
    if kda.gate is not Gate.softplus and not -5.0 <= kda.lower_bound < 0.0:
        yield Problem(
            f"model.kda.lower_bound={kda.lower_bound:g}: must be in [-5, 0) for "
            f"model.kda.gate={kda.gate.name}, since 16 tokens at a stronger decay leave the "
            f"range of bfloat16 (nearest {'-5' if kda.lower_bound < -5 else '-0.1'}; or "
            "model.kda.gate=softplus, which is unbounded and slower)",
            ("model.kda.lower_bound", "model.kda.gate"),
        )
    if not config.train.kda_recompute:
        yield from _keeping_problems(config)
    if kda.backend in (KdaBackend.cudnn, KdaBackend.triton):
        yield from _of_128(kda, config.run.precision)
    for key, size in (
        ("model.kda.head_dim", kda.head_dim),
        ("model.kda.value_dim", kda.value_dim),
    ):
        if kda.backend is KdaBackend.fla and size > FLA_LARGEST_HEAD:
            yield Problem(
                f"{key}={size}: must be at most {FLA_LARGEST_HEAD} for model.kda.backend=fla "
                f"(nearest {FLA_LARGEST_HEAD}; or model.kda.backend=dense)",
                (key, "model.kda.backend"),
            )
    if kda.value_dim != kda.head_dim:
        yield Problem(
            f"model.kda.value_dim={kda.value_dim}: must be model.kda.head_dim={kda.head_dim}, "
            "since queries, keys and values are projected together and share one width "
            f"(nearest {kda.head_dim}; or model.kda.head_dim={kda.value_dim})",
            ("model.kda.value_dim", "model.kda.head_dim"),
        )


def absent_problems(config: RunConfig) -> Iterator[Problem]:
    """Options of linear attention, for a model that has no such layers."""
    train = config.train
    why = "there are no layers of linear attention to"
    if train.kda_segment_tokens is not None:
        yield Problem(
            f"train.kda_segment_tokens={train.kda_segment_tokens}: {why} cut (allowed null; or "
            "model.attention=interleaved)",
            ("train.kda_segment_tokens", "model.attention"),
        )
    if not train.kda_recompute:
        yield Problem(
            f"train.kda_recompute=false: {why} keep anything of (allowed true; or "
            "model.attention=interleaved)",
            ("train.kda_recompute", "model.attention"),
        )


def _keeping_problems(config: RunConfig) -> Iterator[Problem]:
    backend, key = config.model.kda.backend, "train.kda_recompute"
    on_cpu = config.run.device is Device.cpu
    if backend in WHY_NOT:
        yield Problem(
            f"{key}=false: cannot be had with model.kda.backend={backend.name}: {WHY_NOT[backend]} "
            f"(allowed auto, fla, triton; or {key}=true)",
            (key, "model.kda.backend"),
        )
    elif backend is KdaBackend.auto and (on_cpu or config.run.deterministic):
        why, other = "run.device=cpu", "run.device=auto"
        if not on_cpu:
            why, other = "run.deterministic=true", "run.deterministic=false"
        yield Problem(
            f"{key}=false: cannot be had with {why}, where model.kda.backend=auto is dense: "
            f"{WHY_NOT[KdaBackend.dense]} (nearest {key}=true; or {other})",
            (key, why.partition("=")[0], "model.kda.backend"),
        )


def _of_128(kda: KdaOptions, precision: Precision) -> Iterator[Problem]:
    """What cudnn and triton ask for, whose kernels are made for one shape."""
    key = f"model.kda.backend={kda.backend.name}"
    if kda.head_dim != KERNEL_HEAD:
        yield Problem(
            f"model.kda.head_dim={kda.head_dim}: must be {KERNEL_HEAD} for {key} "
            f"(nearest {KERNEL_HEAD}, with model.kda.value_dim; or model.kda.backend=auto)",
            ("model.kda.head_dim", "model.kda.backend"),
        )
    if kda.gate is Gate.softplus:
        yield Problem(
            f"model.kda.gate=softplus: must be bounded or bounded_plain for {key}, whose kernel "
            "overflows where 16 tokens decay by more than 88 nats (nearest bounded; or "
            "model.kda.backend=auto)",
            ("model.kda.gate", "model.kda.backend"),
        )
    if precision is not Precision.bf16:
        yield Problem(
            f"run.precision={precision.name}: must be bf16 for {key}, whose queries, keys and "
            "values are bfloat16 (nearest bf16; or model.kda.backend=auto)",
            ("run.precision", "model.kda.backend"),
        )
