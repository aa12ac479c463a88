"""Rules of health, hangs and launching. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterator

from megatron_ext.config.operations import HealthAction
from megatron_ext.config.problem import Problem
from megatron_ext.config.schema import Device, Mode, Precision, RunConfig

# What `sbatch --time` takes: minutes, minutes:seconds, hours:minutes:seconds, days-hours[:..[:..]].
_TIME = re.compile(r"\d+|\d+:\d\d|\d+:\d\d:\d\d|\d+-\d+(:\d\d){0,2}")
SHORTEST_PROBE = 64  # tokens in which a key and its question fit, also as bytes
_MEMORY = re.compile(r"\d+[KMGT]?")


def resilience_problems(config: RunConfig) -> Iterator[Problem]:
    """Policies that cannot work."""
    options = config.resilience
    allowed = (HealthAction.skip, HealthAction.rewind, HealthAction.halt)
    if options.nonfinite not in allowed:
        yield Problem(
            f"resilience.nonfinite={options.nonfinite.name}: such an update would destroy the "
            f"weights (allowed {', '.join(action.name for action in allowed)})",
            ("resilience.nonfinite",),
        )
    for key in ("nonfinite", "loss_spike", "norm_spike"):
        rewinds = getattr(options, key) is HealthAction.rewind
        if rewinds and config.checkpoint.interval == 0 and config.run.mode is Mode.train:
            yield Problem(
                f"resilience.{key}=rewind: needs checkpoints on the way, but checkpoint.interval=0 "
                f"saves at the end only (such as checkpoint.interval=100; or {key}=skip)",
                (f"resilience.{key}", "checkpoint.interval"),
            )
    limit = config.run.timeout_seconds
    if options.hang_seconds is not None and options.hang_seconds >= limit:
        yield Problem(
            f"resilience.hang_seconds={options.hang_seconds:g}: must be less than "
            f"run.timeout_seconds={limit:g}, which ends the ranks without saying where they stood "
            f"(nearest {limit * 0.9:g}; or 0 for no watchdog)",
            ("resilience.hang_seconds", "run.timeout_seconds"),
        )


def replay_problems(config: RunConfig, world_size: int | None) -> Iterator[Problem]:
    """Comparisons bit by bit, of ranks that ought to be equal."""
    options, parallel = config.resilience, config.parallel
    every = options.replay_interval
    if options.corruption not in (HealthAction.warn, HealthAction.halt):
        yield Problem(
            f"resilience.corruption={options.corruption.name}: a faulty device does not go away by "
            "it (allowed warn, halt)",
            ("resilience.corruption",),
        )
    if every == 0 or config.run.mode is not Mode.train:
        return
    key = f"resilience.replay_interval={every}"
    if not config.run.deterministic and config.run.device is not Device.cpu:
        yield Problem(
            f"{key}: compares bit by bit, which needs run.deterministic=true on GPUs (or "
            "run.device=cpu)",
            ("resilience.replay_interval", "run.deterministic", "run.device"),
        )
    if parallel.expert > 1 or parallel.overlap_grad_reduce:
        wrong = "expert > 1" if parallel.expert > 1 else "overlap_grad_reduce=true"
        yield Problem(
            f"{key}: with parallel.{wrong} data parallel ranks exchange data within the passes and "
            "cannot be compared (nearest 0)",
            ("resilience.replay_interval", "parallel.expert", "parallel.overlap_grad_reduce"),
        )
    if world_size == parallel.tensor * parallel.context * parallel.pipeline:
        yield Problem(
            f"{key}: there is one data parallel rank and nothing to compare it with (nearest 0, or "
            "twice as many ranks)",
            ("resilience.replay_interval",),
        )


def profile_problems(config: RunConfig, world_size: int | None) -> Iterator[Problem]:
    """Steps and ranks that there are not: nothing would be written, without a word."""
    steps, ranks = config.profile.steps, config.profile.ranks
    if not steps or config.run.mode is not Mode.train:
        return
    # Stages count their own steps, and a profile those of the whole run.
    last = None if config.curriculum.stages else config.train.steps
    for step in steps:
        if step < 1 or (last is not None and step > last):
            allowed = "1 or more" if last is None else f"in [1, {last}], the steps of the run"
            near = 1 if step < 1 or last is None else last
            yield Problem(
                f"profile.steps: {step}: must be {allowed} (nearest {near})",
                ("profile.steps", "train.steps"),
            )
    for rank in ranks:
        if rank < 0 or (world_size is not None and rank >= world_size):
            allowed = "0 or more" if world_size is None else f"in [0, {world_size - 1}]"
            near = 0 if rank < 0 or world_size is None else world_size - 1
            yield Problem(
                f"profile.ranks: {rank}: must be {allowed} (nearest {near})", ("profile.ranks",)
            )
    if not ranks:
        yield Problem(
            "profile.ranks=[]: no rank would profile profile.steps (such as [0])",
            ("profile.ranks",),
        )


def plan_problems(config: RunConfig) -> Iterator[Problem]:
    """A search needs machines to search for."""
    if config.plan.search and config.plan.cluster is None:
        yield Problem(
            "plan.search=true: needs plan.cluster=FILE, a JSON file of the machines (such as "
            "plan.cluster=docs/clusters/h200_16.json)",
            ("plan.search", "plan.cluster"),
        )


def launch_problems(config: RunConfig) -> Iterator[Problem]:
    """Requests that a launcher or SLURM would refuse, or worse, misread."""
    launch = config.launch
    if not _TIME.fullmatch(launch.time):
        yield Problem(
            f"launch.time={launch.time}: must be minutes, HH:MM:SS or D-HH:MM:SS "
            "(such as 24:00:00)",
            ("launch.time",),
        )
    if launch.memory is not None and not _MEMORY.fullmatch(launch.memory):
        yield Problem(
            f"launch.memory={launch.memory}: must be a whole number with K, M, G or T (such as "
            "900G; or 0 for all of a host)",
            ("launch.memory",),
        )
    ranks, gpus = launch.ranks_per_node, launch.gpus_per_node
    if ranks is not None and gpus is not None and ranks % gpus:
        yield Problem(
            f"launch.ranks_per_node={ranks}: must be a multiple of launch.gpus_per_node={gpus} "
            f"(nearest {max(gpus, ranks // gpus * gpus)})",
            ("launch.ranks_per_node", "launch.gpus_per_node"),
        )
    for key in _TEXTS:
        value = getattr(launch, key)
        if value is not None and ("\n" in value or not value.strip()):
            yield Problem(
                f"launch.{key}={value!r}: must be one line of text (or null)", (f"launch.{key}",)
            )
    for option in launch.sbatch:
        if not re.match(r"--?[A-Za-z]", option) or "\n" in option:
            yield Problem(
                f"launch.sbatch: {option!r} is no option of sbatch (such as ['--comment=x'])",
                ("launch.sbatch",),
            )


_TEXTS = (
    "partition",
    "account",
    "qos",
    "constraint",
    "exclude",
    "mail",
    "container",
    "mounts",
    "host",
    "address",
    "python",
    "setup",
)


def generate_problems(config: RunConfig) -> Iterator[Problem]:
    """Generation runs on one pipeline stage."""
    parallel = config.parallel
    for key in ("pipeline", "virtual_pipeline"):
        size = getattr(parallel, key)
        if config.run.mode is Mode.generate and size > 1:
            yield Problem(
                f"parallel.{key}={size}: run.mode=generate needs 1; it reads a checkpoint of any "
                f"layout (nearest 1)",
                (f"parallel.{key}", "run.mode"),
            )


def evaluation_problems(config: RunConfig) -> Iterator[Problem]:
    """Lengths at which a key and its question have no room, or a rank of the context too little."""
    shortest = SHORTEST_PROBE * config.parallel.context
    for length in config.evaluate.lengths:
        if length < shortest:
            yield Problem(
                f"evaluate.lengths: {length}: must be at least {SHORTEST_PROBE} x parallel.context "
                f"= {shortest} (nearest {shortest})",
                ("evaluate.lengths", "parallel.context"),
            )
    length = config.data.sequence_length
    for factor in config.evaluate.length_factors:
        if factor < 1 or factor * length < shortest:
            nearest = max(1, -(-shortest // length))
            yield Problem(
                f"evaluate.length_factors: {factor}: must be at least 1 and give {SHORTEST_PROBE} "
                f"x parallel.context = {shortest} tokens or more (nearest {nearest})",
                ("evaluate.length_factors", "parallel.context", "data.sequence_length"),
            )


def score_problems(config: RunConfig) -> Iterator[Problem]:
    """Files that are needed and not given, and float64 where there is none."""
    score = config.score
    if config.run.mode is not Mode.score:
        return
    for key, what in (("tokens", "the rows to score"), ("output", "what to write")):
        if getattr(score, key) is None:
            yield Problem(
                f"score.{key}=null: run.mode=score needs the path of a JSON file, {what}",
                (f"score.{key}", "run.mode"),
            )
    if score.output is not None and score.output == score.tokens:
        yield Problem(
            f"score.output={score.output}: is score.tokens too, which it would replace (another "
            "path)",
            ("score.output", "score.tokens"),
        )
    if score.float64 and config.run.device is not Device.cpu:
        yield Problem(
            f"score.float64=true: needs run.device=cpu, got {config.run.device.name}",
            ("score.float64", "run.device"),
        )
    if score.float64 and config.run.precision is not Precision.fp32:
        yield Problem(
            f"score.float64=true: needs run.precision=fp32, got {config.run.precision.name}",
            ("score.float64", "run.precision"),
        )
