"""Rules of `train.cuda_graph`. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_ext.config.layout import expert_layers
from megatron_ext.config.problem import Problem
from megatron_ext.config.schema import (
    AttentionBackend,
    BalanceRule,
    Device,
    Dispatcher,
    ExpertBackend,
    KdaBackend,
    Mode,
    ModelOptions,
    Precision,
    Recompute,
    RunConfig,
)

KDA_STEADY = (KdaBackend.auto, KdaBackend.fla, KdaBackend.triton)
# Rules that take as many rows every time, and keep their statistics in place.
STEADY_RULES = (BalanceRule.quantile, BalanceRule.sign, BalanceRule.none)
# Of the widths of experts that grouped_mm takes: for others `auto` is the loop, which waits.
WIDTH = 8


def graph_problems(config: RunConfig) -> Iterator[Problem]:
    """What a captured micro-batch cannot contain: shapes that vary, waits, and what was not tried.

    Messages between ranks are in the last group: they can be captured, and were not.
    """
    if not config.train.cuda_graph or config.run.mode not in (Mode.train, Mode.plan):
        return  # nothing is captured
    parallel, train, model = config.parallel, config.train, config.model
    needed: list[tuple[str, object, tuple[object, ...]]] = [
        ("run.device", config.run.device, (Device.auto, Device.cuda)),
        ("data.isolate_documents", config.data.isolate_documents, (False,)),
        ("train.recompute", train.recompute, (Recompute.none,)),
        ("train.expert_chunk_tokens", train.expert_chunk_tokens, (None,)),
        ("train.kda_segment_tokens", train.kda_segment_tokens, (None,)),
        # Its `auto` for linear attention is dense.
        ("run.deterministic", config.run.deterministic, (False,)),
        ("model.kda.backend", model.kda.backend, KDA_STEADY),
        ("model.mla.backend", model.mla.backend, (AttentionBackend.auto, AttentionBackend.sdpa)),
    ]
    if expert_layers(model):
        grouped = (ExpertBackend.auto, ExpertBackend.grouped_mm)
        needed += [
            ("run.precision", config.run.precision, (Precision.bf16,)),
            ("model.experts.backend", model.experts.backend, grouped),
            # megatron-core's other one asks the device for the number of rows.
            ("model.experts.dispatcher", model.experts.dispatcher, (Dispatcher.alltoall,)),
            ("balance.rule", config.balance.rule, STEADY_RULES),
        ]
    needed += [
        (f"parallel.{key}", getattr(parallel, key), (1,))
        for key in ("tensor", "pipeline", "virtual_pipeline", "context", "expert", "expert_tensor")
    ]
    needed.append(("parallel.overlap_grad_reduce", parallel.overlap_grad_reduce, (False,)))
    for key, given, allowed in needed:
        if given not in allowed:
            words = ", ".join(_word(value) for value in allowed)
            yield Problem(
                f"train.cuda_graph=true: cannot have {key}={_word(given)} (allowed {words}; or "
                "train.cuda_graph=false)",
                ("train.cuda_graph", key),
            )
    if expert_layers(model):
        yield from _width_problems(model)


def _width_problems(model: ModelOptions) -> Iterator[Problem]:
    latent = "hidden_size" if model.experts.latent_size is None else "experts.latent_size"
    width = model.experts.latent_size or model.hidden_size
    widths = {latent: width, "experts.feed_forward_size": model.experts.feed_forward_size}
    for name, given in widths.items():
        if given % WIDTH:
            key = f"model.{name}"
            yield Problem(
                f"train.cuda_graph=true: cannot have {key}={given}, by which experts run one "
                f"after the other (allowed multiples of {WIDTH}; or train.cuda_graph=false)",
                ("train.cuda_graph", key),
            )


def _word(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(getattr(value, "name", value))
