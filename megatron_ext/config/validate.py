"""Rules between options: all that is wrong, each with the nearest value that works. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron_ext.config.layout import (
    VOCAB_MULTIPLE,
    LayerKind,
    expert_layers,
    layer_kinds,
    model_parallel_size,
)
from megatron_ext.config.operations_rules import (
    evaluation_problems,
    generate_problems,
    launch_problems,
    plan_problems,
    profile_problems,
    replay_problems,
    resilience_problems,
    score_problems,
)
from megatron_ext.config.problem import Problem
from megatron_ext.config.ranges import RANGES, divisors, nearest, nearest_multiples
from megatron_ext.config.schedule_rules import schedule_problems
from megatron_ext.config.schema import (
    AttentionBackend,
    AttentionPattern,
    ContextOrder,
    Device,
    ExpertBackend,
    KdaBackend,
    KernelBackend,
    Mode,
    Packing,
    RunConfig,
)
from megatron_ext.config.trainable import trainable_problems
from megatron_ext.config.validate_balance import balance_problems
from megatron_ext.config.validate_experts import expert_problems
from megatron_ext.config.validate_graph import graph_problems
from megatron_ext.config.validate_kda import absent_problems, kda_problems
from megatron_ext.config.validate_residual import residual_problems
from megatron_ext.errors import ConfigError


def validate(config: RunConfig, world_size: int | None) -> None:
    """Raise one `ConfigError` that lists everything wrong with ``config``.

    Args:
        world_size: ranks of the job, or None when they are not known yet: then nothing that
            depends on their number is checked. A plan is for `plan.world_size` ranks instead.
    """
    problems = find_problems(config, world_size)
    if problems:
        raise ConfigError([problem.text for problem in problems])


def find_problems(config: RunConfig, world_size: int | None) -> list[Problem]:
    """Everything wrong, in the order of the schema.

    Rules between keys divide by sizes, so they wait until every single value is in its range.
    """
    problems = list(_ranges(config))
    if problems:
        return problems
    if config.run.mode is Mode.plan:
        world_size = config.plan.world_size
    rules = (
        _run(config),
        _model(config),
        balance_problems(config),
        expert_problems(config, world_size),
        _parallel(config, world_size),
        _data(config),
    )
    problems = [problem for rule in rules for problem in rule]
    if not any("parallel.stage_layers" in problem.keys for problem in problems):
        problems += residual_problems(config)
    problems += [*_batch(config, world_size), *_optim(config)]
    for more in (
        resilience_problems,
        launch_problems,
        generate_problems,
        evaluation_problems,
        score_problems,
        plan_problems,
        trainable_problems,
        graph_problems,
    ):
        problems += more(config)
    problems += replay_problems(config, world_size)
    return [*problems, *profile_problems(config, world_size)]


def value_of(config: RunConfig, key: str) -> object:
    """The value at a dotted key."""
    node: object = config
    for part in key.split("."):
        node = getattr(node, part)
    return node


def _ranges(config: RunConfig) -> Iterator[Problem]:
    for key, allowed in RANGES.items():
        value = value_of(config, key)
        if isinstance(value, int | float) and not allowed.holds(value):
            yield Problem(
                f"{key}={value}: must be {allowed} (nearest {allowed.clamp(value)})", (key,)
            )


def _run(config: RunConfig) -> Iterator[Problem]:
    name = config.run.name
    if not name or name in (".", "..") or any(c in name for c in "/\\\0\n"):
        yield Problem(
            f"run.name={name!r}: must be usable as the name of a folder, without slashes "
            "(run.dir=PATH takes a path)",
            ("run.name",),
        )
    kda = config.model.kda
    if config.run.deterministic and kda.require and kda.backend is KdaBackend.auto:
        yield Problem(
            "model.kda.require=true: forbids that model.kda.backend=auto leaves out triton and "
            "fla, and run.deterministic=true does (nearest model.kda.backend=dense)",
            ("model.kda.require", "model.kda.backend", "run.deterministic"),
        )
    # Key, backend, why it is left out of deterministic runs, what is allowed instead.
    wrong, unknown = "is not deterministic", "was not shown to be deterministic"
    on_gpus = (
        ("model.kernels.backend", KernelBackend.triton, "", "reference, dense, auto"),
        ("model.kda.backend", KdaBackend.fla, wrong, "reference, dense, auto"),
        ("model.kda.backend", KdaBackend.cudnn, unknown, "reference, dense, auto"),
        ("model.kda.backend", KdaBackend.triton, wrong, "reference, dense, auto"),
        ("model.mla.backend", AttentionBackend.transformer_engine, wrong, "sdpa, auto"),
        ("model.experts.backend", ExpertBackend.grouped_mm, "", "loop, auto"),
        (
            "model.experts.backend",
            ExpertBackend.transformer_engine,
            wrong,
            "loop, grouped_mm, auto",
        ),
    )
    for key, backend, random, allowed in on_gpus:
        if value_of(config, key) is not backend:
            continue
        if config.run.deterministic and random:
            yield Problem(
                f"{key}={backend.name}: {random}, and run.deterministic=true was "
                f"given (allowed {allowed}; or run.deterministic=false)",
                ("run.deterministic", key),
            )
        if config.run.device is Device.cpu:
            yield Problem(
                f"{key}={backend.name}: needs a GPU, and run.device=cpu was given "
                f"(allowed {allowed}; or run.device=auto)",
                ("run.device", key),
            )


def _model(config: RunConfig) -> Iterator[Problem]:
    model = config.model
    full = model.full_attention_layers
    if full is not None and (
        model.attention is not AttentionPattern.interleaved
        or sorted({*full} & {*range(1, model.num_layers + 1)}) != full
    ):
        yield Problem(
            f"model.full_attention_layers=[{','.join(map(str, full))}]: must be ascending numbers "
            f"from 1 to model.num_layers={model.num_layers}, with model.attention=interleaved "
            "(or null: by model.full_attention_interval)",
            ("model.full_attention_layers", "model.num_layers", "model.attention"),
        )
    kinds = set(layer_kinds(model))
    if kinds == {LayerKind.mla}:
        yield from absent_problems(config)
    if kinds == {LayerKind.kda} and config.parallel.context_order is ContextOrder.head_tail:
        yield Problem(
            "parallel.context_order=head_tail: there are no layers of full attention to balance "
            "(allowed contiguous; or model.attention=interleaved)",
            ("parallel.context_order", "model.attention"),
        )
    if LayerKind.kda in kinds or LayerKind.gated in kinds:
        yield from kda_problems(config)
    if model.vocab_size is not None and model.vocab_size % VOCAB_MULTIPLE:
        yield Problem(
            f"model.vocab_size={model.vocab_size}: must be a multiple of {VOCAB_MULTIPLE} "
            f"(nearest {nearest_multiples(model.vocab_size, VOCAB_MULTIPLE)}; or null for the "
            "tokenizer's own size, rounded up)",
            ("model.vocab_size",),
        )


def _parallel(config: RunConfig, world_size: int | None) -> Iterator[Problem]:
    parallel, model = config.parallel, config.model
    kinds = set(layer_kinds(model))
    divided: dict[str, int] = {}
    if kinds & {LayerKind.kda, LayerKind.gated}:
        divided["model.kda.num_heads"] = model.kda.num_heads
    if kinds & {LayerKind.mla, LayerKind.gated}:
        divided["model.mla.num_heads"] = model.mla.num_heads
    divided["model.feed_forward_size"] = model.feed_forward_size
    if expert_layers(model) and model.experts.shared_feed_forward_size:
        divided["model.experts.shared_feed_forward_size"] = model.experts.shared_feed_forward_size
    # A vocabulary that is not known yet is some multiple of 128.
    divided["model.vocab_size"] = model.vocab_size or VOCAB_MULTIPLE
    wrong = [key for key, size in divided.items() if size % parallel.tensor]
    if wrong:
        allowed = divisors(math.gcd(*divided.values()))
        names = ", ".join(
            f"{key}={divided[key]}"
            if key != "model.vocab_size" or model.vocab_size
            else f"the vocabulary, a multiple of {VOCAB_MULTIPLE}"
            for key in wrong
        )
        yield Problem(
            f"parallel.tensor={parallel.tensor}: must divide {names} (allowed "
            f"{', '.join(map(str, allowed))}; nearest {nearest(parallel.tensor, allowed)})",
            ("parallel.tensor", "parallel.sequence", *divided),
        )
    if parallel.sequence and parallel.tensor == 1:
        yield Problem(
            "parallel.sequence=true: needs parallel.tensor > 1, got 1 (nearest parallel.tensor=2; "
            "or leave parallel.sequence out: it is on by itself when tensor > 1)",
            ("parallel.sequence", "parallel.tensor"),
        )
    yield from _context(config)
    if parallel.virtual_pipeline > 1 and parallel.pipeline == 1:
        yield Problem(
            f"parallel.virtual_pipeline={parallel.virtual_pipeline}: needs parallel.pipeline > 1, "
            "got 1 (nearest parallel.pipeline=2 or parallel.virtual_pipeline=1)",
            ("parallel.virtual_pipeline", "parallel.pipeline"),
        )
    yield from _stage_layers(config)
    if parallel.overlap_param_gather:
        for key in ("distributed_optimizer", "overlap_grad_reduce"):
            if not getattr(parallel, key):
                yield Problem(
                    f"parallel.overlap_param_gather=true: needs parallel.{key}=true, got false",
                    ("parallel.overlap_param_gather", f"parallel.{key}"),
                )
    needed = model_parallel_size(parallel)
    if not wrong and world_size is not None and world_size % needed:
        planned = config.run.mode is Mode.plan
        given = f"plan.world_size={world_size}" if planned else f"ranks={world_size}"
        yield Problem(
            f"{given}: must be a multiple of tensor {parallel.tensor} x pipeline "
            f"{parallel.pipeline} x context {parallel.context} = {needed} "
            f"(nearest {nearest_multiples(world_size, needed)}"
            + (")" if planned else "; torchrun --nproc-per-node sets it)"),
            ("plan.world_size", "parallel.tensor", "parallel.pipeline", "parallel.context"),
        )


def _context(config: RunConfig) -> Iterator[Problem]:
    parallel, model, length = config.parallel, config.model, config.data.sequence_length
    if parallel.context == 1 or config.run.mode is Mode.score:  # which pads its rows
        return
    keys = ("parallel.context", "data.sequence_length")
    if config.run.mode is Mode.generate:
        yield Problem(
            f"parallel.context={parallel.context}: is for long training sequences, and "
            "run.mode=generate grows one from nothing (nearest 1; a checkpoint of any layout can "
            "be read with it)",
            ("parallel.context", "run.mode"),
        )
    row = length * (config.train.micro_batch_size if config.data.isolate_documents else 1)
    fewest = max(1, model.kda.conv_width - 1)
    if row // parallel.context < fewest:
        yield Problem(
            f"parallel.context={parallel.context}: leaves each rank fewer than {fewest} of "
            f"{row} tokens, which the convolution of its neighbour reads (nearest "
            f"{max(1, row // fewest)}; or a longer data.sequence_length)",
            (*keys, "model.kda.conv_width"),
        )


def _stage_layers(config: RunConfig) -> Iterator[Problem]:
    parallel, num_layers = config.parallel, config.model.num_layers
    sizes = parallel.stage_layers
    if sizes is None:
        return
    keys = ("parallel.stage_layers", "parallel.pipeline", "parallel.virtual_pipeline")
    given = f"parallel.stage_layers=[{','.join(map(str, sizes))}]"
    chunks = parallel.pipeline * parallel.virtual_pipeline
    if len(sizes) != chunks:
        yield Problem(
            f"{given}: must have pipeline {parallel.pipeline} x virtual_pipeline "
            f"{parallel.virtual_pipeline} = {chunks} entries, got {len(sizes)} (or null: even)",
            keys,
        )
    if any(size < 0 for size in sizes) or sum(sizes) != num_layers:
        yield Problem(
            f"{given}: entries must be 0 or more and add up to model.num_layers={num_layers}, "
            f"got {sum(sizes)} (or null: even)",
            (*keys, "model.num_layers"),
        )


def _data(config: RunConfig) -> Iterator[Problem]:
    data = config.data
    reads = config.run.mode in (Mode.train, Mode.evaluate)
    if reads and not data.sources and not data.demo:
        yield Problem(
            "data.sources=[]: nothing to read (data=demo or data=sample needs no preparation; or "
            "data.sources=[{name:web,path:FOLDER}], with folders made by data/prepare.py)",
            ("data.sources", "data.demo"),
        )
    names = [source.name for source in data.sources]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield Problem(
            f"data.sources: the name {name!r} is given {names.count(name)} times, must be unique",
            ("data.sources",),
        )
    if data.spiral_segment and data.packing is not Packing.spiral:
        yield Problem(
            f"data.spiral_segment={data.spiral_segment}: is for data.packing=spiral, got "
            f"{data.packing.name} (nearest 0)",
            ("data.spiral_segment", "data.packing"),
        )
    elif data.spiral_segment and data.isolate_documents:
        yield Problem(
            f"data.spiral_segment={data.spiral_segment}: changes nothing under "
            "data.isolate_documents=true, where a token sees its own document only and has no "
            "position (nearest 0; or data.isolate_documents=false)",
            ("data.spiral_segment", "data.isolate_documents"),
        )
    for source in data.sources:
        if not (source.weight > 0 and math.isfinite(source.weight)):
            yield Problem(
                f"data.sources[{source.name}].weight={source.weight:g}: must be above 0 "
                "(leave the source out to read none of it)",
                ("data.sources",),
            )


def _batch(config: RunConfig, world_size: int | None) -> Iterator[Problem]:
    parallel, train, length = config.parallel, config.train, config.data.sequence_length
    if config.run.mode is Mode.score:  # its rows come from a file, one at a time
        return
    needed = model_parallel_size(parallel)
    data_parallel = world_size // needed if world_size and world_size % needed == 0 else 1
    parts = {
        "data.sequence_length": length,
        "train.micro_batch_size": train.micro_batch_size,
        "data parallel": data_parallel,
    }
    # megatron-core's interleaved schedule hands micro-batches round in groups of one a stage.
    if parallel.virtual_pipeline > 1:
        parts["parallel.pipeline"] = parallel.pipeline
    step = math.prod(parts.values())
    if train.batch_tokens % step:
        shown = " x ".join(f"{key}={size}" for key, size in parts.items() if size > 1)
        product = f" = {step}" if " x " in shown else ""
        yield Problem(
            f"train.batch_tokens={train.batch_tokens}: must be a multiple of {shown}{product} "
            f"(nearest {nearest_multiples(train.batch_tokens, step)})",
            ("train.batch_tokens", "plan.world_size", "parallel", *parts),
        )


def _optim(config: RunConfig) -> Iterator[Problem]:
    total = config.train.steps * config.train.batch_tokens
    yield from schedule_problems(config.optim, total=total, name="train.steps x train.batch_tokens")
