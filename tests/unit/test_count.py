"""Counts against hand counts: parameters of Kimi K3's layers, FLOPs of a tiny model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_ext.config.compose import compose
from megatron_ext.config.schema import (
    AttentionPattern,
    Device,
    ExpertOptions,
    Gate,
    KdaOptions,
    MlaOptions,
    ModelOptions,
    OutputGate,
    ParallelOptions,
    RunConfig,
    RunOptions,
)
from megatron_ext.model import count
from megatron_ext.parallel import cpu_support, runtime

TINY = ModelOptions(
    num_layers=2,
    hidden_size=8,
    feed_forward_size=12,
    attention=AttentionPattern.interleaved,
    full_attention_interval=2,
    kda=KdaOptions(num_heads=2, head_dim=4, value_dim=6, conv_width=4, decay_rank=3),
    mla=MlaOptions(
        num_heads=2,
        q_lora_rank=5,
        kv_lora_rank=6,
        qk_nope_head_dim=4,
        qk_rope_head_dim=2,
        v_head_dim=3,
    ),
)
# The formula takes value heads of their own width; the module has one width for all three.
BUILDABLE = replace(TINY, kda=replace(TINY.kda, value_dim=4))


def kimi_k3() -> RunConfig:
    return compose(["run.mode=plan", "model=k3"])


def test_kimi_k3_has_its_published_sizes() -> None:
    counts = count.count_parameters(kimi_k3(), 163840)
    # facts of the released model: 2.7795 T in all, 104.19 B active, 443.74 M a KDA layer, 232.20 M
    # a gated-MLA layer, 726.7 M the dense feed-forward, 33.03 M an expert
    assert counts.total == pytest.approx(2.7795e12, abs=0.5e8)
    assert counts.active == pytest.approx(104.19e9, abs=0.5e7)
    mixture = dict.fromkeys(("router", "latent", "experts", "shared"), 92)
    assert counts.layers == {"kda": 69, "mla": 24, "feed_forward": 1, **mixture}
    assert counts.by_part["experts"] == 92 * 896 * 3 * 3584 * 3072
    assert counts.by_part["latent"] == 92 * (2 * 7168 * 3584 + 3584)
    assert counts.by_part["shared"] == 92 * 3 * 7168 * 6144
    assert counts.by_part["router"] == 92 * 896 * 7168
    assert counts.by_part["kda"] / 69 == pytest.approx(443.74e6, abs=0.005e6)
    assert counts.by_part["mla"] / 24 == pytest.approx(232.20e6, abs=0.005e6)
    assert counts.by_part["feed_forward"] == 3 * 7168 * 33792
    assert counts.by_part["embedding"] == counts.by_part["head"] == 163840 * 7168
    assert counts.by_part["norms"] == (2 * 93 + 1) * 7168
    assert counts.total == sum(counts.by_part.values())


EXPERTS = ExpertOptions(
    num_experts=6, top_k=2, latent_size=4, feed_forward_size=10, shared_feed_forward_size=14
)
MIXED = replace(BUILDABLE, first_dense_layers=1, experts=EXPERTS)


@pytest.mark.parametrize("model", [BUILDABLE, MIXED], ids=["dense", "experts"])
def test_stages_add_up_to_the_model(model: ModelOptions) -> None:
    parallel = ParallelOptions(pipeline=2, virtual_pipeline=2)
    config = RunConfig(model=replace(model, num_layers=7), parallel=parallel)
    whole = count.count_parameters(config, 128)
    stages = count.count_stages(config, 128)
    assert len(stages) == 2
    for part, number in whole.by_part.items():
        assert sum(stage.by_part.get(part, 0) for stage in stages) == number, part


def test_tensor_parallel_ranks_hold_a_half_and_what_is_replicated() -> None:
    config = RunConfig(model=BUILDABLE, parallel=ParallelOptions(tensor=2))
    (rank,) = count.count_stages(config, 128)
    whole = count.count_parameters(config, 128)
    for part in ("embedding", "feed_forward", "head"):
        assert 2 * rank.by_part[part] == whole.by_part[part]
    assert rank.by_part["norms"] == whole.by_part["norms"]
    kda, mla = BUILDABLE.kda, BUILDABLE.mla
    replicated_kda = kda.decay_rank * 8 + kda.value_dim  # decay down, output norm
    assert 2 * rank.by_part["kda"] - whole.by_part["kda"] == replicated_kda
    latents = mla.q_lora_rank + mla.kv_lora_rank
    replicated_mla = (latents + mla.qk_rope_head_dim) * 8 + latents  # down maps, latent norms
    assert 2 * rank.by_part["mla"] - whole.by_part["mla"] == replicated_mla


def test_expert_parallel_ranks_hold_their_experts_and_all_of_the_rest() -> None:
    whole = count.count_parameters(RunConfig(model=MIXED), 128)
    parallel = ParallelOptions(expert=3, expert_tensor=2)
    (rank,) = count.count_stages(RunConfig(model=MIXED, parallel=parallel), 128)
    assert rank.by_part.pop("experts") * 6 == whole.by_part.pop("experts")
    assert rank.by_part == whole.by_part


def test_active_parameters_are_those_of_top_k_experts() -> None:
    whole = count.count_parameters(RunConfig(model=MIXED), 128)
    dense = count.count_parameters(
        RunConfig(model=replace(MIXED, experts=replace(EXPERTS, num_experts=2))), 128
    )
    routers = 8 * (6 - 2)  # four scores less
    assert whole.active == dense.active + routers
    assert whole.total == dense.total + routers + 4 * 3 * 4 * 10


KDA_FORMS = {
    "full": KdaOptions(num_heads=2, head_dim=4, value_dim=4, decay_rank=3),
    "low_rank": KdaOptions(
        num_heads=3, head_dim=4, value_dim=4, output_gate=OutputGate.low_rank, output_gate_rank=5
    ),
    "no_A_log": KdaOptions(num_heads=2, head_dim=4, value_dim=4, gate=Gate.bounded_plain),
}


@pytest.mark.parametrize("options", KDA_FORMS.values(), ids=KDA_FORMS)
def test_the_kda_formula_covers_every_matrix_of_the_module(options: KdaOptions) -> None:
    model = replace(TINY, num_layers=1, attention=AttentionPattern.kda, kda=options)
    counts = count.count_parameters(RunConfig(model=model), 128)
    keys, values = options.num_heads * options.head_dim, options.num_heads * options.value_dim
    vectors = (
        options.conv_width * (2 * keys + values)
        + (0 if options.gate is Gate.bounded_plain else options.num_heads)  # A_log
        + keys  # dt_bias
        + options.value_dim  # output norm
    )
    assert counts.by_part["kda"] == count.kda_weights(options, hidden_size=8) + vectors


MLA_FORMS = {
    "gated": TINY.mla,
    "no_gate": replace(TINY.mla, output_gate=False),
    "full_rank_queries": replace(TINY.mla, q_lora_rank=0),
}


@pytest.mark.parametrize("options", MLA_FORMS.values(), ids=MLA_FORMS)
def test_the_mla_formula_covers_every_matrix_of_the_module(options: MlaOptions) -> None:
    model = replace(TINY, num_layers=1, attention=AttentionPattern.mla, mla=options)
    counts = count.count_parameters(RunConfig(model=model), 128)
    norms = options.q_lora_rank + options.kv_lora_rank
    assert counts.by_part["mla"] == count.mla_weights(options, hidden_size=8) + norms


def test_flops_of_a_tiny_model_equal_the_hand_count() -> None:
    # widths: hidden 8; KDA keys 2 x 4 = 8, values 2 x 6 = 12; MLA keys 2 x (4 + 2), values 2 x 3
    kda = 8 * 8 + 8 * 8 + 8 * 12  # q, k, v
    kda += 8 * 3 + 3 * 8  # decay, through rank 3
    kda += 8 * 2 + 8 * 12 + 12 * 8  # beta, output gate, output
    mla = 8 * 5 + 5 * 12  # queries, through rank 5
    mla += 8 * (6 + 2) + 6 * 2 * (4 + 3)  # latent with the shared key part; keys and values
    mla += 8 * 6 + 6 * 8  # output gate, output
    feed_forward = 3 * 8 * 12
    head = 8 * 128
    weights = kda + mla + 2 * feed_forward + head
    # one head, one token, chunk 64: keys-keys, queries-keys, inverse on keys (width 4);
    # inverse on values, scores on values (width 6); state 4 x 6 read twice and written once
    products = 3 * 2 * 64 * 4 + 2 * 2 * 64 * 6 + 3 * 2 * 4 * 6
    recurrence = 2 * (products + 64**2 + 2 * products + 4 * 64**2)
    convolution = 3 * 2 * 4 * (8 + 8 + 12)
    # lower triangle of 16 x 16 with its diagonal: 136 pairs over 16 queries; widths 4 + 2 and 3
    scores = 3 * 2 * 2 * (4 + 2 + 3) * 136 / 16
    by_hand = 6 * weights + recurrence + convolution + scores
    assert count.flops_per_token(TINY, vocab_size=128, sequence_length=16) == by_hand


def test_flops_of_an_expert_layer_equal_the_hand_count() -> None:
    router, latent = 8 * 6, 2 * 8 * 4
    routed, shared = 2 * 3 * 4 * 10, 3 * 8 * 14
    mixture = count.flops_per_token(MIXED, vocab_size=128, sequence_length=16)
    dense = count.flops_per_token(BUILDABLE, vocab_size=128, sequence_length=16)
    # the second of two layers is one; the first stays dense
    assert mixture - dense == 6 * (router + latent + routed + shared - 3 * 8 * 12)


def test_the_kda_core_has_the_published_work_a_head() -> None:
    # 184,320 FLOP forward and 376,832 backward a token and head at K = V = 128, chunk 64; at
    # chunk 16, 119,040 forward (backward given with recomputation only, so it is not compared)
    one = KdaOptions(num_heads=1, head_dim=128, value_dim=128, conv_width=0)
    assert count.kda_core_flops(one) == 184_320 + 376_832
    forward_16 = 6 * 16 * 128 + 4 * 16 * 128 + 6 * 128 * 128 + 16**2
    assert forward_16 == 119_040
    assert count.kda_core_flops(one, chunk=16) == 3 * forward_16 + 2 * 16**2


def test_softmax_scores_of_kimi_k3_cost_what_its_fact_sheet_says() -> None:
    # forward 6.0 / 48 / 193 / 773 GFLOP a token over 24 layers at 8K, 64K, 256K, 1M
    mla = kimi_k3().model.mla
    lengths = {8192: 6.0, 65536: 48, 262144: 193, 1048576: 773}
    for length, gflop in lengths.items():
        got = 24 * count.mla_core_flops(mla, sequence_length=length) / 3 / 1e9
        assert got == pytest.approx(gflop, rel=0.01)  # given to two or three digits


def test_both_branches_of_the_hybrid_count() -> None:
    gated = replace(BUILDABLE, num_layers=1, attention=AttentionPattern.gated)
    flops = {
        pattern: count.flops_per_token(
            replace(gated, attention=pattern), vocab_size=128, sequence_length=16
        )
        for pattern in (AttentionPattern.gated, AttentionPattern.kda, AttentionPattern.mla)
    }
    rest = 6 * (3 * 8 * 12 + 8 * 128)
    both = flops[AttentionPattern.kda] + flops[AttentionPattern.mla] - rest
    assert flops[AttentionPattern.gated] == both + 6 * 8
    counts = count.count_parameters(RunConfig(model=gated), 128)
    assert set(counts.by_part) == {"embedding", "gated", "feed_forward", "norms", "head"}


def test_counting_inside_a_running_job_disturbs_nothing() -> None:
    runtime.start(RunOptions(device=Device.cpu))
    try:
        state = torch.get_rng_state()
        counts = count.count_parameters(
            RunConfig(model=BUILDABLE, parallel=ParallelOptions(tensor=2)), 128
        )
        assert counts.total > 0
        assert torch.distributed.get_backend() == "gloo"
        assert cpu_support.installed_device() == torch.device("cpu")
        assert torch.empty(1, device=torch.cuda.current_device()).device.type == "cpu"
        assert torch.equal(state, torch.get_rng_state())
    finally:
        runtime.stop()
        cpu_support.uninstall()
