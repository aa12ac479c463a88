"""What crosses stages: every chunk has exactly the sources it needs, and gradients come back once.

The schedule is played in one process: messages are cut from their graph as between ranks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_ext.config.compose import compose
from megatron_ext.config.residual import chunk_sources, opens_source, source_count
from megatron_ext.config.schema import (
    ModelOptions,
    ParallelOptions,
    ResidualKind,
    ResidualOptions,
    RunConfig,
)
from megatron_ext.parallel.pipeline import Boundary, SourceCache, schedule_arguments


def layout(
    sizes: list[int],
    *,
    pipeline: int,
    block: int = 2,
    kind: ResidualKind = ResidualKind.block,
    cached: bool = True,
) -> RunConfig:
    return RunConfig(
        model=ModelOptions(num_layers=sum(sizes)),
        parallel=ParallelOptions(
            pipeline=pipeline, virtual_pipeline=len(sizes) // pipeline, stage_layers=sizes
        ),
        residual=ResidualOptions(kind=kind, block_size=block, cache_sources=cached),
    )


layouts = st.builds(
    lambda pipeline, virtual, data, block, kind, cached: layout(
        data[: pipeline * virtual], pipeline=pipeline, block=block, kind=kind, cached=cached
    ),
    st.integers(1, 4),
    st.integers(1, 3),
    st.lists(st.integers(0, 5), min_size=12, max_size=12),
    st.integers(1, 7),
    st.sampled_from([ResidualKind.block, ResidualKind.full]),
    st.booleans(),
)


def test_sources_are_counted_as_the_procedure_opens_them() -> None:
    block = ResidualOptions(kind=ResidualKind.block, block_size=12)
    # Kimi K3: 93 layers, a source at layers 0, 12, ... 84 and the running sum: at most 9.
    assert source_count(block, 93) == 9
    assert [source_count(block, n) for n in (0, 1, 12, 13, 24, 25)] == [1, 2, 2, 3, 3, 4]
    full = ResidualOptions(kind=ResidualKind.full)
    assert [source_count(full, n) for n in (0, 1, 3)] == [1, 3, 7]
    assert opens_source(ResidualOptions(kind=ResidualKind.standard), 0) == (False, False)


def test_kimi_k3_on_eight_stages_sends_five_times_as_much() -> None:
    config = layout([12] * 7 + [9], pipeline=8, block=12)
    plans = chunk_sources(config)
    assert [plan.slots_out for plan in plans[:-1]] == [2, 3, 4, 5, 6, 7, 8]  # 35, and 7 without


def test_a_cached_hop_does_not_grow_with_depth() -> None:
    sizes, blocks = [12] * 32, 12
    whole = chunk_sources(layout(sizes, pipeline=8, block=blocks, cached=False))
    cached = chunk_sources(layout(sizes, pipeline=8, block=blocks))
    assert whole[0].slots_out == 32  # up to 31 block sums and the running one
    # After the first round: the blocks of the other seven stages, and the running sum.
    assert {plan.received for plan in cached[8:]} == {8}
    assert cached[0].slots_out == 8


@given(layouts)
def test_every_chunk_has_what_came_before_and_hops_carry_no_more_than_needed(
    config: RunConfig,
) -> None:
    parallel, plans = config.parallel, chunk_sources(config)
    ends = [sum(parallel.stage_layers[: n + 1]) for n in range(len(plans))]
    starts = [0, *ends[:-1]]
    for chunk, plan in enumerate(plans):
        needed = source_count(config.residual, starts[chunk])
        assert plan.cached + plan.received == needed
        assert plan.received <= plan.slots_in
        if chunk + 1 < len(plans):
            after = plans[chunk + 1]
            assert plan.slots_out == after.slots_in
            assert plan.skipped == after.cached
        if chunk + parallel.pipeline < len(plans):
            assert plan.kept == plans[chunk + parallel.pipeline].cached
            # A rank can only keep what it has itself, and not the sum that still runs.
            assert plan.kept < source_count(config.residual, ends[chunk])
            if parallel.virtual_pipeline > 1 and config.residual.cache_sources:
                assert plan.kept == source_count(config.residual, ends[chunk]) - 1
    if parallel.virtual_pipeline > 1:
        assert len({plan.slots_out for plan in plans[:-1]}) == 1


def play(config: RunConfig, weights: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Loss, its gradients, and all messages of a toy model: sublayers are products of a weight and
    the mean of the sources. `weights` [layers, 2, h]."""
    plans, options = chunk_sources(config), config.residual
    pipeline = config.parallel.pipeline
    caches = [SourceCache() for _ in range(pipeline)]
    embedding = torch.linspace(-1, 1, 3 * 2 * weights.shape[-1], dtype=torch.float64)
    message = embedding.view(3, 2, -1).clone().requires_grad_()
    inputs, outputs, layer = [], [], 0
    for chunk, plan in enumerate(plans):
        boundary = Boundary(plan, caches[chunk % pipeline])
        inputs.append(message)
        sources = boundary.enter(message, micro_batch=5)
        for _ in range((config.parallel.stage_layers or [])[chunk]):
            for sublayer, opens in enumerate(opens_source(options, layer)):
                out = torch.tanh(weights[layer, sublayer] * torch.stack(sources).mean(0))
                sources = (*sources, out) if opens else (*sources[:-1], sources[-1] + out)
            layer += 1
        if chunk + 1 < len(plans):
            outputs.append(boundary.leave(sources, micro_batch=5))
            message = outputs[-1].detach().requires_grad_()
    loss = torch.stack(sources).mean(0).square().sum()
    loss.backward()
    for out, received in zip(reversed(outputs), reversed(inputs[1:]), strict=True):
        assert received.grad is not None  # else the schedule would have nothing to send back
        out.backward(received.grad)
    return loss, inputs[0].grad, outputs


@pytest.mark.parametrize("kind", [ResidualKind.block, ResidualKind.full])
@pytest.mark.parametrize(
    ("sizes", "pipeline"),
    [([2, 2, 2, 2], 2), ([1, 2, 0, 1, 2, 0], 2), ([0, 3, 1, 0, 0, 2, 1, 1], 4), ([3, 4], 2)],
)
def test_stages_compute_what_one_chunk_computes(
    kind: ResidualKind, sizes: list[int], pipeline: int
) -> None:
    found: list[Any] = []
    for parts, ranks, cached in (
        ([sum(sizes)], 1, False),
        (sizes, pipeline, False),
        (sizes, pipeline, True),
    ):
        weights = torch.randn(
            sum(sizes), 2, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64
        ).requires_grad_()
        config = layout(parts, pipeline=ranks, kind=kind, cached=cached)
        loss, embedding_grad, messages = play(config, weights)
        found.append((loss.detach(), embedding_grad, weights.grad))
        for message, plan in zip(messages, chunk_sources(config), strict=False):
            assert message.shape == (3 * plan.slots_out, 2, 4)
            assert message._base is None  # megatron-core frees it after sending
    for other in found[1:]:
        for ours, truth in zip(other, found[0], strict=True):
            torch.testing.assert_close(ours, truth, rtol=1e-12, atol=1e-12)


def test_what_is_not_kept_is_an_error() -> None:
    plans = chunk_sources(layout([2, 2, 2, 2], pipeline=2))
    boundary = Boundary(plans[2], SourceCache())
    with pytest.raises(RuntimeError, match="no sources are kept of micro-batch 3"):
        boundary.enter(torch.zeros(6, 1, 4), micro_batch=3)


def test_the_schedule_is_told_the_lengths() -> None:
    plain = schedule_arguments(compose(["data=sample"]), stage=0, sequence_length=64)
    assert plain == {"seq_length": 64}
    staged = schedule_arguments(layout([3, 4], pipeline=2), stage=0, sequence_length=64)
    assert staged["seq_length"] == 64
    adjust = staged["adjust_tensor_shapes_fn"]
    assert adjust([(32, 1, 8)], [(32, 1, 8)]) == ([(32, 1, 8)], [(96, 1, 8)])
    interleaved = schedule_arguments(
        layout([2, 2, 2, 2], pipeline=2, cached=False), stage=1, sequence_length=64
    )
    assert interleaved == {"seq_length": 64 * 4}
