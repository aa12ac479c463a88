"""What a run says at its end, and how to go on from there."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from megatron_ext.config.schema import RunConfig
from megatron_ext.config.stages import TOKENS, stage_overrides
from megatron_ext.parallel.mesh import fewest_ranks
from megatron_ext.train.run_folder import Found
from megatron_ext.train.state import TrainState


def finished_text(config: RunConfig, found: Found) -> str:
    """A finished run is no error: say so, and name the two ways on."""
    step = found.step
    program, words = _program(dist.get_world_size()), sys.argv[1:]
    same = f"{program} {shlex.join(words)}".rstrip()
    own = step - found.stage.first_step
    key, value = _length(config, own + max(1, own // 2))
    longer = [word for word in words if not word.startswith(f"{key}=")]
    longer.append(f"{key}={value}")
    return (
        f"{found.folder}: this run is finished, step {step} of {config.train.steps} is saved.\n"
        f"  go on:     {program} {shlex.join(longer)}\n"
        f"  anew:      {same} run.fresh=true   (moves the old run aside)"
    )


def stage_lines(state: TrainState, evaluation: dict[str, float], *, following: str) -> list[str]:
    """A stage is done. With another layout the command is to be repeated, which a launcher does."""
    return [
        "",
        f"{state.stage.name} is done: {state.step} steps, {state.tokens} tokens, "
        + _held_out(state, evaluation),
        f"next stage   {following}",
    ]


def repeat_text() -> str:
    """What a run prints that leaves the next stage to new processes."""
    return f"in another layout; a launcher starts it, else repeat\n             {_same_command()}"


def stopped_lines(state: TrainState, why: str) -> list[str]:
    """A run that was stopped goes on with its own command."""
    return [
        "",
        f"stopped on request ({why}): step {state.step} of {state.config.train.steps} is saved",
        f"go on        {_same_command()}",
    ]


def _same_command() -> str:
    words = [word for word in sys.argv[1:] if not word.startswith("run.fresh=")]
    return f"{_program(dist.get_world_size())} {shlex.join(words)}".rstrip()


def ending_lines(state: TrainState, found: Found, evaluation: dict[str, float]) -> list[str]:
    """What came out, and what to do next."""
    name = f"run.dir={shlex.quote(_shown(found.folder))}"
    key, value = _length(state.config, 2 * (state.step - state.stage.first_step))
    again = ("run.dir=", "run.fresh=", "run.mode=", f"{key}=")
    words = shlex.join(word for word in sys.argv[1:] if not word.startswith(again))
    same = f"{_program(state.runtime.world_size)} {words + ' ' if words else ''}{name}"
    stage = f" stage={state.stage.name}" if state.stage.name else ""
    return [
        "",
        f"done: {state.step} steps, {state.tokens} tokens, {_held_out(state, evaluation)}",
        f"metrics      {_shown(found.folder / 'metrics.jsonl')}",
        f"go on        {same} {key}={value}",
        f"evaluate     {same}{stage} run.mode=evaluate",
        f"generate     {_generation(state, words)} {name}{stage} run.mode=generate "
        "generate.prompt='def '",
    ]


def _generation(state: TrainState, words: str) -> str:
    """A command line on as few ranks as generation needs: without pipeline and context."""
    config, stage = state.config, state.stage.name
    parallel = replace(config.parallel, pipeline=1, virtual_pipeline=1, context=1)
    own = {key for key, _ in stage_overrides(config, stage)} if stage else set()
    changed = [
        f"{f'curriculum.stages.{stage}.' if f'parallel.{key}' in own else ''}parallel.{key}={value}"
        for key, value in (("pipeline", 1), ("virtual_pipeline", 1), ("context", 1))
        if getattr(config.parallel, key) != value
    ]
    if parallel.stage_layers is not None:
        parallel = replace(parallel, stage_layers=None)
        where = f"curriculum.stages.{stage}." if "parallel.stage_layers" in own else ""
        changed.append(f"{where}parallel.stage_layers=null")
    return " ".join([_program(fewest_ranks(parallel)), *([words] if words else []), *changed])


def _held_out(state: TrainState, evaluation: dict[str, float]) -> str:
    text = f"held-out loss {evaluation['eval/loss']:.4f}"
    if state.first_evaluation is not None:
        text += f" (before training {state.first_evaluation:.4f})"
    return text


def _length(config: RunConfig, steps: int) -> tuple[str, int]:
    """The key and value that give the run, or the stage in which it ends, so many steps."""
    stage = config.curriculum.stage
    if not stage:
        return "train.steps", steps
    if TOKENS in dict(stage_overrides(config, stage)):
        return f"curriculum.stages.{stage}.{TOKENS}", steps * config.train.batch_tokens
    return f"curriculum.stages.{stage}.train.steps", steps


def _program(world_size: int) -> str:
    """How a command line for so many ranks begins."""
    if world_size == 1:
        return "python pretrain.py"
    return f"torchrun --standalone --nproc-per-node {world_size} pretrain.py"


def _shown(path: Path) -> str:
    """The path as the user would type it from here."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
