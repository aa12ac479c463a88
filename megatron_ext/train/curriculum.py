"""Which stage of a curriculum a launch goes on with, and what it says when a stage ends.

A stage begins at the checkpoint that the one before it left, so that an uninterrupted walk and one
that was stopped between stages are the same. The checkpoint says in which stage it was written and
where that began; how many steps a stage has is the configuration's.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from megatron_ext.config.schema import RunConfig
from megatron_ext.config.stages import stage_config, stage_names
from megatron_ext.errors import ConfigError


@dataclass(frozen=True)
class Stage:
    """A stage and where in the run it begins; without a curriculum, the whole run.

    Attributes:
        name: "" without a curriculum.
        first_step: steps done before it.
        first_tokens: tokens consumed before it; its schedule begins there.
    """

    name: str = ""
    first_step: int = 0
    first_tokens: int = 0

    def extra(self) -> dict[str, Any]:
        """As a checkpoint holds it."""
        return asdict(self)

    def config(self, config: RunConfig, *, step: int, tokens: int) -> RunConfig:
        """The configuration of this stage, of a run that has done so many steps and tokens."""
        done = (step - self.first_step, tokens - self.first_tokens)
        return stage_config(config, self.name, first_step=self.first_step, done=done)


WHOLE_RUN = Stage()


def stage_of(extra: dict[str, Any]) -> Stage:
    """The stage in which a checkpoint was written."""
    return Stage(**extra.get("stage", {}))


def choose_stage(config: RunConfig, extra: dict[str, Any], *, evaluated: bool = True) -> Stage:
    """The stage to go on with.

    Args:
        config: of the run.
        extra: of its latest checkpoint; empty when there is none.
        evaluated: whether that is of a step after which was evaluated, as a stage ends.

    Returns:
        The stage that is asked for; else that of the checkpoint while it has something left to do
        or is the last, then the next one.

    Raises:
        ConfigError: the checkpoint is of a stage that is not to run.
    """
    names, saved = list(config.curriculum.stages), stage_of(extra)
    if not names:
        if saved.name:
            raise ConfigError(
                f"curriculum.stages: empty, but the checkpoint in {config.run.dir} is of "
                f"{saved.name}; give the experiment that it was made with, or start anew with "
                "run.fresh=true"
            )
        return saved
    if saved.name and saved.name not in names:
        raise ConfigError(
            f"curriculum.stages: has no {saved.name}, which the checkpoint in {config.run.dir} is "
            f"of (allowed {', '.join(names)}); give it back, or start anew with run.fresh=true"
        )
    place = names.index(saved.name) if saved.name else -1
    chosen = config.curriculum.stage
    step, tokens = int(extra.get("step", 0)), int(extra.get("tokens", 0))
    if chosen is not None:
        target = names.index(chosen)  # cuts short what came before
    else:
        steps = saved.config(config, step=step, tokens=tokens).train.steps
        done = place < 0 or (step >= steps and evaluated)
        target = min(place + 1, len(names) - 1) if done else place
    if target == place:
        return saved
    if target < place:
        raise ConfigError(
            f"stage={names[target]}: {config.run.dir} is at {saved.name} already, which comes "
            "later (leave stage= out to go on, or give another run.dir)"
        )
    if target > 0 and not extra and not config.checkpoint.load:
        raise ConfigError(
            f"stage={names[target]}: goes on from a stage before it, but {config.run.dir} has no "
            f"checkpoint (train {names[target - 1]} there first, or give one of another run with "
            "checkpoint.load=PATH)"
        )
    return Stage(names[target], step, tokens)


def next_stage(config: RunConfig, name: str) -> str:
    """The stage that this run has after one; "" after the last."""
    names = stage_names(config)
    after = names[names.index(name) + 1 :] if name in names else []
    return after[0] if after else ""


def same_layout(config: RunConfig, name: str, other: str) -> bool:
    """Whether two stages arrange the ranks alike, so that a process can go on with the other."""
    return stage_config(config, name).parallel == stage_config(config, other).parallel
