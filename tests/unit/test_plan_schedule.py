"""The fullest moment of a schedule and the messages of a step, by arithmetic done by hand."""

from __future__ import annotations

import pytest

from megatron_ext.config.compose import compose
from megatron_ext.config.schema import ParallelOptions
from megatron_ext.plan.memory import data_ranks, fullest_moment, memory_of, passes
from megatron_ext.plan.rehearsal import Chunk, Stage
from megatron_ext.plan.tracker import Work
from megatron_ext.plan.traffic import ring, step_traffic


def stage(*kept: int, dense: int = 100, experts: int = 0) -> Stage:
    """Chunks that keep so many bytes, need 10 more forward and 25 more backward."""
    sent = Work()
    sent.sent["tensor", "allgather"] = 7
    chunks = [
        Chunk(
            kept=size,
            forward=size + 10,
            backward=size + 25,
            message_in=0,
            message_out=0,
            work_forward=sent,
            work_backward=sent,
        )
        for size in kept
    ]
    return Stage(
        dense=[(dense, 2)], experts=[(experts, 2)], buffers=4, statistics=64, chunks=chunks
    )


@pytest.mark.parametrize(
    ("number", "micro_batches", "in_flight"), [(0, 8, 4), (3, 8, 1), (0, 2, 2)]
)
def test_a_stage_keeps_as_many_micro_batches_as_stages_follow(
    number: int, micro_batches: int, in_flight: int
) -> None:
    four = ParallelOptions(pipeline=4)
    fullest = fullest_moment(stage(1000), four, number=number, micro_batches=micro_batches)
    assert fullest == (1000 * in_flight + 25, in_flight)


def test_without_stages_one_micro_batch_is_kept() -> None:
    assert fullest_moment(stage(1000), ParallelOptions(), number=0, micro_batches=9) == (1025, 1)


def test_interleaving_keeps_more_and_ends_with_nothing() -> None:
    parallel = ParallelOptions(pipeline=2, virtual_pipeline=2)
    done = list(passes(parallel, number=0, micro_batches=4))
    # Two warm-up passes more for the stage behind, two for the second chunk, then in turns.
    assert done[:6] == [(True, 0), (True, 0), (True, 1), (True, 1), (True, 0), (False, 1)]
    for chunk in range(2):
        assert done.count((True, chunk)) == done.count((False, chunk)) == 4
    # Five passes are kept: three of chunk 0, two of chunk 1.
    assert fullest_moment(stage(100, 1000), parallel, number=0, micro_batches=4) == (2325, 5)


def test_optimizer_state_is_shared_out_over_its_own_ranks() -> None:
    config = compose(
        ["run.mode=plan", "run.precision=bf16", "parallel.expert=4", "plan.world_size=8"]
    )
    assert data_ranks(config.parallel, 8) == (8, 2)
    memory = memory_of(config, stage(1000, dense=800, experts=400), number=0, world_size=8)
    assert memory.parameters == 2 * 1200 + 4
    assert memory.gradients == 4 * 1200
    assert memory.optimizer == 12 * (800 // 8 + 400 // 2)


def test_messages_of_a_step_are_those_of_its_micro_batches_and_one_reduction() -> None:
    config = compose(["run.mode=plan", "run.precision=bf16", "plan.world_size=8"])
    sent = step_traffic(config, stage(1000, dense=800), number=0, world_size=8)
    assert sent == {
        ("tensor", "allgather"): 2 * 7,  # forward and backward of one micro-batch
        ("data", "reduce_scatter"): ring(800 * 4, 8),
        ("data", "allgather"): ring(800 * 2, 8),
        ("balance", "allreduce"): 2 * ring(64, 8),
    }
