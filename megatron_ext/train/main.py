"""`run.mode=train`: from a configuration to a finished run."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_ext.checkpoint.load import load
from megatron_ext.checkpoint.paths import read_extra
from megatron_ext.checkpoint.save import Checkpointer
from megatron_ext.config.compose import to_container
from megatron_ext.config.layout import draw
from megatron_ext.config.schema import RunConfig, Schedule
from megatron_ext.data.change import check_unchanged
from megatron_ext.errors import MegatronExtError
from megatron_ext.model.same import check_same
from megatron_ext.observe.metrics import Metrics
from megatron_ext.observe.run_files import remove_exit, write_exit, write_run
from megatron_ext.optim.schedule import learning_rate
from megatron_ext.parallel.runtime import Runtime, start, stop
from megatron_ext.train.evaluate import restore_weights
from megatron_ext.train.header import backends, header_lines
from megatron_ext.train.loop import run_loop
from megatron_ext.train.run_folder import Found, open_run_folder
from megatron_ext.train.state import TrainState, build_state

ALL_DONE = "all steps are done"


def train(config: RunConfig) -> int:
    """Start or resume the run in `run.dir`. Returns the exit code; errors of ours are raised."""
    runtime = start(config.run)
    try:
        found = open_run_folder(config, rank=runtime.rank)
        writer = runtime.rank == 0
        if found.finished:
            if writer:
                # Anew: a kill between the last save and the end left none.
                write_exit(found.folder, code=0, reason=ALL_DONE, step=found.step)
                print(finished_text(config, found))
            return 0
        state, restored = prepare(config, runtime, found)
        with Metrics(
            found.folder,
            logging=config.logging,
            run_id=state.run_id,
            config=to_container(config),
            resume_step=state.step,
            writer=writer,
            total_steps=config.train.steps,
            expert_parallel=config.parallel.expert,
        ) as metrics:
            if writer:
                write_run(
                    found.folder,
                    run_id=state.run_id,
                    layout=draw(config, runtime.world_size),
                    world_size=runtime.world_size,
                    command=sys.argv,
                    backends=backends(state),
                )
            metrics.header(header_lines(state, found, restored=restored))
            checkpointer = Checkpointer(
                found.folder / "checkpoints",
                mesh=state.mesh,
                asynchronous=config.checkpoint.asynchronous,
                keep=config.checkpoint.keep,
                keep_every=config.checkpoint.keep_every,
            )
            evaluation = run_loop(state, metrics, checkpointer)
            checkpointer.close()
            metrics.header(ending_lines(state, found, evaluation))
            metrics.finish(0, ALL_DONE)
        dist.barrier()
        return 0
    finally:
        stop()


def prepare(config: RunConfig, runtime: Runtime, found: Found) -> tuple[TrainState, str]:
    """The state to go on from, and `restore`'s line. An error of ours is left in `exit.json`, which
    until then says nothing: launchers must not act on how an earlier launch ended."""
    writer = runtime.rank == 0
    if writer:
        remove_exit(found.folder)
    try:
        state = build_state(config, runtime, run_id=found.run_id)
        return state, restore(state, found)
    except MegatronExtError as error:
        if writer:
            write_exit(found.folder, code=error.exit_code, reason=str(error), step=found.step)
        raise


def restore(state: TrainState, found: Found) -> str:
    """Go on from the run's own checkpoint, else start from `checkpoint.load`, else from the seed.

    Returns:
        What was done, for the header.

    Raises:
        ConfigError: the checkpoint is of another model.
        DataError: the run's own checkpoint was trained on other data.
    """
    if found.checkpoint is not None:
        # Before the tensors, which take long to read.
        saved, allow = read_extra(found.checkpoint), state.config.data.allow_change
        check_same(saved, state.config, tokenizer=state.tokenizer.fingerprint)
        changed = check_unchanged(saved["data"], state.train_data, allow=allow)
        state.restore(load(found.checkpoint, state.chunks, state.optimizer, state.mesh))
        note = f", on other data ({'; '.join(changed)})" if changed else ""
        note += schedule_note(state, saved)
        return f"resumes after step {state.step} from {found.checkpoint}{note}"
    if state.config.checkpoint.load:
        path = restore_weights(state)
        state.optimizer.reload_model_params()
        state.step, state.tokens, state.first_evaluation = 0, 0, None
        return f"starts with the weights of {path}; steps, optimizer and data from the beginning"
    return f"starts anew with seed {state.config.run.seed}"


def schedule_note(state: TrainState, saved: dict[str, Any]) -> str:
    """The schedule spans the run, so other `train.steps` move the rate of the steps to come: say
    from what to what. Empty when it stays."""
    optim, total = state.config.optim, state.total_tokens
    was = int(saved.get("total_tokens", total))
    if was == total or optim.schedule_tokens is not None or optim.schedule is Schedule.constant:
        return ""
    before, after = (learning_rate(optim, state.tokens, total_tokens=n) for n in (was, total))
    return (
        f"; the schedule now ends at {total} tokens instead of {was}, which takes the rate from "
        f"{before:.2e} to {after:.2e} (optim.schedule_tokens={was} keeps it)"
    )


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
