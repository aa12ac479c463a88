"""`run.mode=train`: from a configuration to a finished run."""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist

from megatron_ext.checkpoint.load import load
from megatron_ext.checkpoint.paths import read_extra
from megatron_ext.checkpoint.save import Checkpointer
from megatron_ext.config.compose import to_container
from megatron_ext.config.layout import draw
from megatron_ext.config.schedule_rules import schedule_problems
from megatron_ext.config.schema import RunConfig, Schedule
from megatron_ext.data.change import check_unchanged
from megatron_ext.errors import STOPPED, ConfigError, MegatronExtError, TrainingHalted
from megatron_ext.model.same import check_same
from megatron_ext.observe.metrics import Metrics
from megatron_ext.observe.run_files import leave_exit, write_exit, write_run
from megatron_ext.optim.schedule import learning_rate
from megatron_ext.parallel.environment import read_environment
from megatron_ext.parallel.runtime import Runtime, start, stop
from megatron_ext.resilience.requests import Requests
from megatron_ext.resilience.watchdog import Watchdog
from megatron_ext.train.endings import ending_lines, finished_text, stopped_lines
from megatron_ext.train.evaluate import restore_weights
from megatron_ext.train.header import backends, damaged_text, header_lines
from megatron_ext.train.incident import Rewind, go_back
from megatron_ext.train.loop import run_loop
from megatron_ext.train.run_folder import Found, open_run_folder
from megatron_ext.train.state import TrainState, build_state

CHECKPOINTS = "checkpoints"
ALL_DONE = "all steps are done"


def train(config: RunConfig) -> int:
    """Start or resume the run in `run.dir`. Returns the exit code; errors of ours are raised."""
    with Requests() as requests:
        try:
            runtime = start(config.run)
        except MegatronExtError as error:
            error.run_dir = config.run.dir
            raise
        try:
            found = open_run_folder(config, read_environment())
            return go_on(config, runtime, found, requests)
        finally:
            stop()


def go_on(config: RunConfig, runtime: Runtime, found: Found, requests: Requests) -> int:
    """Train from what was found in the run folder. Returns the exit code."""
    writer = runtime.rank == 0
    if found.ended is not None:
        if writer:
            print(f"not restarted, since this launch ended by itself: {found.ended.get('reason')}")
        return int(found.ended["code"])
    if found.finished:
        if writer:
            # Anew: a kill between the last save and the end left none.
            write_exit(found.folder, code=0, reason=ALL_DONE, step=found.step)
            print(finished_text(config, found))
        return 0
    if writer:
        requests.watch(found.folder)
    config.checkpoint.load = found.load
    try:
        state = build_state(config, runtime, run_id=found.run_id)
        restored, rewinds = restore(state, found), 0
        while True:
            try:
                return run(state, found, requests, restored=restored)
            except Rewind as rewind:
                restored = go_back(state, found.folder / CHECKPOINTS, rewind, done=rewinds)
                rewinds += 1
    except MegatronExtError as error:
        # Where the writer has not left one yet; an error that only another rank met is not lost.
        leave_exit(found.folder, code=error.exit_code, reason=str(error), step=found.step)
        raise


def run(state: TrainState, found: Found, requests: Requests, *, restored: str) -> int:
    """One stretch of training, from the step that `state` is at to an ending. The exit code.

    Raises:
        Rewind: go back, then call it again.
    """
    config, runtime = state.config, state.runtime
    writer = runtime.rank == 0
    watchdog = Watchdog(
        found.folder,
        rank=runtime.rank,
        world_size=runtime.world_size,
        limit_seconds=hang_seconds(config),
    )
    with (
        watchdog,
        Metrics(
            found.folder,
            logging=config.logging,
            run_id=state.run_id,
            config=to_container(config),
            resume_step=state.step,
            writer=writer,
            total_steps=config.train.steps,
            expert_parallel=config.parallel.expert,
        ) as metrics,
    ):
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
        if found.damaged:
            metrics.warn(damaged_text(found))
        checkpointer = Checkpointer(
            found.folder / CHECKPOINTS,
            mesh=state.mesh,
            asynchronous=config.checkpoint.asynchronous,
            keep=config.checkpoint.keep,
            keep_every=config.checkpoint.keep_every,
        )
        try:
            ending = run_loop(state, metrics, checkpointer, requests=requests, watchdog=watchdog)
        except (Rewind, TrainingHalted):  # agreed by all ranks, which finish their save together
            checkpointer.close()
            raise
        if ending.stopped:
            metrics.header(stopped_lines(state, ending.stopped))
            metrics.finish(STOPPED, ending.stopped)
        else:
            metrics.header(ending_lines(state, found, ending.evaluation))
            metrics.finish(0, ALL_DONE)
    dist.barrier()
    return STOPPED if ending.stopped else 0


def hang_seconds(config: RunConfig) -> float:
    """How long the watchdog waits. Less than the collectives do, whose end says less."""
    given = config.resilience.hang_seconds
    return config.run.timeout_seconds * 2 / 3 if given is None else given


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
        state.restore(
            load(found.checkpoint, state.chunks, state.optimizer, state.mesh, verified=True)
        )
        check_schedule(state)
        note = f", on other data ({'; '.join(changed)})" if changed else ""
        note += schedule_note(state, saved)
        return f"resumes after step {state.step} from {found.checkpoint}{note}"
    if state.config.checkpoint.load:
        path = restore_weights(state)
        state.optimizer.reload_model_params()
        state.step, state.tokens, state.first_evaluation = 0, 0, None
        return f"starts with the weights of {path}; steps, optimizer and data from the beginning"
    return f"starts anew with seed {state.config.run.seed}"


def check_schedule(state: TrainState) -> None:
    """The rules of the schedule held for `train.steps` x the batch; a resume with another batch
    size ends elsewhere.

    Raises:
        ConfigError: they no longer do.
    """
    wrong = schedule_problems(
        state.config.optim, total=state.total_tokens, name="the tokens at the end of the run"
    )
    problems = [problem.text for problem in wrong]
    if problems:
        raise ConfigError(problems)


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
