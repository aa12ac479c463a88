"""A rehearsal on the meta device predicts the bytes of a real step, and those of a measured one."""

from __future__ import annotations

import pytest
import torch
from megatron.core.optimizer import ChainedOptimizer

from megatron_ext.config.compose import compose
from megatron_ext.config.schema import RunConfig
from megatron_ext.parallel import cpu_support, runtime
from megatron_ext.plan.memory import memory_of
from megatron_ext.plan.rehearsal import rehearse
from megatron_ext.plan.tracker import GRANULE
from megatron_ext.train.feed import Waited, next_batches
from megatron_ext.train.micro_batch import forward
from megatron_ext.train.state import TrainState, build_state
from megatron_ext.train.step import device_feed, train_step

GIB = 1 << 30
VOCABULARY = 384  # of the byte tokenizer


def nano(*words: str) -> RunConfig:
    return compose(["model=nano", "data=sample", "run.device=cpu", "run.dir=unused", *words])


def saved_bytes(state: TrainState) -> int:
    """What autograd saves in one forward pass, beside weights and buffers."""
    chunk = state.chunks[0]
    own = [*chunk.parameters(), *chunk.module.buffers()]
    known = {x.untyped_storage().data_ptr() for x in own}
    kept: dict[int, torch.Tensor] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        if x.untyped_storage().data_ptr() not in known:
            kept[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        forward(device_feed(state, Waited(next_batches(state)), chunk), chunk)
    return sum(x.untyped_storage().nbytes() for x in kept.values())


def optimizer_bytes(state: TrainState) -> int:
    """Moments, and main weights that are no weights of the model."""
    optimizer = state.optimizer
    parts = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    weights = {x.untyped_storage().data_ptr() for x in state.chunks[0].parameters()}
    total = 0
    for part in parts:
        for group in part.optimizer.param_groups:
            for main in group["params"]:
                total += sum(x.nbytes for x in part.optimizer.state[main].values())
                total += main.nbytes * (main.untyped_storage().data_ptr() not in weights)
    return total


@pytest.mark.parametrize(
    "words",
    [
        ("train.recompute=none",),
        ("train.recompute=selective", "run.precision=bf16"),
        ("train.recompute=full", "residual=block"),
    ],
    ids=" ".join,
)
def test_bytes_of_a_real_step_are_predicted(words: tuple[str, ...]) -> None:
    config = nano(*words)
    stage = rehearse(config, VOCABULARY, stage=0, imbalance=1.0)
    memory = memory_of(config, stage, number=0, world_size=1)
    place = runtime.start(config.run)
    try:
        state = build_state(config, place)
        train_step(state)
        ddp = state.chunks[0]
        held = [*ddp.parameters(), *ddp.module.buffers()]
        assert memory.parameters == sum(x.nbytes for x in held)
        assert memory.optimizer == optimizer_bytes(state)
        buffers = [*ddp.buffers, *ddp.expert_parallel_buffers]
        gradients = sum(buffer.grad_data.nbytes for buffer in buffers)
        assert 0 <= gradients - memory.gradients < 4096  # megatron-core pads its buffers
        # Autograd does not count what five layers of experts hold to find rows: 24 bytes a row and
        # 8 a token. The rest must agree to the byte, but for the loss.
        tokens, experts = 2 * 256, config.model.experts
        held_a_layer = tokens * (24 * experts.top_k + 8) + 8
        assert 0 <= stage.chunks[0].kept - saved_bytes(state) <= 5 * held_a_layer + 4
    finally:
        runtime.stop()
        cpu_support.uninstall()


MINI = ("model=mini", "data=sample", "run.precision=bf16", "train.batch_tokens=65536")


@pytest.mark.parametrize(
    ("words", "measured"),
    [
        (("train.micro_batch_size=4",), 48.14),
        (("train.micro_batch_size=4", "residual=block"), 48.74),
        (
            ("train.micro_batch_size=8", "data.sequence_length=8192", "train.recompute=full"),
            42.99,
        ),
    ],
    ids=["experts", "attention residuals", "recomputed"],
)
def test_memory_that_one_h200_measured_is_predicted(
    words: tuple[str, ...], measured: float
) -> None:
    config = compose(["run.mode=plan", *MINI, *words])
    stage = rehearse(config, VOCABULARY, stage=0, imbalance=1.0)
    memory = memory_of(config, stage, number=0, world_size=1)
    # Measured before rows of experts were summed by one kernel, which spares 2.7 GiB meanwhile: the
    # third is 7 % lower by now, the others 0.5 and 1.5 %.
    assert memory.total / GIB == pytest.approx(measured, rel=0.1)


def test_tensor_and_expert_parallelism_send_what_their_shapes_say() -> None:
    config = nano("parallel.tensor=2", "parallel.expert=2", "run.mode=plan", "plan.world_size=2")
    stage = rehearse(config, VOCABULARY, stage=0, imbalance=1.0)
    sent = stage.chunks[0].work_forward.sent
    tokens, experts = 2 * 256 // 2, config.model.experts
    # Five layers send rows of the latent width and their weights out, and rows back; half stay.
    row = 4 * (2 * (experts.latent_size or 0) + 1)
    assert sent["expert", "alltoall"] == 5 * tokens * experts.top_k * row // 2
    assert sent["tensor", "reduce_scatter"] > 0


FP8 = ("run.precision=bf16", "model.experts.backend=transformer_engine")


@pytest.mark.parametrize(
    "words",
    [(), ("run.precision=bf16",), ("run.device=cpu",), (*FP8, "model.experts.fp8=current")],
)
def test_products_of_experts_are_counted_apart_whatever_computes_them(
    words: tuple[str, ...],
) -> None:
    # 12 experts, so that rows do not divide evenly.
    config = compose(
        ["run.mode=plan", "model=nano", "data=sample", "model.experts.num_experts=12", *words]
    )
    (chunk,) = rehearse(config, VOCABULARY, stage=0, imbalance=1.0).chunks
    experts = config.model.experts
    rows = config.train.micro_batch_size * config.data.sequence_length * experts.top_k
    forward = 5 * 2 * rows * 3 * (experts.latent_size or 0) * experts.feed_forward_size
    assert chunk.work_forward.flops["grouped"] == forward
    assert chunk.work_backward.flops["grouped"] == 2 * forward


def test_rows_of_experts_in_fp8_keep_a_byte_a_number() -> None:
    words = ["run.mode=plan", "model=nano", "data=sample", *FP8]
    plain, ours = (
        rehearse(compose([*words, *more]), VOCABULARY, stage=0, imbalance=1.0).chunks[0]
        for more in ([], ["model.experts.fp8=blockwise"])
    )
    experts = compose(words).model.experts
    rows = 2 * 256 * experts.top_k
    of_a_layer = rows * ((experts.latent_size or 0) + experts.feed_forward_size)
    # What goes into both products, in half; and grouped_mm, in bfloat16's place, keeps the ends of
    # groups, in the allocator's smallest piece.
    assert plain.kept - ours.kept == 5 * (of_a_layer + GRANULE)


def test_a_longer_context_parallel_rank_gathers_latents_and_states() -> None:
    config = nano("parallel.context=2", "run.mode=plan", "plan.world_size=2")
    sent = rehearse(config, VOCABULARY, stage=0, imbalance=1.0).chunks[0].work_forward.sent
    assert sent["context", "allgather"] > 0
    assert {kind for kind, _ in sent} <= {"context", "other"}


def test_more_rows_for_the_busiest_rank_take_more_memory() -> None:
    config = nano("run.mode=plan", "parallel.expert=2", "plan.world_size=2")
    even, more = (
        rehearse(config, VOCABULARY, stage=0, imbalance=load).chunks[0].kept for load in (1.0, 1.5)
    )
    assert more > even


def test_queries_in_head_tail_order_travel_and_come_back() -> None:
    words = ["model.num_layers=1", "model.attention=mla", "model.first_dense_layers=null"]
    config = nano(*words, "parallel.context=2", "parallel.context_order=head_tail")
    (chunk,) = rehearse(config, VOCABULARY, stage=0, imbalance=1.0).chunks
    # Two rows of 128 tokens a rank, 4 heads; queries are 48 and values 32 wide, in float32.
    held = 2 * 128 * 4 * (48 + 32) * 4
    assert chunk.work_forward.sent["context", "alltoall"] == held // 2  # one half of two stays


@pytest.mark.parametrize("context", [1, 2])
def test_segments_of_linear_attention_need_less_in_a_plan(context: int) -> None:
    words = ["model.num_layers=1", "model.attention=kda", "model.first_dense_layers=null"]
    words += ["train.batch_tokens=4096", "data.sequence_length=4096", "train.micro_batch_size=1"]

    def activations(*more: str) -> int:
        config = nano(*words, f"parallel.context={context}", *more)
        stage = rehearse(config, VOCABULARY, stage=0, imbalance=1.0)
        return memory_of(config, stage, number=0, world_size=context).activations

    whole, cut = activations(), activations("train.kda_segment_tokens=256")
    # Queries, keys, values, decay and both gates, 128 wide in float32, at the least
    assert whole - cut > 4096 // context * 6 * 128 * 4


def test_what_linear_attention_keeps_is_counted_in_each_of_its_layers() -> None:
    def kept(*words: str) -> int:
        layers = ["model.num_layers=2", "model.attention=kda", "run.device=cuda"]
        config = nano(*layers, "train.batch_tokens=4096", "data.sequence_length=2048", *words)
        return rehearse(config, VOCABULARY, stage=0, imbalance=1.0).chunks[0].kept

    more = kept("train.kda_recompute=false") - kept()
    # By fla in float32 and 4 heads of 32: decay, five factors and values, and a state a chunk.
    assert more == 2 * 4096 * 4 * (6 * 32 + 32 * 32 // 64) * 4
    assert kept("train.kda_recompute=false", "train.recompute=full") == kept("train.recompute=full")


def test_chunks_of_tokens_keep_no_routed_rows() -> None:
    layer = ["model.num_layers=1", "model.first_dense_layers=0", "model.attention=kda"]

    def kept(*words: str) -> int:
        config = nano(*layer, "train.batch_tokens=4096", "data.sequence_length=2048", *words)
        return rehearse(config, VOCABULARY, stage=0, imbalance=1.0).chunks[0].kept

    # For 4 experts a token gate, linear branch and their product, 64 wide in float32.
    assert kept() - kept("train.expert_chunk_tokens=128") > 4096 * 4 * 3 * 64 * 4
