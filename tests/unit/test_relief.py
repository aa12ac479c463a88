"""Which ways out of a shortage of memory are proposed, and in which order."""

from __future__ import annotations

import errno
import re

import pytest
import torch

from megatron_ext.config.compose import compose
from megatron_ext.errors import ConfigError
from megatron_ext.plan.relief import ENOUGH, ask, candidates, consider
from megatron_ext.train.memory import is_out_of_memory

SMALL = ["data=sample", "run.device=cpu", "train.batch_tokens=16384", "train.micro_batch_size=4"]


def ways(*words: str, world_size: int = 1) -> list[str]:
    config = compose([*SMALL, *words], world_size=world_size)
    return [found for found, _, _ in candidates(config, world_size=world_size)]


def test_what_costs_nothing_comes_first_and_more_messages_last() -> None:
    parts = ["train.expert_chunk_tokens=256", "train.kda_segment_tokens=256"]
    assert ways() == [
        *("train.micro_batch_size=2", *parts),
        *("train.recompute=selective", "train.recompute=full"),
    ]
    words = ["parallel.distributed_optimizer=false", "train.loss_chunk_tokens=9999"]
    found = ways(*words, "train.recompute=selective", world_size=4)
    assert found[:6] == [
        *("parallel.distributed_optimizer=true", "train.loss_chunk_tokens=null"),
        *("train.micro_batch_size=2", *parts, "train.recompute=full"),
    ]
    assert found[6:] == ["parallel.expert=2", "parallel.tensor=2", "parallel.pipeline=2"]


def test_only_what_the_rules_allow_is_proposed() -> None:
    # nano has four heads and six layers; experts are left out where there are none.
    found = ways("parallel.tensor=4", "model.first_dense_layers=null", world_size=8)
    assert "parallel.tensor=8" not in found
    assert "parallel.expert=2" not in found
    assert "parallel.pipeline=2" in found
    assert "run.precision=bf16" not in found, "of a CPU"


def test_parts_of_a_sequence_are_halved_where_they_are_set_and_left_out_where_they_cannot_be() -> (
    None
):
    words = ["train.expert_chunk_tokens=512", "train.kda_segment_tokens=64"]
    found = ways(*words)
    assert "train.expert_chunk_tokens=256" in found
    assert not any("kda_segment_tokens" in word for word in found), "no whole chunk is less"
    assert not any("expert_chunk" in word for word in ways("model.first_dense_layers=null"))
    assert not any("kda_segment" in word for word in ways("model.attention=mla"))
    short = ways("data.sequence_length=32", "train.micro_batch_size=2")
    assert not any("chunk_tokens" in word or "segment" in word for word in short)


def test_a_graph_is_given_up_for_what_it_cannot_have() -> None:
    graph = ["run.device=cuda", "run.precision=bf16", "train.cuda_graph=true"]
    found = ways(*graph)
    assert "train.micro_batch_size=2" in found
    assert "train.cuda_graph=false train.expert_chunk_tokens=256" in found
    assert "train.cuda_graph=false train.recompute=full" in found


def test_ways_are_rehearsed_until_three_save_something() -> None:
    config = compose([*SMALL, "model.num_layers=2"], world_size=1)
    answer = consider(config, world_size=1, stage=0)
    assert answer.total == sum(
        (answer.weights, answer.gradients, answer.optimizer, answer.activations)
    )
    assert all(way.total < ENOUGH * answer.total for way in answer.ways)
    # Segments are passed over: among two layers the experts are what is full.
    micro, chunks, again = answer.ways
    assert [way.words for way in answer.ways] == [
        *("train.micro_batch_size=2", "train.expert_chunk_tokens=256"),
        "train.recompute=selective",
    ]
    times = [
        re.fullmatch(r"a step takes (\d+)% longer by the plan", w.price) for w in (chunks, again)
    ]
    assert all(times), answer.ways
    assert 0 < int(times[0][1]) < int(times[1][1]), "the cheapest first"
    assert "{" not in micro.price


def test_segments_help_where_whole_layers_are_computed_again_already() -> None:
    words = ["data.sequence_length=2048", "train.micro_batch_size=1", "train.recompute=full"]
    config = compose([*SMALL, *words, "model.num_layers=3"], world_size=1)
    answer = consider(config, world_size=1, stage=0)
    assert [way.words for way in answer.ways] == ["train.kda_segment_tokens=512"]


def test_a_plan_that_fails_is_told_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    config = compose(SMALL, world_size=1)
    config.data.tokenizer = "/nowhere/tokenizer.json"
    answer = ask(config, world_size=1, stage=0)
    assert isinstance(answer, str)
    assert "/nowhere/tokenizer.json" in answer


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
    ],
    ids=str,
)
def test_every_kind_of_shortage_is_known(error: Exception) -> None:
    assert is_out_of_memory(error)


def test_other_errors_are_none() -> None:
    with pytest.raises(RuntimeError) as real:
        torch.empty(1 << 55)
    assert is_out_of_memory(real.value)
    for error in (RuntimeError("shapes differ"), OSError(errno.ENOSPC, "full"), ConfigError("a")):
        assert not is_out_of_memory(error)
