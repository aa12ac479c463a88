"""The stages of a curriculum: what each is made of, and everything that is wrong in any. No torch.

A stage is the configuration with some keys set otherwise. `train.steps` counts its own steps, and
`tokens` may stand in its place; the learning rate's schedule begins with the stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from omegaconf import OmegaConf

from megatron_ext.config.keys import Key, suggest, table
from megatron_ext.config.overrides import flatten, unknown, wrong_value
from megatron_ext.config.problem import Problem
from megatron_ext.config.schema import Mode, RunConfig
from megatron_ext.config.validate import find_problems, value_of

# What may differ between stages; the model and the run stay the same.
SECTIONS = ("parallel", "data", "train", "optim", "evaluate", "checkpoint", "logging", "resilience")
# Else a position in the data would mean other tokens, or the run would begin anew.
SHARED = ("data.demo", "data.tokenizer", "data.held_out", "checkpoint.load")
TOKENS = "tokens"
_PREFIX = "curriculum.stages."


def full_name(config: RunConfig, given: str) -> str | None:
    """The stage that `stage=64k` means: `64k` or `stage_64k`; None when there is no such stage."""
    return next((n for n in (given, f"stage_{given}") if n in config.curriculum.stages), None)


def stage_names(config: RunConfig) -> list[str]:
    """The stages of this run, in order: all of them, or the one that is asked for."""
    chosen = config.curriculum.stage
    return [name for name in config.curriculum.stages if chosen in (None, name)]


def stage_config(
    config: RunConfig, name: str, *, first_step: int = 0, done: tuple[int, int] = (0, 0)
) -> RunConfig:
    """The configuration of one stage.

    Args:
        config: of the run, checked.
        name: of the stage; "" gives `config` itself.
        first_step: steps done before the stage; `train.steps` of the result counts them too.
        done: steps and tokens of the stage itself that are done, maybe in batches of another size.
    """
    if not name:
        return config
    node = OmegaConf.structured(config)
    tokens = None
    for key, value in stage_overrides(config, name):
        if key == TOKENS:
            tokens = int(value)
        else:
            OmegaConf.update(node, key, whole(_keys().get(key), value))
    own = OmegaConf.to_object(node)
    assert isinstance(own, RunConfig)
    own.curriculum.stage = name
    if tokens is not None:
        steps, read = done
        own.train.steps = steps + max(0, -(-(tokens - read) // own.train.batch_tokens))
    own.train.steps += first_step
    return own


def stage_overrides(config: RunConfig, name: str) -> list[tuple[str, Any]]:
    """Dotted keys of a stage and their values, as they were given."""
    content = config.curriculum.stages[name]
    return flatten(content, "", _keys()) if isinstance(content, Mapping) else []


def whole(key: Key | None, value: Any) -> Any:
    """1e9 is a whole number where one is wanted."""
    return int(value) if _is_whole(value) and key is not None and key.kind is int else value


def stage_problems(config: RunConfig, world_size: int | None) -> list[Problem]:
    """Everything wrong in a configuration with or without stages, in the order of the stages.

    What is wrong in every stage is said once. The rules that need the number of ranks are for the
    stages that are to run.

    Args:
        config: of the run; its `curriculum.stage` is replaced by the full name.
        world_size: ranks of the job; None when not known.
    """
    options = config.curriculum
    problems = list(_choice(config))
    if not options.stages:
        return [*problems, *find_problems(config, world_size)]
    found: dict[str, list[Problem]] = {}
    for name in options.stages:
        ranks = world_size if options.stage in (None, name) else None
        found[name] = list(_overrides(config, name)) or find_problems(
            stage_config(config, name), ranks
        )
    for name, wrong in found.items():
        for problem in wrong:
            everywhere = all(problem in others for others in found.values())
            if not everywhere and not problem.text.startswith(_PREFIX):
                problem = Problem(f"{name}: {problem.text}", problem.keys)
            if problem not in problems:
                problems.append(problem)
    return problems


def idle_keys(config: RunConfig, given: set[str]) -> Iterator[str]:
    """A line for each key of the command line that every stage sets otherwise."""
    names = list(config.curriculum.stages)
    sets = [{key for key, _ in stage_overrides(config, name)} for name in names]
    for key in sorted(given):
        if names and all(key in keys or (key == "train.steps" and TOKENS in keys) for keys in sets):
            yield (
                f"{key}: has no effect, since every stage sets its own (such as "
                f"{_PREFIX}{names[0]}.{key}=...)"
            )


def _choice(config: RunConfig) -> Iterator[Problem]:
    options, mode = config.curriculum, config.run.mode
    keys = ("curriculum.stage", "curriculum.stages")
    short = [name.removeprefix("stage_") for name in options.stages]
    if options.stage is not None:
        name = full_name(config, options.stage)
        if name is None and not short:
            yield Problem(
                f"stage={options.stage}: there are no stages (such as "
                "experiment=nano_curriculum; or leave it out)",
                keys,
            )
        elif name is None:
            near = suggest(options.stage.removeprefix("stage_"), short, count=1)
            hint = f"; did you mean stage={near[0]}?" if near else ""
            yield Problem(
                f"stage={options.stage}: no such stage (allowed {', '.join(short)}{hint})", keys
            )
        options.stage = name or options.stage
    elif short and mode in (Mode.evaluate, Mode.generate, Mode.score):
        yield Problem(
            f"run.mode={mode.name}: needs stage=NAME, whose length and layout it takes "
            f"(allowed {', '.join(short)})",
            keys,
        )


def _overrides(config: RunConfig, name: str) -> Iterator[Problem]:
    """Keys of a stage that do not exist, may not differ, or have a value of a wrong type."""
    where = _PREFIX + name
    content, keys = config.curriculum.stages[name], _keys()
    if content is not None and not isinstance(content, Mapping):
        yield Problem(f"{where}={content}: must hold keys, such as {where}.train.steps=100", ())
        return
    given = dict(stage_overrides(config, name))
    scratch = OmegaConf.structured(RunConfig)
    for key, value in given.items():
        text = ""
        if key == TOKENS:
            if not _is_whole(value) or value < 1:
                text = f"{TOKENS}={value}: must be a whole number, 1 or more"
            elif "train.steps" in given:
                text = f"{TOKENS}={value}: train.steps is given too, must be one of them"
        elif key not in keys:
            text = unknown(key, keys, [TOKENS])
        elif key.split(".", 1)[0] not in SECTIONS or (
            # An option of a group may repeat what the run has.
            key in SHARED and value != value_of(config, key)
        ):
            allowed = f"{TOKENS} and keys of {', '.join(SECTIONS)} but {', '.join(SHARED)}"
            text = f"{key}: must be the same in all stages (allowed {allowed})"
        else:
            text = wrong_value(keys[key], whole(keys[key], value), scratch)
        if text:
            yield Problem(f"{where}.{text}", ())


def _is_whole(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and float(value).is_integer()


@cache
def _keys() -> dict[str, Key]:
    return table()
