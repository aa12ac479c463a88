"""What a run says at its end, and how to go on from there."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import torch.distributed as dist

from megatron_ext.config.schema import RunConfig
from megatron_ext.train.run_folder import Found
from megatron_ext.train.state import TrainState


def finished_text(config: RunConfig, found: Found) -> str:
    """A finished run is no error: say so, and name the two ways on."""
    step = found.step
    program, words = _program(dist.get_world_size()), sys.argv[1:]
    same = f"{program} {shlex.join(words)}".rstrip()
    longer = [word for word in words if not word.startswith("train.steps=")]
    longer.append(f"train.steps={step + max(1, config.train.steps // 2)}")
    return (
        f"{found.folder}: this run is finished, step {step} of {config.train.steps} is saved.\n"
        f"  go on:     {program} {shlex.join(longer)}\n"
        f"  anew:      {same} run.fresh=true   (moves the old run aside)"
    )


def stopped_lines(state: TrainState, why: str) -> list[str]:
    """A run that was stopped goes on with its own command."""
    words = [word for word in sys.argv[1:] if not word.startswith("run.fresh=")]
    same = f"{_program(state.runtime.world_size)} {shlex.join(words)}".rstrip()
    return [
        "",
        f"stopped on request ({why}): step {state.step} of {state.config.train.steps} is saved",
        f"go on        {same}",
    ]


def ending_lines(state: TrainState, found: Found, evaluation: dict[str, float]) -> list[str]:
    """What came out, and what to do next."""
    name = f"run.dir={shlex.quote(_shown(found.folder))}"
    held_out = f"held-out loss {evaluation['eval/loss']:.4f}"
    if state.first_evaluation is not None:
        held_out += f" (before training {state.first_evaluation:.4f})"
    again = ("run.dir=", "run.fresh=", "run.mode=", "train.steps=")
    same = shlex.join(word for word in sys.argv[1:] if not word.startswith(again))
    same = f"{_program(state.runtime.world_size)} {same + ' ' if same else ''}{name}"
    # Generation runs on one stage, whatever the training ran on.
    parallel = state.config.parallel
    one_stage = " parallel.pipeline=1" if parallel.pipeline > 1 else ""
    one_stage += " parallel.virtual_pipeline=1" if parallel.virtual_pipeline > 1 else ""
    one_stage += " parallel.stage_layers=null" if parallel.stage_layers is not None else ""
    return [
        "",
        f"done: {state.step} steps, {state.tokens} tokens, {held_out}",
        f"metrics      {_shown(found.folder / 'metrics.jsonl')}",
        f"go on        {same} train.steps={state.step * 2}",
        f"evaluate     {same} run.mode=evaluate",
        f"generate     {same}{one_stage} run.mode=generate generate.prompt='def '",
    ]


def _program(world_size: int) -> str:
    """How a command line for so many ranks begins."""
    if world_size == 1:
        return "python pretrain.py"
    return f"torchrun --standalone --nproc-per-node {world_size} pretrain.py"


def _shown(path: Path) -> str:
    """The path as the user would type it from here."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
