"""The training loop: step, evaluate, log, save - until the configured steps are done."""

from __future__ import annotations

import time

from megatron_ext.checkpoint.save import Checkpointer
from megatron_ext.model.count import flops_per_token
from megatron_ext.observe.layer_history import is_due
from megatron_ext.observe.metrics import Metrics
from megatron_ext.train.evaluate import held_out_loss
from megatron_ext.train.health import HealthWatch
from megatron_ext.train.state import TrainState, gather_parameters
from megatron_ext.train.step import train_step
from megatron_ext.train.throughput import peak_memory_gib, peak_rate


def run_loop(state: TrainState, metrics: Metrics, checkpointer: Checkpointer) -> dict[str, float]:
    """Train from `state.step` to `train.steps`.

    A row is written before the checkpoint of its step becomes the latest: killed in between, the
    row is cut away on resume and written again; the other way round it would be lost.

    Returns:
        The last evaluation, as `eval/...` metrics.
    """
    config = state.config
    flops = flops_per_token(
        config.model,
        vocab_size=state.vocab_size,
        sequence_length=config.data.sequence_length,
    )
    peak = peak_rate(state.runtime.device, config.run.precision) * state.runtime.world_size
    if state.step == 0:
        before = metrics.evaluation(0, 0, held_out_loss(state))
        state.first_evaluation = before["eval/loss"]
    evaluation: dict[str, float] = {}
    stalled = 0.0
    watch = HealthWatch(state)
    while state.step < config.train.steps:
        tokens = state.tokens
        measured = is_due(
            state.step + 1, interval=config.logging.health_interval, total_steps=config.train.steps
        )
        if measured:
            watch.begin()
        values = train_step(state)
        health = watch.end() if measured else []
        values["mfu"] = values["tokens_per_second"] * flops / peak
        values["memory_gib"] = peak_memory_gib(state.runtime.device)
        values["checkpoint/stall_seconds"] = stalled
        last = state.step == config.train.steps
        every = config.evaluate.interval_tokens
        if last or (every and state.tokens // every > tokens // every):
            evaluation = metrics.evaluation(state.step, state.tokens, held_out_loss(state))
            values |= evaluation
        metrics.step(state.step, values, loads=state.loads, health=health)
        begin = time.perf_counter()
        every = config.checkpoint.interval
        if last or (every and state.step % every == 0):
            gather_parameters(state.chunks)
            checkpointer.save(state.step, state.chunks, state.optimizer, state.extra())
        checkpointer.poll()
        stalled = time.perf_counter() - begin
    return evaluation
