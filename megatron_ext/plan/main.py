"""`run.mode=plan`: what a configuration would be on any number of ranks, worked out on this CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_ext.config.layout import draw, draw_experts, padded_vocab_size
from megatron_ext.config.schema import RunConfig
from megatron_ext.config.stages import stage_config, stage_names
from megatron_ext.data.tokenizers import load_tokenizer
from megatron_ext.errors import ConfigError
from megatron_ext.parallel.runtime import quiet
from megatron_ext.plan.numbers import human

if TYPE_CHECKING:
    from megatron_ext.model.count import Counts


def plan(config: RunConfig) -> int:
    """As `plan_one`, for each stage of a curriculum in turn, with a table of all of them."""
    stages = {name: stage_config(config, name) for name in stage_names(config)}
    for name, own in stages.items():
        print(f"{name}\n")
        plan_one(own)
        print()
    if stages:
        print(stages_of_curriculum(stages), flush=True)
    return 0 if stages else plan_one(config)


def plan_one(config: RunConfig) -> int:
    """Print the layout, the parameters and the work a token of a composed configuration.

    No process group is joined, no data read and no GPU touched. Modules are built without memory,
    so the largest model takes a few seconds.

    Returns:
        0: a plan that can be drawn is not an error, whether or not there are machines for it.

    Raises:
        ConfigError: the layout does not fit `plan.world_size`, or its sizes the model's.
        DataError: the tokenizer cannot be read.
    """
    quiet()
    if config.plan.search and config.plan.cluster is not None:
        return propose(config, config.plan.cluster)
    # megatron-core comes after `quiet`, which hides what it says on import.
    from megatron_ext.model.count import count_parameters, count_stages, flops_per_token
    from megatron_ext.parallel.mesh import describe, fewest_ranks, misfits
    from megatron_ext.plan.hops import hops_table

    parallel = config.parallel
    world_size = config.plan.world_size or fewest_ranks(parallel)
    problems = misfits(parallel, world_size)
    if problems:
        raise ConfigError(problems)
    vocab_size = planned_vocab_size(config)
    flops = flops_per_token(
        config.model, vocab_size=vocab_size, sequence_length=config.data.sequence_length
    )
    counts = count_parameters(config, vocab_size)
    sections = [
        f"Plan of {config.model.name} on {world_size:,} ranks",
        draw(config, world_size),
        describe(parallel, world_size),
        *filter(None, [draw_experts(config, world_size)]),
        parameters_table(counts),
        stages_table(count_stages(config, vocab_size), tensor=parallel.tensor),
        *filter(None, [hops_table(config)]),
        work_table(config, world_size=world_size, flops=flops),
    ]
    # Quick so far; what follows takes seconds a stage.
    print("\n\n".join(sections), flush=True)
    print(
        "\n" + "\n\n".join(costs(config, vocab_size, world_size=world_size, flops=flops)),
        flush=True,
    )
    return 0


def propose(config: RunConfig, cluster_file: str) -> int:
    """`plan.search=true`: print the best layouts for a cluster file, of those that fit; 0 always.

    Raises:
        ConfigError: the cluster file or the one of speeds is no good.
        DataError: the tokenizer cannot be read.
    """
    from megatron_ext.plan.calibration import load_calibration
    from megatron_ext.plan.cluster import load_cluster
    from megatron_ext.plan.search import found_table, search

    cluster, calibration = load_cluster(cluster_file), load_calibration(config.plan.calibration)
    found, allowed, light = search(config, planned_vocab_size(config), cluster, calibration)
    print(found_table(found, allowed, light, cluster=cluster), flush=True)
    return 0


def planned_vocab_size(config: RunConfig) -> int:
    """The padded vocabulary: as configured, else the tokenizer's."""
    return config.model.vocab_size or padded_vocab_size(
        load_tokenizer(config.data.tokenizer).vocab_size
    )


def costs(config: RunConfig, vocab_size: int, *, world_size: int, flops: float) -> list[str]:
    """Tables of memory, messages and time."""
    from megatron_ext.plan.calibration import load_calibration
    from megatron_ext.plan.memory import memory_of
    from megatron_ext.plan.rehearsal import rehearse
    from megatron_ext.plan.report import memory_table, time_table, traffic_table
    from megatron_ext.plan.timing import step_time
    from megatron_ext.plan.traffic import step_traffic

    imbalance, calibration = config.plan.imbalance, load_calibration(config.plan.calibration)
    stages, memories, sent = [], [], []
    for number in range(config.parallel.pipeline):
        stage = rehearse(config, vocab_size, stage=number, imbalance=imbalance)
        stages.append(stage)
        memories.append(memory_of(config, stage, number=number, world_size=world_size))
        sent.append(step_traffic(config, stage, number=number, world_size=world_size))
    took = step_time(config, stages, calibration, world_size=world_size)
    return [
        memory_table(memories, imbalance=imbalance, limit_gib=calibration.memory_gib),
        *filter(None, [traffic_table(sent)]),
        time_table(config, took, calibration, world_size=world_size, flops=flops),
    ]


def stages_of_curriculum(stages: dict[str, RunConfig]) -> str:
    """One row a stage: its length, its steps, and how the ranks are arranged."""
    columns = ("length", 10), ("tokens a step", 15), ("sequences", 11), ("steps", 9), ("tokens", 10)
    heads = "".join(f"{head:>{width}}" for head, width in columns)
    lines = [f"{'stage':<14}{heads}  layout"]
    for name, own in stages.items():
        length, batch, steps = own.data.sequence_length, own.train.batch_tokens, own.train.steps
        parallel = own.parallel
        sizes = ("tensor", "context", "pipeline", "virtual_pipeline", "expert")
        layout = [
            f"{size} {getattr(parallel, size)}" for size in sizes if getattr(parallel, size) > 1
        ]
        lines.append(
            f"{name:<14}{length:>10,}{batch:>15,}{batch // length:>11,}{steps:>9,}"
            f"{human(steps * batch):>10}  {', '.join(layout) or 'one rank a copy'}"
        )
    return "\n".join(lines)


def parameters_table(counts: Counts) -> str:
    """One row a part of the model, and the sums below."""
    from megatron_ext.model.count import PARTS

    lines = ["parameters of one copy of the model"]
    for part, number in counts.by_part.items():
        layers = counts.layers.get(part)
        each = f"  {layers} x {human(number / layers)}" if layers else ""
        lines.append(f"  {PARTS[part]:<32}{number:>20,}{each}")
    lines.append(f"  {'total':<32}{counts.total:>20,}  {human(counts.total, digits=5)}")
    lines.append(
        f"  {'active, without input embedding':<32}{counts.active:>20,}  "
        + human(counts.active, digits=5)
    )
    return "\n".join(lines)


def stages_table(stages: list[Counts], *, tensor: int) -> str:
    """What one rank of each pipeline stage holds: its share of split matrices, all of the rest."""
    largest = max(counts.total for counts in stages)
    lines = [f"parameters a rank, by pipeline stage (tensor parallel {tensor})"]
    for stage, counts in enumerate(stages):
        share = f"{counts.total / largest:>6.0%} of the largest"
        lines.append(f"  stage {stage:<4}{counts.total:>20,}  {human(counts.total):>9}{share}")
    return "\n".join(lines)


def work_table(config: RunConfig, *, world_size: int, flops: float) -> str:
    """FLOPs and tokens of a step, and how the step divides into micro-batches."""
    parallel, train, data = config.parallel, config.train, config.data
    data_parallel = world_size // (parallel.tensor * parallel.context * parallel.pipeline)
    sequences = train.batch_tokens // data.sequence_length
    micro_batches = sequences // (train.micro_batch_size * data_parallel)
    rows = [
        ("FLOPs a token", f"{human(flops, unit='FLOP')}  forward and backward, no recomputation"),
        ("tokens a step", f"{train.batch_tokens:,}  {sequences:,} sequences of "
                          f"{data.sequence_length:,}"),
        ("FLOPs a step", human(flops * train.batch_tokens, unit="FLOP")),
        ("micro-batches a rank", f"{micro_batches:,}  of {train.micro_batch_size} x "
                                 f"{data.sequence_length:,} tokens"),
    ]  # fmt: skip
    if parallel.pipeline > 1 and micro_batches:
        idle = parallel.pipeline - 1
        share = idle / (micro_batches * parallel.virtual_pipeline + idle)
        rows.append(("idle in the pipeline", f"{share:.1%}  of a step, if all chunks were equal"))
    return "\n".join(["work", *(f"  {name:<24}{text}" for name, text in rows)])
