"""Held-out loss: always the same tokens, whatever the layout and the step."""

from __future__ import annotations

import time
from copy import copy
from dataclasses import replace
from pathlib import Path

from megatron_ext.checkpoint.weights import load_weights
from megatron_ext.config.schema import RunConfig
from megatron_ext.config.stages import stage_config
from megatron_ext.data.batches import evaluation_batches
from megatron_ext.observe.console import evaluation_rows
from megatron_ext.parallel.runtime import start, stop
from megatron_ext.train.feed import feeds_of
from megatron_ext.train.lengths import by_length, length_rows
from megatron_ext.train.state import TrainState, build_state
from megatron_ext.train.step import evaluating, run_schedule


def held_out_loss(state: TrainState) -> dict[str, float]:
    """Loss over the first `evaluate.tokens` held-out tokens. Changes nothing in `state`.

    Returns:
        `eval/...` metrics, the same on every rank.
    """
    begin = time.perf_counter()
    config, stream = state.config, state.held_out_data
    length, sequences = config.data.sequence_length, config.train.micro_batch_size
    data_rank, data_size = int(state.mesh.dp.rank()), int(state.mesh.dp.size())
    tokens = min(config.evaluate.tokens, sum(stream.tokens_per_epoch.values()))
    wanted = max(1, tokens // length)
    # The interleaved schedule takes whole rounds of the pipeline only; the rest is masked out.
    pipeline = config.parallel.pipeline if config.parallel.virtual_pipeline > 1 else 1
    rounds = -(-wanted // (sequences * data_size * pipeline)) * pipeline
    batches = evaluation_batches(
        stream,
        tokens=wanted * length,
        sequence_length=length,
        micro_batch_size=sequences,
        data_rank=data_rank,
        data_size=data_size,
        rounds=rounds,
    )
    feeds = feeds_of(state, batches)
    with evaluating(state.chunks):
        losses = run_schedule(state, feeds, rounds, forward_only=True)
    return {
        "eval/loss": losses.mean,
        "eval/tokens": float(losses.tokens.sum()),
        "eval/seconds": time.perf_counter() - begin,
        **losses.by_source(state.sources, prefix="eval/"),
        **losses.by_position(prefix="eval/"),
    }


def apart(state: TrainState) -> dict[str, float]:
    """The held-out loss when every document is seen alone, where a stage packs them otherwise.

    Returns:
        `eval/apart/loss`; nothing without a curriculum, and where documents are isolated anyway.
    """
    data = state.config.data
    if not state.stage.name or data.isolate_documents:
        return {}
    stream = copy(state.held_out_data)
    stream.isolate_documents = True
    config = replace(state.config, data=replace(data, isolate_documents=True))
    losses = held_out_loss(replace(state, config=config, held_out_data=stream))
    return {"eval/apart/loss": losses["eval/loss"]}


def restore_weights(state: TrainState) -> Path:
    """Load weights alone: from `checkpoint.load` if given, else the run's latest checkpoint.

    Raises:
        CheckpointError: there is none.
        ConfigError: it is of another model.
    """
    path, extra = load_weights(
        state.config, state.chunks, state.mesh, tokenizer=state.tokenizer.fingerprint
    )
    state.restore(extra)
    return path


def evaluate(config: RunConfig) -> int:
    """`run.mode=evaluate`: print the held-out loss of a checkpoint. Returns the exit code."""
    config = stage_config(config, config.curriculum.stage or "")
    runtime = start(config.run)
    try:
        state = build_state(config, runtime)
        path = restore_weights(state)
        values, lengths = held_out_loss(state), by_length(state)
        if runtime.rank == 0:
            print(f"checkpoint {path}")
            print("\n".join(evaluation_rows(state.step, state.tokens, values)))
            print("\n".join(length_rows(lengths)))
        return 0
    finally:
        stop()
