"""What a launch finds in its run folder: nothing, a run to go on with, or a finished one."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist

from megatron_ext.checkpoint.paths import read_extra
from megatron_ext.checkpoint.verify import Sound, newest_sound
from megatron_ext.config.schema import RunConfig
from megatron_ext.errors import FINAL, NEXT_STAGE, ConfigError, MegatronExtError
from megatron_ext.observe.jsonl import lacks
from megatron_ext.observe.lock import hold
from megatron_ext.observe.run_files import (
    choose_run_id,
    leave_exit,
    read_exit,
    remove_exit,
    replace_file,
)
from megatron_ext.parallel.environment import Environment
from megatron_ext.train.curriculum import WHOLE_RUN, Stage, choose_stage

MARK = ".launch.json"


@dataclass(frozen=True)
class Found:
    """What rank 0 found, the same object on every rank.

    Attributes:
        folder: the run folder, absolute.
        checkpoint: where to go on from; None starts anew.
        run_id: identity of the run, for wandb.
        step, tokens: of that checkpoint; 0 without one.
        finished: whether the run has all its steps already, and was evaluated after them.
        stage: of the curriculum, to go on with.
        moved: where an older run went with `run.fresh=true`.
        load: `checkpoint.load`, at its new place if it was in that older run.
        ended: how this very launch has ended already, when torchrun restarts it nevertheless.
        damaged: what is wrong with newer checkpoints than the one to go on from, as lines.
    """

    folder: Path
    checkpoint: Path | None
    run_id: str
    step: int
    tokens: int
    finished: bool
    moved: Path | None
    load: str | None = None
    ended: dict[str, Any] | None = None
    damaged: tuple[str, ...] = ()
    stage: Stage = WHOLE_RUN


def open_run_folder(config: RunConfig, environment: Environment) -> Found:
    """Decide once, on rank 0, and tell all ranks, which check the checkpoint together. Collective.

    Raises:
        ConfigError, CheckpointError: what rank 0 met, or no checkpoint is sound; on every rank.
    """
    entered = _on_rank_0(lambda: enter(config, environment), config)
    try:
        # A launch that has ended by itself reads no checkpoint.
        sound = Sound(None) if entered.ended else newest_sound(entered.folder / "checkpoints")
        return _on_rank_0(lambda: describe(config, entered, sound), config)
    except MegatronExtError as error:
        leave_exit(entered.folder, code=error.exit_code, reason=str(error), step=0)
        raise


def _on_rank_0[T](action: Callable[[], T], config: RunConfig) -> T:
    answer: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            answer[0] = action()
        except MegatronExtError as error:
            answer[0] = error
        except OSError as error:
            answer[0] = ConfigError(
                f"run.dir: {config.run.dir} cannot be used ({error.strerror}); give a folder that "
                f"can be written"
            )
    dist.broadcast_object_list(answer, src=0)
    if isinstance(answer[0], Exception):
        raise answer[0]
    return cast("T", answer[0])


@dataclass(frozen=True)
class Entered:
    """The run folder, held by rank 0; the names are those of `Found`."""

    folder: Path
    moved: Path | None
    away: str
    ended: dict[str, Any] | None


def enter(config: RunConfig, environment: Environment) -> Entered:
    """Move an older run aside if asked to, and take the folder for this launch."""
    folder = Path(str(config.run.dir))
    moved, before, again = None, None, False
    if folder.is_dir():
        mark = _read_mark(folder)
        again = environment.launch != "" and mark.get("launch") == environment.launch
        before = mark.get("moved") if again else None
        # Only once a launch: its restarts must not throw away what it has trained since.
        if config.run.fresh and not again:
            hold(folder)  # not from under a run that is going on
            moved = move_aside(folder)
    folder.mkdir(parents=True, exist_ok=True)
    hold(folder)
    ended = read_exit(folder) if again and environment.restarts > 0 else None
    if ended is not None and (ended.get("code") not in FINAL or ended.get("reason") == NEXT_STAGE):
        ended = None
    if ended is None:
        # From here on its end is unknown: launchers must not act on how an earlier launch ended.
        remove_exit(folder)
    away = str(moved or before or "")
    mark = {"launch": environment.launch, "moved": away or None}
    replace_file(folder / MARK, json.dumps(mark).encode())
    return Entered(folder, moved, away, ended)


def describe(config: RunConfig, entered: Entered, sound: Sound) -> Found:
    """What there is to go on from, and under which run id."""
    folder = entered.folder
    extra = read_extra(sound.path) if sound.path else {}
    step, tokens = int(extra.get("step", 0)), int(extra.get("tokens", 0))
    # A run that ended between the save and the evaluation of its last step has that to do.
    evaluated = not lacks(folder / "metrics.jsonl", step, "eval/loss")
    stage = WHOLE_RUN if entered.ended else choose_stage(config, extra, evaluated=evaluated)
    steps = stage.config(config, step=step, tokens=tokens).train.steps
    return Found(
        folder=folder,
        checkpoint=sound.path,
        run_id=choose_run_id(folder, name=config.run.name, from_checkpoint=extra.get("run_id")),
        step=step,
        tokens=tokens,
        finished=step >= steps and evaluated,
        moved=entered.moved,
        load=_moved_along(config.checkpoint.load, folder, entered.away),
        ended=entered.ended,
        damaged=sound.damaged,
        stage=stage,
    )


def _moved_along(load: str | None, folder: Path, away: str) -> str | None:
    """A path that led into the run folder, now that its content is at another place."""
    if load is None or not away or not Path(load).is_relative_to(folder):
        return load
    return str(Path(away) / Path(load).relative_to(folder))


def _read_mark(folder: Path) -> dict[str, Any]:
    try:
        mark = json.loads((folder / MARK).read_text())
    except (OSError, ValueError):
        return {}
    return mark if isinstance(mark, dict) else {}


def move_aside(folder: Path) -> Path:
    """Rename a run folder to the first free `<name>.1`, `<name>.2` ...; nothing is deleted."""
    number = 1
    while (target := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    folder.rename(target)
    return target
