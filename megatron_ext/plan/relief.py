"""What a run that is out of memory can change: the cheapest ways first, each with what it would
need by the plan.

`ask` starts this module as a process of its own: a rehearsal needs its own process groups, and the
one that is out of memory has others.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import asdict, dataclass
from typing import Any

from omegaconf import OmegaConf

from megatron_ext.config.compose import to_container
from megatron_ext.config.schema import Device, Precision, Recompute, RunConfig
from megatron_ext.config.validate import find_problems

MOST = 3  # ways that are told
ENOUGH = 0.98  # of the memory before: a way that saves less is none
SECONDS = 300  # of the process; the largest model takes some ten a stage
LONG = 8192  # tokens of a sequence from which on cutting it helps
LONGER = "a step takes {longer:.0%} longer by the plan"
WHOLE = 64  # tokens of a chunk of linear attention, of which parts of a sequence are made


@dataclass(frozen=True)
class Way:
    """Keys to set, what they cost, and what the rank would need then, in bytes."""

    words: str
    price: str
    total: int


@dataclass(frozen=True)
class Answer:
    """What the plan expects of the rank as it is configured, in bytes, and ways to need less."""

    total: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    ways: list[Way]


def candidates(config: RunConfig, *, world_size: int) -> Iterator[tuple[str, str, RunConfig]]:
    """Ways as (keys, price, configuration), the cheapest first; only what the rules allow.

    A price may have a place for `longer`, the share of a step's time that is added.

    Args:
        config: of the run.
        world_size: ranks, which stay as many.
    """
    parallel, train = config.parallel, config.train
    copies = world_size // (parallel.tensor * parallel.context * parallel.pipeline)
    free: list[tuple[str, Any, str]] = []
    if copies > 1:
        free.append(("parallel.distributed_optimizer", True, ""))
    if train.loss_chunk_tokens is not None:
        free.append(("train.loss_chunk_tokens", None, ""))
    half = train.micro_batch_size // 2
    small = [("train.micro_batch_size", half, "smaller matrices, more passes")] if half else []
    # Less is computed again by the first than by the last.
    again: list[tuple[str, Any, str]] = [
        # The plan's time of linear attention is that of computing again: it knows no price.
        ("train.kda_recompute", True, "linear attention computes states and factors again"),
    ]
    again += [
        (f"train.{key}", _fewer(config, getattr(train, key)), LONGER)
        for key in ("expert_chunk_tokens", "kda_segment_tokens")
    ]
    kinds = list(Recompute)
    again += [
        ("train.recompute", kind, LONGER) for kind in kinds[kinds.index(train.recompute) + 1 :]
    ]
    rounded = []
    if config.run.precision is Precision.fp32 and config.run.device is not Device.cpu:
        rounded = [("run.precision", Precision.bf16, "fewer digits; main weights stay float32")]
    more = [
        ("parallel.expert", "more messages between ranks", True),
        ("parallel.context", "more messages", config.data.sequence_length >= LONG),
        ("parallel.tensor", "messages in every layer", True),
        ("parallel.pipeline", "ranks idle at both ends of a step", True),
    ]
    spread = [
        (key, 2 * getattr(parallel, key.split(".")[1]), price) for key, price, fits in more if fits
    ]
    for key, value, price in [*free, *small, *again, *rounded, *spread]:
        way = {key: value}
        if train.cuda_graph and price == LONGER:  # a graph computes nothing again
            way = {"train.cuda_graph": False, **way}
        changed = deepcopy(config)
        for name, new in way.items():
            section, _, option = name.partition(".")
            setattr(getattr(changed, section), option, new)
        if changed == config or find_problems(changed, world_size):
            continue
        yield " ".join(map(_word, way.items())), price or "costs nothing", changed


def _fewer(config: RunConfig, now: int | None) -> int | None:
    """Tokens of a rank at a time: a quarter of a micro-batch's, or half of what is set; `now` where
    that makes no whole chunk of linear attention."""
    length = config.data.sequence_length // config.parallel.context
    wanted = config.train.micro_batch_size * length // 4 if now is None else now // 2
    return wanted // WHOLE * WHOLE or now


def _word(pair: tuple[str, Any]) -> str:
    key, value = pair
    return f"{key}={getattr(value, 'name', 'null' if value is None else str(value).lower())}"


def consider(config: RunConfig, *, world_size: int, stage: int) -> Answer:
    """Rehearse the rank's stage as it is, then way after way until three need less.

    Args:
        config: of the run.
        world_size: ranks of the job.
        stage: pipeline stage of the rank.
    """
    from megatron_ext.plan.calibration import load_calibration
    from megatron_ext.plan.main import planned_vocab_size
    from megatron_ext.plan.memory import Memory, memory_of
    from megatron_ext.plan.rehearsal import rehearse
    from megatron_ext.plan.timing import step_time

    vocab_size, speeds = planned_vocab_size(config), load_calibration(config.plan.calibration)

    def needed(changed: RunConfig) -> tuple[Memory, float]:
        number = stage * changed.parallel.pipeline // config.parallel.pipeline
        found = rehearse(changed, vocab_size, stage=number, imbalance=config.plan.imbalance)
        memory = memory_of(changed, found, number=number, world_size=world_size)
        time = step_time(changed, [found], speeds, world_size=world_size, first=number)
        return memory, time.total

    (now, seconds), ways = needed(config), list[Way]()
    for words, price, changed in candidates(config, world_size=world_size):
        then, longer = needed(changed)
        if then.total < ENOUGH * now.total:
            ways.append(Way(words, price.format(longer=longer / seconds - 1), then.total))
        if len(ways) == MOST:
            break
    return Answer(now.total, now.parameters, now.gradients, now.optimizer, now.activations, ways)


def ask(config: RunConfig, *, world_size: int, stage: int) -> Answer | str:
    """`consider` in a process of its own. Returns why not, in words, where that fails: whoever asks
    is about to report an error, and must not meet another."""
    request = {"config": to_container(config), "world_size": world_size, "stage": stage}
    command = [sys.executable, "-W", "ignore", "-m", "megatron_ext.plan.relief"]
    try:
        done = subprocess.run(
            command, input=json.dumps(request), capture_output=True, text=True, timeout=SECONDS
        )
        if done.returncode != 0:
            return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        content = json.loads(done.stdout.splitlines()[-1])
        content["ways"] = [Way(**way) for way in content["ways"]]
        return Answer(**content)
    except (OSError, ValueError, LookupError, TypeError, subprocess.SubprocessError) as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]


def main() -> None:
    """Read the request of `ask` and print the answer."""
    request: dict[str, Any] = json.load(sys.stdin)
    config = OmegaConf.to_object(OmegaConf.merge(RunConfig, request["config"]))
    assert isinstance(config, RunConfig)
    found = consider(config, world_size=request["world_size"], stage=request["stage"])
    print(json.dumps(asdict(found)))


if __name__ == "__main__":
    from megatron_ext.parallel.runtime import quiet

    quiet()
    main()
