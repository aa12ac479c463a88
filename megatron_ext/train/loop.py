"""The training loop: step, evaluate, log, save - until the configured steps are done, or somebody
asks to stop."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_ext.checkpoint.save import Checkpointer
from megatron_ext.config.operations import HealthAction
from megatron_ext.model.count import flops_per_token
from megatron_ext.observe.layer_history import is_due
from megatron_ext.observe.metrics import Metrics
from megatron_ext.observe.profile import Profiler
from megatron_ext.resilience.referee import Decision, Referee
from megatron_ext.resilience.requests import SAVE, STOP, Requests, stop_reason
from megatron_ext.resilience.watchdog import Watchdog
from megatron_ext.train.depth_health import DepthWatch
from megatron_ext.train.evaluate import apart, held_out_loss
from megatron_ext.train.feed import micro_batch_count
from megatron_ext.train.health import HealthWatch, own_layers
from megatron_ext.train.incident import Unsound, raise_for
from megatron_ext.train.lengths import by_length
from megatron_ext.train.replay import check_replay, replay_due
from megatron_ext.train.state import TrainState, gather_parameters
from megatron_ext.train.step import train_step
from megatron_ext.train.throughput import peak_memory_gib, peak_rate
from megatron_ext.train.waiting import StragglerWatch


@dataclass
class Ending:
    """How the loop ended.

    Attributes:
        evaluation: the last evaluation, as `eval/...` metrics.
        stopped: who asked to stop; empty when nobody did. After the last step too, where only a
            next stage is left to stop.
    """

    evaluation: dict[str, float] = field(default_factory=dict)
    stopped: str = ""


def run_loop(
    state: TrainState,
    metrics: Metrics,
    checkpointer: Checkpointer,
    *,
    folder: Path,
    requests: Requests,
    watchdog: Watchdog,
) -> Ending:
    """Train in the run folder from `state.step` to `train.steps`, or until all ranks agree to stop.

    A row is written before the checkpoint of its step becomes the latest: killed in between, the
    row is cut away on resume and written again; the other way round it would be lost. The last step
    is saved before it is evaluated, which may fail, and its row is completed afterwards: a run that
    ended in between makes up for it when it is started again.

    Raises:
        TrainingHalted: a step was bad, and the policy is to halt.
        Rewind: a step was bad, and the policy is to go back.
    """
    config, ending, begun_at = state.config, Ending(), state.step
    referee = Referee(state.health, requests, device=state.runtime.device)
    cost = _cost(state)
    checkpointer.reserve(state.chunks, state.optimizer)
    watchdog.beat(state.step, "evaluation before training")
    begun: dict[str, float] = {}
    if state.step == state.stage.first_step:
        found = held_out_loss(state) | apart(state)
        before = metrics.evaluation(state.step, state.tokens, found)
        state.first_evaluation = before["eval/loss"]
        begun = {
            name.replace("eval/", "eval/before/"): before[name]
            for name in ("eval/loss", "eval/apart/loss")
            if name in before
        }
    request = referee.between_steps()
    stalled = 0.0
    watch, depth_watch = HealthWatch(state), DepthWatch(state)
    profiler, stragglers = _profiler(state, folder), StragglerWatch(state, folder)
    while state.step < config.train.steps and not request.stop:
        tokens = state.tokens
        watchdog.beat(state.step, "training step")
        if replay_due(state) and (differ := check_replay(state)):
            metrics.warn(differ)
        measured = is_due(
            state.step + 1, interval=config.logging.health_interval, total_steps=config.train.steps
        )
        if measured:
            watch.begin()
            depth_watch.begin()
        stragglers.begin()
        with profiler.watching(state.step + 1):
            values, decision = judged_step(state, referee)
        times = stragglers.end(values)
        health = watch.end() if measured else []
        depth = depth_watch.end() if measured else []
        request = decision.request
        values |= cost(values) | _incidents(state) | (times.metrics() if times else {})
        values |= begun
        begun = {}
        if profiler.due(state.step):
            values["profile/kernels"] = _largest(profiler.kernels, state.runtime.device)
            metrics.header(
                [f"profile of step {state.step} in {folder}/{profiler.place(state.step)}"]
            )
        values["checkpoint/stall_seconds"] = stalled
        last = state.step == config.train.steps
        every = config.evaluate.interval_tokens
        if not last and every and state.tokens // every > tokens // every:
            watchdog.beat(state.step, "evaluation")
            values |= metrics.evaluation(state.step, state.tokens, held_out_loss(state))
        if checkpointer.save_seconds is not None:
            values["checkpoint/save_seconds"] = checkpointer.save_seconds
        metrics.step(state.step, values, loads=state.loads, health=health, depth=depth)
        if times is not None and (slow := times.warning()):
            metrics.warn(slow)
        if decision.verdict.action is not HealthAction.ignore:
            metrics.warn(f"step {state.step}: {_told(decision)}")
        begin = time.perf_counter()
        every = config.checkpoint.interval
        if last or (every and state.step % every == 0) or request.save:
            watchdog.beat(state.step, "save")
            save(state, checkpointer)
            requests.clear(SAVE)
        checkpointer.poll()
        stalled = time.perf_counter() - begin
    if request.stop and state.step < config.train.steps:
        metrics.header([f"stopping ({stop_reason(request.stop)}), saving step {state.step} ..."])
        watchdog.beat(state.step, "save")
        if state.step > begun_at:  # else the checkpoint that it came from is this one
            save(state, checkpointer)
    watchdog.beat(state.step, "end of the last save")
    checkpointer.close()
    if state.step >= config.train.steps:
        ending.evaluation = last_evaluation(state, metrics, watchdog)
    # Also what came while the last step was saved and evaluated, which may take long.
    request = request if request.stop else referee.between_steps()
    if request.stop:
        ending.stopped = stop_reason(request.stop)
        requests.clear(STOP)
    return ending


def last_evaluation(state: TrainState, metrics: Metrics, watchdog: Watchdog) -> dict[str, float]:
    """Evaluate after the last step, also by length, and complete its row."""
    watchdog.beat(state.step, "evaluation")
    found = held_out_loss(state) | apart(state)
    found |= by_length(state, beat=lambda: watchdog.beat(state.step, "evaluation by length"))
    values = metrics.evaluation(state.step, state.tokens, found)
    metrics.complete(state.step, values)
    return values


def judged_step(state: TrainState, referee: Referee) -> tuple[dict[str, float], Decision]:
    """One step whose update is applied, skipped or refused as all ranks agree.

    Raises:
        TrainingHalted, Rewind: see `raise_for`.
    """
    decided: list[Decision] = []

    def judge(loss: float, grad_norm: float) -> bool:
        decision = referee.decide(loss=loss, grad_norm=grad_norm)
        decided.append(decision)
        if decision.verdict.action in (HealthAction.rewind, HealthAction.halt):
            raise Unsound(decision)
        return decision.verdict.action is not HealthAction.skip

    try:
        values = train_step(state, judge)
    except Unsound as bad:
        raise_for(state, bad.decision)
    return values, decided[0]


def save(state: TrainState, checkpointer: Checkpointer) -> None:
    """Begin a checkpoint of the present step."""
    gather_parameters(state.chunks)
    checkpointer.save(state.step, state.chunks, state.optimizer, state.extra())


def _profiler(state: TrainState, folder: Path) -> Profiler:
    """For the steps of `profile.steps`."""
    return Profiler(
        folder,
        options=state.config.profile,
        rank=state.runtime.rank,
        device=state.runtime.device,
        passes=len(own_layers(state)) * micro_batch_count(state),
    )


def _largest(value: float, device: torch.device) -> float:
    """Over all ranks. Collective."""
    tensor = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return float(tensor)


def _cost(state: TrainState) -> Callable[[dict[str, float]], dict[str, float]]:
    """What a step's numbers say about the use of the machine."""
    config, runtime = state.config, state.runtime
    flops = flops_per_token(
        config.model,
        vocab_size=state.vocab_size,
        sequence_length=config.data.sequence_length,
    )
    peak = peak_rate(runtime.device, config.run.precision) * runtime.world_size
    return lambda values: {
        "mfu": values["tokens_per_second"] * flops / peak,
        "memory_gib": peak_memory_gib(runtime.device),
    }


def _incidents(state: TrainState) -> dict[str, float]:
    """Counts of what went wrong, once something has."""
    counts = {
        "health/skipped": state.health.skipped,
        "health/spikes": state.health.spikes,
        "health/left_out_tokens": state.left_out,
    }
    return {name: float(count) for name, count in counts.items() if count}


def _told(decision: Decision) -> str:
    done = "its update is skipped" if decision.verdict.action is HealthAction.skip else "goes on"
    return f"{decision.verdict.why}; {done}"
