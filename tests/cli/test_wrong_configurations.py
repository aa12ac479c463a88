"""Wrong configurations give helpful lists: what was given, what is allowed, what works."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_ext.config.compose import compose
from megatron_ext.errors import ConfigError

# Each is one command line, with a phrase of every line of its report, in order.
WRONG: dict[str, tuple[list[str], list[str]]] = {
    "misspelt_keys": (
        ["train.stepz=10", "tensor=2", "optim.learning_rate=1"],
        [
            "train.stepz: no such key (did you mean train.steps?)",
            "tensor: no such key (did you mean parallel.tensor?)",
            "optim.learning_rate: no such key",
        ],
    ),
    "misspelt_options": (
        ["model=nanno", "experiment=k3plan", "data=null", "experiment=null"],
        [
            "model=nanno: no such option (allowed k3, k3_30b, mini, nano; did you mean model=nano",
            "experiment=k3plan: no such option (allowed ",
            "data=null: no such option (allowed blend, demo, sample)",
        ],
    ),
    "wrong_types": (
        [
            "train.steps=abc",
            "optim.lr=fast",
            "run.fresh=maybe",
            "run.precision=bf61",
            "evaluate.tokens=2.5",
        ],
        [
            "train.steps=abc: must be a whole number",
            "optim.lr=fast: must be a number",
            "run.fresh=maybe: must be true or false",
            "run.precision=bf61: must be one of fp32, bf16 (nearest bf16)",
            "evaluate.tokens=2.5: must be a whole number (nearest 2)",
        ],
    ),
    "chunks_of_no_experts": (
        ["model.first_dense_layers=null", "train.expert_chunk_tokens=64", "optim.lr=1e-3"],
        ["train.expert_chunk_tokens=64: there are no layers of experts to give chunks to"],
    ),
    "order_of_no_full_attention": (
        ["model.attention=kda", "parallel.context_order=head_tail", "train.batch_tokens=100"],
        [
            "parallel.context_order=head_tail: there are no layers of full attention to balance",
            "train.batch_tokens=100: must be a multiple of",
        ],
    ),
    "segments_of_full_attention": (
        ["model.attention=mla", "train.kda_segment_tokens=64"],
        ["train.kda_segment_tokens=64: there are no layers of linear attention to cut"],
    ),
    "bins": (
        ["balance.bins=127", "balance.overload=0.5"],
        ["balance.overload=0.5: must be 1 or more (nearest 1)"],
    ),
    "odd_bins_and_a_huge_batch": (
        ["balance.bins=127", "train.batch_tokens=4294967296"],
        [
            "balance.bins=127: must be even for balance.placement=centred, which has as many bins "
            "on either side (nearest 128)",
            "train.batch_tokens=4294967296: must be at most 2147483647 for balance.rule=quantile",
        ],
    ),
    "heads_over_tensor": (
        ["parallel.tensor=3"],
        [
            "parallel.tensor=3: must divide model.kda.num_heads=4, model.mla.num_heads=4, ",
        ],
    ),
    "batch": (
        ["train.batch_tokens=8000", "train.micro_batch_size=2"],
        [
            "train.batch_tokens=8000: must be a multiple of data.sequence_length=256 x "
            "train.micro_batch_size=2 = 512 (nearest 7680 or 8192)"
        ],
    ),
    "pipeline": (
        ["parallel.pipeline=2", "parallel.stage_layers=[1,2,3]"],
        [
            "parallel.stage_layers=[1,2,3]: must have pipeline 2 x virtual_pipeline 1 = 2 entries, "
            "got 3",
        ],
    ),
    "gate_and_ranges": (
        ["model.kda.lower_bound=-9", "model.experts.top_k=20", "parallel.virtual_pipeline=2"],
        [
            "model.kda.lower_bound=-9: must be in [-5, 0) for model.kda.gate=bounded",
            "model.experts.top_k=20: must be at most model.experts.num_experts=16",
            "parallel.virtual_pipeline=2: needs parallel.pipeline > 1, got 1",
        ],
    ),
    "deterministic": (
        ["run.deterministic=true", "model.kda.backend=fla", "model.mla.backend=transformer_engine"],
        [
            "model.kda.backend=fla: is not deterministic",
            "model.mla.backend=transformer_engine: is not deterministic",
        ],
    ),
    "cudnn": (
        [
            "model.kda.backend=cudnn",
            "model.kda.gate=softplus",
            "run.deterministic=true",
            "run.device=cpu",
        ],
        [
            "model.kda.backend=cudnn: was not shown to be deterministic",
            "model.kda.backend=cudnn: needs a GPU, and run.device=cpu was given",
            "model.kda.head_dim=32: must be 128 for model.kda.backend=cudnn",
            "model.kda.gate=softplus: must be bounded or bounded_plain for model.kda.backend=cudnn",
            "run.precision=fp32: must be bf16 for model.kda.backend=cudnn",
        ],
    ),
    "own_kda": (
        ["model.kda.backend=triton", "model.kda.gate=softplus", "run.deterministic=true"],
        [
            "model.kda.backend=triton: is not deterministic",
            "model.kda.head_dim=32: must be 128 for model.kda.backend=triton",
            "model.kda.gate=softplus: must be bounded or bounded_plain for "
            "model.kda.backend=triton",
            "run.precision=fp32: must be bf16 for model.kda.backend=triton",
        ],
    ),
    "backends_of_others": (
        ["model.experts.backend=fla"],
        [
            "model.experts.backend=fla: must be one of auto, loop, grouped_mm, transformer_engine",
        ],
    ),
    "residual_kernel": (
        ["run.deterministic=true", "run.device=cpu", "residual=block", "residual.backend=fla"],
        [
            "residual.backend=fla: is not deterministic",
            "residual.backend=fla: needs a GPU, and run.device=cpu was given",
        ],
    ),
    "residual_sizes": (
        [
            "residual.fp32=true",
            "residual.query_std=-1",
            "residual.share_std=-1",
            "residual.block_size=0",
        ],
        [
            "residual.block_size=0: must be 1 or more (nearest 1)",
            "residual.query_std=-1.0: must be 0 or more (nearest 0)",
            "residual.share_std=-1.0: must be 0 or more (nearest 0)",
        ],
    ),
    "residual_sums": (
        ["residual.fp32=true"],
        ["residual.fp32=true: is for residual.kind=block and full, whose sums are kept apart"],
    ),
    "shared_widths": (
        ["residual=shared", "residual.block_size=3", "model.mla.v_head_dim=16"],
        [
            "residual.kind=shared: the layers of a block must agree in heads x value width, got "
            "4 x 32 = 128 in KDA and 4 x 16 = 64 in gated MLA (nearest model.mla.v_head_dim=32",
        ],
    ),
    "shared_cuts": (
        [
            "residual=shared",
            "residual.block_size=4",
            "parallel.pipeline=2",
        ],
        [
            "residual.block_size=4: with residual.kind=shared stages must be cut between blocks, "
            "got cuts after 3 layers (allowed parallel.stage_layers in multiples of 4, but for the "
            "last layers; nearest parallel.stage_layers=[4,2])",
        ],
    ),
    "shared_gated": (
        ["residual=shared", "residual.block_size=3", "model.attention=gated"],
        [
            "residual.kind=shared: shares what an attention hands to its output projection, and "
            "model.attention=gated has two of them a layer (allowed interleaved, kda, mla"
        ],
    ),
    "nothing_to_read": (
        ["data.demo=false", "optim.warmup_tokens=1e9"],
        [
            "data.sources=[]: nothing to read (data=demo or data=sample",
            "optim.warmup_tokens=1000000000: must be less than train.steps x train.batch_tokens = "
            "61440",
        ],
    ),
    "experts": (
        [
            "model=k3",
            "parallel.expert=12",
            "parallel.expert_tensor=5",
            "model.experts.top_k=900",
            "model.experts.backend=grouped_mm",
        ],
        [
            "model.experts.top_k=900: must be at most model.experts.num_experts=896 (nearest 896)",
            "model.experts.backend=grouped_mm: takes bfloat16 only, and run.precision=fp32 was ",
            "parallel.expert=12: must divide model.experts.num_experts=896 (allowed 1, 2, 4, 7, ",
            "parallel.expert_tensor=5: must divide model.experts.feed_forward_size=3072 (allowed ",
        ],
    ),
    "experts_by_transformer_engine": (
        [
            "model.experts.backend=transformer_engine",
            "run.device=cpu",
            "run.deterministic=true",
        ],
        [
            "model.experts.backend=transformer_engine: is not deterministic",
            "model.experts.backend=transformer_engine: needs a GPU, and run.device=cpu was given ",
            "model.experts.backend=transformer_engine: takes bfloat16 only, and run.precision=fp32",
        ],
    ),
    "experts_in_fp8_without_what_it_needs": (
        [
            "model.experts.fp8=blockwise",
            "run.device=cpu",
            "parallel.expert_tensor=2",
            "model.experts.latent_size=40",
            "model.experts.feed_forward_size=80",
        ],
        [
            "model.experts.fp8=blockwise: is Transformer Engine's, and model.experts.backend=auto ",
            "model.experts.fp8=blockwise: takes bfloat16 only, and run.precision=fp32 was given ",
            "model.experts.fp8=blockwise: needs a GPU, and run.device=cpu was given (allowed none",
            "model.experts.fp8=blockwise: model.experts.latent_size=40 must be a multiple of 16 ",
            "model.experts.fp8=blockwise: model.experts.feed_forward_size=80 must be a multiple of "
            "16 x parallel.expert_tensor=2 (nearest 64 or 96; or none)",
        ],
    ),
    "fp8_of_the_backend_and_in_float32": (
        [
            "model.experts.fp8=current",
            "model.experts.backend=transformer_engine",
            "model.experts.latent_size=null",
            "model.hidden_size=136",
        ],
        [
            "model.experts.backend=transformer_engine: takes bfloat16 only, and run.precision=fp32",
            "model.experts.fp8=current: model.hidden_size=136 must be a multiple of 16 ",
        ],
    ),
    "fp8_of_a_dense_model": (
        ["model.first_dense_layers=null", "model.experts.fp8=current"],
        ["model.experts.fp8=current: there are no layers of experts (allowed none; or model.first"],
    ),
    "fp8_recipe": (
        ["model.experts.fp8=delayed"],
        ["model.experts.fp8=delayed: must be one of none, current, blockwise"],
    ),
    "experts_of_a_dense_model": (
        ["model.first_dense_layers=null", "parallel.expert=4", "parallel.expert_tensor=2"],
        [
            "parallel.expert=4: there are no layers of experts to spread (allowed 1; or model.",
            "parallel.expert_tensor=2: there are no layers of experts to spread (allowed 1; or ",
        ],
    ),
    "no_layer_left_for_experts": (
        ["model.first_dense_layers=6"],
        ["model.first_dense_layers=6: must be less than model.num_layers=6 (nearest 5; or null"],
    ),
    "shared_expert_over_tensor_ranks": (
        ["parallel.tensor=4", "model.experts.shared_feed_forward_size=90"],
        ["parallel.tensor=4: must divide model.experts.shared_feed_forward_size=90 (allowed 1, 2"],
    ),
    "context": (
        ["parallel.context=8", "data.sequence_length=16", "run.mode=generate"],
        [
            "parallel.context=8: is for long training sequences, and run.mode=generate grows one",
            "parallel.context=8: leaves each rank fewer than 3 of 16 tokens, which the convolution "
            "of its neighbour reads (nearest 5; or a longer data.sequence_length)",
        ],
    ),
    "score": (
        [
            *("run.mode=score", "score.float64=true", "run.precision=bf16", "train.stepz=1"),
            *("train.batch_tokens=7", "parallel.context=8", "data.sequence_length=8"),
        ],
        [
            "train.stepz: no such key (did you mean train.steps?)",
            "score.tokens=null: run.mode=score needs the path of a JSON file, the rows to score",
            "score.output=null: run.mode=score needs the path of a JSON file, what to write",
            "score.float64=true: needs run.device=cpu, got auto",
            "score.float64=true: needs run.precision=fp32, got bf16",
        ],
    ),
    "score_into_its_input": (
        ["run.mode=score", "score.tokens=a.json", "score.output=./a.json"],
        ["score.output=/"],
    ),
    "spiral": (
        ["data.packing=spiral", "data.spiral_segment=8", "data.isolate_documents=true"],
        ["data.spiral_segment=8: changes nothing under data.isolate_documents=true, where a token"],
    ),
    "segments_of_what": (
        ["data.spiral_segment=8"],
        ["data.spiral_segment=8: is for data.packing=spiral, got concat (nearest 0)"],
    ),
    "sequence_without_tensor": (
        ["parallel.sequence=true"],
        ["parallel.sequence=true: needs parallel.tensor > 1, got 1 (nearest parallel.tensor=2; "],
    ),
    "value_width": (
        ["model.kda.value_dim=64"],
        ["model.kda.value_dim=64: must be model.kda.head_dim=32, since "],
    ),
    "single_values": (
        ["data.held_out=1", "run.seed=-1", "optim.beta2=1.5", "train.micro_batch_size=0"],
        [
            "run.seed=-1: must be in [0, ",
            "data.held_out=1.0: must be in (0, 1) (nearest 0.99)",
            "train.micro_batch_size=0: must be 1 or more (nearest 1)",
            "optim.beta2=1.5: must be in [0, 1) (nearest 0.99)",
        ],
    ),
    "what_hydra_would_do": (
        [
            "~run.name",
            "model=nano,mini",
            "hydra.run.dir=x",
            "model.kda=3",
            "optim.lr=1,2",
            "a=b=,c",
        ],
        [
            "~run.name: keys cannot be removed",
            "model=nano,mini: gives several values, must be one",
            "hydra.run.dir: Hydra only composes here",
            "model.kda: holds other keys",
            "optim.lr=1,2: gives several values, must be one (for a sweep: -m",
            "a=b=,c: cannot be read, must be key=value or group=option",
        ],
    ),
    "sources": (
        ["data.sources=[{name:a},{nam:b,path:c}]", "run.name=a/b"],
        ["data.sources=", "run.name='a/b': must be usable as the name of a folder"],
    ),
    "replay": (
        ["resilience.replay_interval=5", "resilience.corruption=skip", "parallel.expert=2"],
        [
            "resilience.corruption=skip: a faulty device does not go away by it (allowed warn, ",
            "resilience.replay_interval=5: compares bit by bit, which needs run.determin",
            "resilience.replay_interval=5: with parallel.expert > 1 data parallel ranks exchange",
        ],
    ),
    "profile": (
        ["train.steps=20", "profile.steps=[0,21]", "profile.ranks=[-1]"],
        [
            "profile.steps: 0: must be in [1, 20], the steps of the run (nearest 1)",
            "profile.steps: 21: must be in [1, 20], the steps of the run (nearest 20)",
            "profile.ranks: -1: must be 0 or more (nearest 0)",
        ],
    ),
    "plan": (
        ["run.mode=plan", "parallel.tensor=2", "parallel.pipeline=2", "plan.world_size=6"],
        ["plan.world_size=6: must be a multiple of tensor 2 x pipeline 2 x context 1 = 4 (near"],
    ),
}


def problems(words: list[str], *, world_size: int | None = None) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        compose(words, world_size=world_size)
    assert caught.value.exit_code == 20
    return caught.value.problems


@pytest.mark.parametrize("name", WRONG)
def test_every_mistake_of_a_command_line_is_listed(name: str) -> None:
    words, phrases = WRONG[name]
    found = problems(words)
    assert len(found) == len(phrases), found
    for text, phrase in zip(found, phrases, strict=True):
        assert text.startswith(phrase), text


def test_mistakes_of_every_kind_are_reported_together() -> None:
    words = ["model=nanno", "train.stepz=1", "train.steps=abc", "run.name=a/b", "+foo=1"]
    text = "\n".join(problems(words))
    for part in ("model=nanno", "train.stepz", "train.steps=abc", "run.name=", "foo: "):
        assert part in text


def test_a_bad_value_raises_no_second_problem_about_its_stand_in() -> None:
    # The default batch of 4096 does not divide by this length, but the batch was given (wrongly).
    assert len(problems(["train.batch_tokens=many", "data.sequence_length=300"])) == 1


def test_the_number_of_ranks_is_checked_when_known() -> None:
    (text,) = problems(["parallel.pipeline=4"], world_size=6)
    assert text.startswith("ranks=6: must be a multiple of tensor 1 x pipeline 4 x context 1 = 4")
    (text,) = problems(["train.batch_tokens=7680", "train.micro_batch_size=1"], world_size=4)
    assert "data.sequence_length=256 x data parallel=4 = 1024 (nearest 7168 or 8192)" in text


def test_a_replay_needs_another_rank_to_compare_with() -> None:
    words = ["resilience.replay_interval=5", "run.device=cpu", "parallel.tensor=2"]
    compose(words, world_size=4)
    (text,) = problems(words, world_size=2)
    assert "one data parallel rank and nothing to compare it with" in text


def test_ranks_that_profile_exist_when_their_number_is_known() -> None:
    (text,) = problems(["profile.steps=[1]", "profile.ranks=[0,2]"], world_size=2)
    assert text == "profile.ranks: 2: must be in [0, 1] (nearest 1)"
    (text,) = problems(["profile.steps=[1]", "profile.ranks=[]"], world_size=2)
    assert text.startswith("profile.ranks=[]: no rank would profile")


def test_micro_batches_fill_the_interleaved_schedule() -> None:
    words = ["parallel.pipeline=4", "parallel.virtual_pipeline=2", "train.batch_tokens=7680"]
    (text,) = problems([*words, "train.micro_batch_size=1"])
    assert "x parallel.pipeline=4 = 1024" in text


def test_mistakes_in_yaml_files_name_the_file(tmp_path: Path) -> None:
    for group in ("model", "local"):
        (tmp_path / group).mkdir()
    (tmp_path / "config.yaml").write_text(
        "defaults: [schema, _self_, {model: odd}, {optional local: default}]\n"
    )
    (tmp_path / "model" / "odd.yaml").write_text("num_layer: 3\nkda: {gate: bound}\n")
    (tmp_path / "local" / "default.yaml").write_text("# @package _global_\nrun: {sed: 3}\n")
    with pytest.raises(ConfigError) as caught:
        compose(["train.stepz=1"], config_dir=tmp_path)
    text = str(caught.value)
    assert "model/odd.yaml: model.num_layer: no such key (did you mean model.num_layers?)" in text
    assert "model/odd.yaml: model.kda.gate=bound: must be one of bounded, bounded_plain" in text
    assert "local/default.yaml: run.sed: no such key (did you mean run.seed?)" in text
    assert "train.stepz" in text


def test_a_missing_value_is_named() -> None:
    (text,) = problems(["data.sources=[{name:a}]"])
    assert text.startswith("data.sources[0].path: is missing")
