"""`run.mode=train`: from a configuration to a finished run."""

from __future__ import annotations

import gc
import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_ext.checkpoint.history import History
from megatron_ext.checkpoint.paths import RESERVED, read_extra
from megatron_ext.checkpoint.save import Checkpointer
from megatron_ext.config.compose import to_container
from megatron_ext.config.layout import draw
from megatron_ext.config.schedule_rules import schedule_problems
from megatron_ext.config.schema import RunConfig, Schedule
from megatron_ext.data.change import check_next_blend, check_unchanged, go_on_with
from megatron_ext.errors import NEXT_STAGE, STOPPED, ConfigError, MegatronExtError, TrainingHalted
from megatron_ext.model.same import check_same
from megatron_ext.observe.metrics import Metrics
from megatron_ext.observe.run_files import leave_exit, write_exit, write_run
from megatron_ext.optim.schedule import learning_rate
from megatron_ext.parallel.environment import read_environment
from megatron_ext.parallel.runtime import Runtime, start, stop
from megatron_ext.resilience.requests import Requests
from megatron_ext.resilience.watchdog import Watchdog
from megatron_ext.train.curriculum import next_stage, same_layout, stage_of
from megatron_ext.train.endings import (
    ending_lines,
    finished_text,
    repeat_text,
    stage_lines,
    stopped_lines,
)
from megatron_ext.train.evaluate import restore_weights
from megatron_ext.train.header import backends, damaged_text, header_lines
from megatron_ext.train.incident import Rewind, go_back
from megatron_ext.train.lengths import check_probe_lengths
from megatron_ext.train.loop import run_loop
from megatron_ext.train.memory import told
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
            return walk(config, runtime, requests)
        finally:
            stop()


def walk(config: RunConfig, runtime: Runtime, requests: Requests) -> int:
    """Train; of a curriculum, stage after stage while the ranks stay arranged as they are.

    A stage that needs another layout is for new processes, whatever the launcher. Each stage begins
    with what the run folder holds, like a relaunch. Returns the exit code.
    """
    mesh = None
    while True:
        found = open_run_folder(config, read_environment())
        name = found.stage.name
        own = found.stage.config(config, step=found.step, tokens=found.tokens)
        after = next_stage(config, name)
        outcome = go_on(own, runtime, found, requests, whole=config, following=after, mesh=mesh)
        if outcome.reason != NEXT_STAGE:
            return outcome.code
        if not same_layout(config, name, after):
            if runtime.rank == 0:
                print(repeat_text(), flush=True)
            return outcome.code
        mesh = outcome.mesh
        # The old run was moved aside when the first stage began.
        config.run.fresh = False
        gc.collect()  # megatron-core's modules are cycles, and hold the memory of the old stage
        if runtime.device.type == "cuda":
            torch.cuda.empty_cache()


@dataclass(frozen=True)
class Outcome:
    """How a run or stage ended: what `exit.json` says, and the groups that the process has made."""

    code: int
    reason: str
    mesh: ProcessGroupCollection | None = None


def go_on(
    config: RunConfig,
    runtime: Runtime,
    found: Found,
    requests: Requests,
    *,
    whole: RunConfig,
    following: str,
    mesh: ProcessGroupCollection | None,
) -> Outcome:
    """Train from what was found in the run folder.

    Args:
        config: of the run or stage.
        runtime: the started process.
        found: in the run folder.
        requests: to stop or save.
        whole: of the run with all its stages.
        following: name of the next stage; "" when this is the last.
        mesh: groups of this layout, if the process has made them.
    """
    writer = runtime.rank == 0
    if found.ended is not None:
        if writer:
            print(f"not restarted, since this launch ended by itself: {found.ended.get('reason')}")
        return Outcome(int(found.ended["code"]), str(found.ended.get("reason")))
    if found.finished:
        if writer:
            # Anew: a kill between the last save and the end left none.
            write_exit(found.folder, code=0, reason=ALL_DONE, step=found.step)
            print(finished_text(config, found))
        return Outcome(0, ALL_DONE)
    if writer:
        requests.watch(found.folder)
    config.checkpoint.load = found.load
    try:
        check_probe_lengths(whole, first=found.stage.name)
        with told(config, runtime, doing=lambda: "building the model"):
            state = build_state(
                config,
                runtime,
                run_id=found.run_id,
                stage=found.stage,
                mesh=mesh,
                before=trained_before(found),
            )
            restored, rewinds = restore(state, found), 0
        while True:
            try:
                code, reason = run(
                    state, found, requests, whole=whole, restored=restored, following=following
                )
                return Outcome(code, reason, state.mesh)
            except Rewind as rewind:
                restored = go_back(state, found.folder / CHECKPOINTS, rewind, done=rewinds)
                rewinds += 1
    except MegatronExtError as error:
        # Where the writer has not left one yet; an error that only another rank met is not lost.
        leave_exit(found.folder, code=error.exit_code, reason=str(error), step=found.step)
        raise


def run(
    state: TrainState,
    found: Found,
    requests: Requests,
    *,
    whole: RunConfig,
    restored: str,
    following: str = "",
) -> tuple[int, str]:
    """One stretch of training, from the step that `state` is at to an ending: code and reason.

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
            # Not the stage's own: the folder tells how to go on with the whole walk.
            config=to_container(whole),
            resume_step=state.step,
            writer=writer,
            total_steps=config.train.steps,
            expert_parallel=config.parallel.expert,
            stage=state.stage.name,
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
            trained=state.trained,
            source=state.source,
        )
        try:
            with told(config, runtime, doing=lambda: watchdog.doing):
                ending = run_loop(
                    state,
                    metrics,
                    checkpointer,
                    folder=found.folder,
                    requests=requests,
                    watchdog=watchdog,
                )
        except (Rewind, TrainingHalted):  # agreed by all ranks, which finish their save together
            checkpointer.close()
            raise
        if ending.stopped and (following or state.step < config.train.steps):
            code, reason = STOPPED, ending.stopped
            metrics.header(stopped_lines(state, reason))
        elif following:
            # Also where this process goes on: killed before that, it is to be started again.
            code, reason = STOPPED, NEXT_STAGE
            metrics.header(stage_lines(state, ending.evaluation, following=following))
        else:
            code, reason = 0, ALL_DONE
            metrics.header(ending_lines(state, found, ending.evaluation))
        metrics.finish(code, reason)
    dist.barrier()
    return code, reason


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
        begins, changed = stage_of(saved) != state.stage, []
        other = begins and check_next_blend(saved["data"], state.train_data)
        if not begins:
            changed = check_unchanged(saved["data"], state.train_data, allow=allow)
        go_on_with(saved["data"], state.train_data, other_blend=other)
        state.take_over(found.checkpoint, verified=True)
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


def trained_before(found: Found) -> History | None:
    """What was trained when, in the checkpoint to go on from."""
    if found.checkpoint is None:
        return None
    return History.read(read_extra(found.checkpoint)[RESERVED])


def check_schedule(state: TrainState) -> None:
    """The rules of the schedule held for `train.steps` x the batch; a resume with another batch
    size ends elsewhere.

    Raises:
        ConfigError: they no longer do.
    """
    wrong = schedule_problems(
        state.config.optim, total=state.schedule_tokens, name="the tokens at the end of the run"
    )
    problems = [problem.text for problem in wrong]
    if problems:
        raise ConfigError(problems)


def schedule_note(state: TrainState, saved: dict[str, Any]) -> str:
    """The schedule spans the run, so other `train.steps` move the rate of the steps to come: say
    from what to what. Empty when it stays."""
    optim, first, total = state.config.optim, state.stage.first_tokens, state.schedule_tokens
    was = int(saved.get("total_tokens", total + first)) - first
    if stage_of(saved) != state.stage:
        return f"; {state.stage.name} begins, with its own schedule"
    if was == total or optim.schedule_tokens is not None or optim.schedule is Schedule.constant:
        return ""
    before, after = (
        learning_rate(optim, state.tokens - first, total_tokens=n) for n in (was, total)
    )
    return (
        f"; the schedule now ends at {total} tokens instead of {was}, which takes the rate from "
        f"{before:.2e} to {after:.2e} (optim.schedule_tokens={was} keeps it)"
    )
