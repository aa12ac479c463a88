"""Rules between options of mixtures of experts. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron_ext.config.architecture import FP8_ALIGNMENT
from megatron_ext.config.layout import expert_layers, model_parallel_size
from megatron_ext.config.problem import Problem
from megatron_ext.config.ranges import divisors, nearest, nearest_multiples
from megatron_ext.config.schema import (
    Device,
    ExpertBackend,
    ExpertFp8,
    Mode,
    Precision,
    RunConfig,
)


def expert_problems(config: RunConfig, world_size: int | None) -> Iterator[Problem]:
    """What is wrong with experts and how they are spread. Single values are in their ranges.

    Args:
        world_size: ranks of the job or of the plan; None: not known.
    """
    model, parallel, experts = config.model, config.parallel, config.model.experts
    first = model.first_dense_layers
    if first is not None and first >= model.num_layers:
        yield Problem(
            f"model.first_dense_layers={first}: must be less than model.num_layers="
            f"{model.num_layers} (nearest {model.num_layers - 1}; or null, that is every layer "
            "dense)",
            ("model.first_dense_layers", "model.num_layers"),
        )
    if not expert_layers(model):
        for key in ("expert", "expert_tensor"):
            size = getattr(parallel, key)
            if size > 1:
                yield Problem(
                    f"parallel.{key}={size}: there are no layers of experts to spread (allowed 1; "
                    "or model.first_dense_layers=1, which makes all layers but the first such)",
                    (f"parallel.{key}", "model.first_dense_layers"),
                )
        if config.train.expert_chunk_tokens is not None:
            yield Problem(
                f"train.expert_chunk_tokens={config.train.expert_chunk_tokens}: there are no "
                "layers of experts to give chunks to (allowed null; or model.first_dense_layers=1)",
                ("train.expert_chunk_tokens", "model.first_dense_layers"),
            )
        if experts.fp8 is not ExpertFp8.none:
            yield Problem(
                f"model.experts.fp8={experts.fp8.name}: there are no layers of experts (allowed "
                "none; or model.first_dense_layers=1)",
                ("model.experts.fp8", "model.first_dense_layers"),
            )
        return
    if experts.top_k > experts.num_experts:
        yield Problem(
            f"model.experts.top_k={experts.top_k}: must be at most model.experts.num_experts="
            f"{experts.num_experts} (nearest {experts.num_experts})",
            ("model.experts.top_k", "model.experts.num_experts"),
        )
    in_bf16 = (ExpertBackend.grouped_mm, ExpertBackend.transformer_engine)
    if experts.backend in in_bf16 and config.run.precision is Precision.fp32:
        yield Problem(
            f"model.experts.backend={experts.backend.name}: takes bfloat16 only, and "
            "run.precision=fp32 was given (allowed loop, auto; or run.precision=bf16)",
            ("model.experts.backend", "run.precision"),
        )
    yield from _fp8_problems(config)
    spread = {"expert": "num_experts", "expert_tensor": "feed_forward_size"}
    wrong = False
    for key, name in spread.items():
        size, count = getattr(parallel, key), getattr(experts, name)
        if count % size:
            wrong, allowed = True, divisors(count)
            yield Problem(
                f"parallel.{key}={size}: must divide model.experts.{name}={count} (allowed "
                f"{', '.join(map(str, allowed))}; nearest {nearest(size, allowed)})",
                (f"parallel.{key}", f"model.experts.{name}"),
            )
    needed = parallel.expert * parallel.expert_tensor * parallel.pipeline
    dense = model_parallel_size(parallel)
    # A number of ranks that the dense part cannot use is reported for that.
    if not wrong and world_size is not None and world_size % dense == 0 and world_size % needed:
        planned = config.run.mode is Mode.plan
        given = f"plan.world_size={world_size}" if planned else f"ranks={world_size}"
        both = math.lcm(needed, dense)
        yield Problem(
            f"{given}: must be a multiple of expert {parallel.expert} x expert_tensor "
            f"{parallel.expert_tensor} x pipeline {parallel.pipeline} = {needed} "
            f"(nearest {nearest_multiples(world_size, both)}"
            + (")" if planned else "; torchrun --nproc-per-node sets it)"),
            (
                "plan.world_size",
                "parallel.expert",
                "parallel.expert_tensor",
                "parallel.pipeline",
            ),
        )


def _fp8_problems(config: RunConfig) -> Iterator[Problem]:
    """Kernels of FP8 that cannot take these options. Which GPU it is, is known only in the run."""
    model, experts = config.model, config.model.experts
    if experts.fp8 is ExpertFp8.none:
        return
    given = f"model.experts.fp8={experts.fp8.name}"
    if experts.backend is not ExpertBackend.transformer_engine:
        yield Problem(
            f"{given}: is Transformer Engine's, and model.experts.backend={experts.backend.name} "
            "was given (allowed none; or model.experts.backend=transformer_engine)",
            ("model.experts.fp8", "model.experts.backend"),
        )
        if config.run.precision is not Precision.bf16:  # else said for the backend
            yield Problem(
                f"{given}: takes bfloat16 only, and run.precision={config.run.precision.name} was "
                "given (allowed none; or run.precision=bf16)",
                ("model.experts.fp8", "run.precision"),
            )
        if config.run.device is Device.cpu:
            yield Problem(
                f"{given}: needs a GPU, and run.device=cpu was given (allowed none; or "
                "run.device=auto)",
                ("model.experts.fp8", "run.device"),
            )
    latent = "hidden_size" if experts.latent_size is None else "experts.latent_size"
    ranks = config.parallel.expert_tensor
    for name, width, parts in (
        (latent, experts.latent_size or model.hidden_size, 1),
        ("experts.feed_forward_size", experts.feed_forward_size, ranks),
    ):
        if width % (parts * FP8_ALIGNMENT) and not width % parts:
            of_ranks = f" x parallel.expert_tensor={parts}" if parts > 1 else ""
            yield Problem(
                f"{given}: model.{name}={width} must be a multiple of {FP8_ALIGNMENT}{of_ranks} "
                f"(nearest {nearest_multiples(width, parts * FP8_ALIGNMENT)}; or none)",
                ("model.experts.fp8", f"model.{name}")
                + (("parallel.expert_tensor",) if parts > 1 else ()),
            )
