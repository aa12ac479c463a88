"""The layouts that are held against one rank: what they share, and what each changes."""

from __future__ import annotations

STEPS = 2
# Constant rate without warm-up and eps 1e-5: updates then compare to 1e-4; at eps 1e-8 rounding of
# gradients near eps is amplified, and correct code differs by up to 7e-4.
COMMON = [
    "data=sample",
    "data.sequence_length=32",
    "train.batch_tokens=256",
    "train.micro_batch_size=2",
    "train.steps=2",
    "evaluate.tokens=128",
    "optim.schedule=constant",
    "optim.lr=1e-3",
    "optim.warmup_tokens=0",
    "optim.eps=1e-5",
    # At 0.02 attention scores of a new model are so small that the gradients of the query norms lie
    # near eps, where rounding is amplified as well.
    "model.init_std=0.1",
    "parallel.distributed_optimizer=false",  # else a rank has whole gradients of its share only
]
# Lengths that neither 2 nor 4 ranks divide, so that rows are padded.
PADDED = ["data.sequence_length=27", "train.batch_tokens=216"]
AWKWARD = [
    *PADDED,
    "data.isolate_documents=true",
    "data.packing=best_fit",
    "evaluate.position_bucket=8",
    "train.micro_batch_size=1",
]
# Gradients of the gate that mixes both kinds of attention are small, hence the larger eps.
GATED = ["model.attention=gated", "model.first_dense_layers=null", "optim.eps=1e-4"]
# Blocks of two layers in six: sums finish inside and between stages. Queries away from zero, where
# the gradients of keys and scores vanish; at 0.1 the model itself amplifies rounding fivefold.
BLOCK = ["residual=block", "residual.block_size=2", "residual.query_std=0.03"]
# Blocks of three layers, of both kinds of attention; scalars away from zero, where nothing is read.
SHARED = ["residual=shared", "residual.block_size=3", "residual.share_std=0.2"]
# Tokens of a micro-batch are not a multiple, on one rank nor on two.
# Of linear attention: some documents are longer than a segment, some shorter.
SEGMENTS = ["train.kda_segment_tokens=5"]
HEAD_TAIL = "parallel.context_order=head_tail"
CHUNKS = ["train.expert_chunk_tokens=12"]
# As many experts as Kimi K3 has, some of which get no token of so small a batch.
MANY = [
    "model.num_layers=2",
    "model.experts.num_experts=896",
    "model.experts.top_k=16",
    "model.experts.latent_size=16",
    "model.experts.feed_forward_size=8",
]
# Both kinds of attention, experts and quantile balancing are in every case; here all else is, too.
EVERYTHING = [*BLOCK, *AWKWARD, "train.recompute=full"]
CASES: dict[str, list[str]] = {
    "one": [],
    "one_recompute_full": ["train.recompute=full"],
    "one_recompute_selective": ["train.recompute=selective"],
    "one_evaluated": [],
    "one_appended": [],
    "one_micro_batch_4": ["train.micro_batch_size=4", "train.loss_chunk_tokens=50"],
    "one_isolated": ["data.isolate_documents=true"],
    "one_gated": GATED,
    "one_allgather": ["model.experts.dispatcher=allgather"],
    "tp2_sp": ["parallel.tensor=2"],
    "tp2": ["parallel.tensor=2", "parallel.sequence=false", "train.loss_chunk_tokens=7"],
    "tp2_sp_recompute_full": ["parallel.tensor=2", "train.recompute=full"],
    "tp2_sp_recompute_selective": ["parallel.tensor=2", "train.recompute=selective"],
    "tp2_sp_isolated": ["parallel.tensor=2", "data.isolate_documents=true"],
    "tp2_sp_gated": ["parallel.tensor=2", *GATED],
    "pp2": ["parallel.pipeline=2"],
    "pp2_uneven": ["parallel.pipeline=2", "parallel.stage_layers=[5,1]"],
    "pp2_vpp2": ["parallel.pipeline=2", "parallel.virtual_pipeline=2"],
    "pp2_vpp2_recompute_full": [
        "parallel.pipeline=2",
        "parallel.virtual_pipeline=2",
        "train.recompute=full",
    ],
    "ep2": ["parallel.expert=2"],
    "ep2_sharded": ["parallel.expert=2", "parallel.distributed_optimizer=true"],
    "ep2_allgather": ["parallel.expert=2", "model.experts.dispatcher=allgather"],
    "cp2_head_tail_awkward": ["parallel.context=2", HEAD_TAIL, *AWKWARD],
    "tp2_sp_cp2_head_tail_recompute_selective": [
        *("parallel.tensor=2", "parallel.context=2", HEAD_TAIL, "train.recompute=selective")
    ],
    "cp2_segments_awkward": ["parallel.context=2", *SEGMENTS, *AWKWARD],
    "tp2_sp_cp2_ep2_segments_recompute_full": [
        *SEGMENTS,
        *CHUNKS,
        "parallel.tensor=2",
        "parallel.context=2",
        "parallel.expert=2",
        "train.recompute=full",
    ],
    "tp2_sp_ep2_chunks_recompute_full": [
        *CHUNKS,
        "parallel.tensor=2",
        "parallel.expert=2",
        "train.recompute=full",
    ],
    "tp2_sp_ep2": ["parallel.tensor=2", "parallel.expert=2"],
    "tp2_sp_etp2": ["parallel.tensor=2", "parallel.expert_tensor=2"],
    "tp2_ep2": ["parallel.tensor=2", "parallel.sequence=false", "parallel.expert=2"],
    "dp2_etp2": ["parallel.expert_tensor=2", "train.recompute=selective"],
    "cp2": ["parallel.context=2"],
    "one_padded": PADDED,
    "one_awkward": AWKWARD,
    "cp2_padded": ["parallel.context=2", *PADDED],
    "cp2_awkward": ["parallel.context=2", *AWKWARD],
    "cp2_ep2": ["parallel.context=2", "parallel.expert=2"],
    "tp2_sp_padded": ["parallel.tensor=2", *PADDED],
    "tp2_padded": ["parallel.tensor=2", "parallel.sequence=false", *PADDED],
    "cp2_recompute_full": ["parallel.context=2", "train.recompute=full"],
    "cp2_recompute_selective": ["parallel.context=2", "train.recompute=selective"],
    "cp2_gated": ["parallel.context=2", *GATED],
    "dp2": [],
    "dp2_sharded": ["parallel.distributed_optimizer=true"],
    "dp2_overlap": [
        "parallel.distributed_optimizer=true",
        "parallel.overlap_grad_reduce=true",
        "parallel.overlap_param_gather=true",
    ],
    "tp2_sp_pp2": ["parallel.tensor=2", "parallel.pipeline=2"],
    "tp2_sp_dp2": ["parallel.tensor=2"],
    "tp2_sp_dp2_ep2": ["parallel.tensor=2", "parallel.expert=2"],
    "ep2_pp2": ["parallel.pipeline=2", "parallel.expert=2"],
    "ep2_etp2_sharded": [
        "parallel.expert=2",
        "parallel.expert_tensor=2",
        "parallel.distributed_optimizer=true",
        "parallel.overlap_grad_reduce=true",
    ],
    "pp2_dp2": ["parallel.pipeline=2"],
    "pp4_vpp2": ["parallel.pipeline=4", "parallel.virtual_pipeline=2"],
    "tp4_sp": ["parallel.tensor=4"],
    "cp4": ["parallel.context=4"],
    "tp2_sp_cp2": ["parallel.tensor=2", "parallel.context=2"],
    "tp2_sp_cp2_awkward": ["parallel.tensor=2", "parallel.context=2", *AWKWARD],
    "pp2_cp2": ["parallel.pipeline=2", "parallel.context=2"],
    "cp2_dp2": ["parallel.context=2"],
    "one_block": BLOCK,
    "one_block_recompute_full": [*BLOCK, "train.recompute=full"],
    "one_block_recompute_selective": [*BLOCK, "train.recompute=selective"],
    "one_block_micro_batch_4": [*BLOCK, "train.micro_batch_size=4"],
    "one_block_padded": [*BLOCK, *PADDED],
    "tp2_block": [*BLOCK, "parallel.tensor=2", "parallel.sequence=false"],
    "tp2_sp_block_padded": [*BLOCK, *PADDED, "parallel.tensor=2"],
    "cp2_block": [*BLOCK, "parallel.context=2"],
    "cp2_block_padded": [*BLOCK, *PADDED, "parallel.context=2"],
    "tp2_sp_block": [*BLOCK, "parallel.tensor=2"],
    "tp2_sp_block_recompute_full": [*BLOCK, "parallel.tensor=2", "train.recompute=full"],
    "pp2_block": [*BLOCK, "parallel.pipeline=2"],
    "pp2_block_uneven": [*BLOCK, "parallel.pipeline=2", "parallel.stage_layers=[5,1]"],
    "pp2_block_empty": [*BLOCK, "parallel.pipeline=2", "parallel.stage_layers=[6,0]"],
    "pp2_vpp2_block": [*BLOCK, "parallel.pipeline=2", "parallel.virtual_pipeline=2"],
    "pp2_vpp2_block_whole": [
        *BLOCK,
        "parallel.pipeline=2",
        "parallel.virtual_pipeline=2",
        "residual.cache_sources=false",
    ],
    "pp2_vpp3_block_recompute_full": [
        *BLOCK,
        "parallel.pipeline=2",
        "parallel.virtual_pipeline=3",
        "parallel.stage_layers=[1,2,0,1,2,0]",
        "train.recompute=full",
    ],
    "dp2_block": BLOCK,
    "pp4_vpp2_block": [*BLOCK, "parallel.pipeline=4", "parallel.virtual_pipeline=2"],
    "pp4_block": [*BLOCK, "parallel.pipeline=4", "parallel.stage_layers=[0,3,0,3]"],
    "tp2_sp_pp2_block": [*BLOCK, "parallel.tensor=2", "parallel.pipeline=2"],
    "one_shared": SHARED,
    "one_shared_recompute_full": [*SHARED, "train.recompute=full"],
    "one_shared_recompute_selective": [*SHARED, "train.recompute=selective"],
    "tp2_sp_shared": [*SHARED, "parallel.tensor=2"],
    "tp2_shared": [*SHARED, "parallel.tensor=2", "parallel.sequence=false"],
    "cp2_shared": [*SHARED, "parallel.context=2"],
    "pp2_shared_recompute_full": [*SHARED, "parallel.pipeline=2", "train.recompute=full"],
    "pp2_vpp2_shared": [
        *SHARED,
        "parallel.pipeline=2",
        "parallel.virtual_pipeline=2",
        "parallel.stage_layers=[0,3,3,0]",
    ],
    "one_many": MANY,
    "ep2_many": [*MANY, "parallel.expert=2"],
    "tp2_sp_pp2_shared": [*SHARED, "parallel.tensor=2", "parallel.pipeline=2"],
    "one_everything": EVERYTHING,
    "tp2_sp_cp2_pp2_vpp2_ep2_everything": [
        *EVERYTHING,
        "parallel.tensor=2",
        "parallel.context=2",
        "parallel.pipeline=2",
        "parallel.virtual_pipeline=2",
        "parallel.expert=2",
    ],
    "tp2_sp_dp2_ep2_everything_resumed": [*EVERYTHING, "parallel.tensor=2", "parallel.expert=2"],
    "one_everything_resumed": EVERYTHING,
}


def _residual(size: int | None, *words: str) -> list[str]:
    """Blocks of so many layers; None: every sublayer is a source."""
    kind = "full" if size is None else f"block residual.block_size={size}"
    # Six micro-batches: whole rounds of two and of three stages.
    batch = ["train.batch_tokens=192", "train.micro_batch_size=1"]
    return [*f"residual={kind}".split(), "residual.query_std=0.03", *batch, *words]


def _stages(stages: int, interleaved: int = 1) -> list[str]:
    return [f"parallel.pipeline={stages}", f"parallel.virtual_pipeline={interleaved}"]


_RECOMPUTE = "train.recompute=full"
# One pass in float64 each, without an update: of every kind of attention residuals.
FLOAT64 = {
    "float64_size1": _residual(1),
    "float64_size2": _residual(2),
    "float64_size4": _residual(4),
    "float64_size12": _residual(12),
    "float64_full": _residual(None),
    "float64_full_recompute": _residual(None, _RECOMPUTE),
    "float64_size4_pp2": _residual(4, *_stages(2)),
    "float64_full_pp2": _residual(None, *_stages(2)),
    "float64_size1_pp2_vpp2": _residual(1, *_stages(2, 2)),
    "float64_size2_pp2_vpp3_recompute": _residual(2, *_stages(2, 3), _RECOMPUTE),
    "float64_size4_pp2_vpp2": _residual(4, *_stages(2, 2)),
    "float64_size4_pp2_vpp2_whole": _residual(4, *_stages(2, 2), "residual.cache_sources=false"),
    "float64_size12_pp2_vpp2": _residual(12, *_stages(2, 2)),
    "float64_full_pp2_vpp3_recompute": _residual(None, *_stages(2, 3), _RECOMPUTE),
    "float64_full_tp2_sp": _residual(None, "parallel.tensor=2"),
    "float64_full_cp2": _residual(None, "parallel.context=2"),
    "float64_size1_pp3_recompute": _residual(1, *_stages(3), _RECOMPUTE),
    "float64_size4_pp3_vpp2": _residual(4, *_stages(3, 2)),
    "float64_full_pp3": _residual(None, *_stages(3)),
    "float64_size1_pp4": _residual(1, *_stages(4)),
    "float64_size4_pp4_recompute": _residual(4, *_stages(4), _RECOMPUTE),
    "float64_size2_tp2_sp_pp2": _residual(2, *_stages(2), "parallel.tensor=2"),
    "float64_size12_ep2_pp2_recompute": _residual(12, *_stages(2), "parallel.expert=2", _RECOMPUTE),
    "float64_full_ep2_pp2": _residual(None, *_stages(2), "parallel.expert=2"),
}
# One-rank cases beside `one` that are other models, with checkpoints of their own.
MODELS = ("one_block", "one_shared", "one_everything", "one_many")
# The case that saves what cases named `..._resumed` go on from; all others resume from one rank.
SPLIT = "tp2_sp_cp2_pp2_vpp2_ep2_everything"
# These route by themselves: their arithmetic is that of one rank, bit for bit.
FREE = (
    "one_recompute_full",
    "one_recompute_selective",
    "one_evaluated",
    "one_block_recompute_full",
    "one_block_recompute_selective",
    "one_shared_recompute_full",
    "one_shared_recompute_selective",
)


SPECIAL = (
    "everything",
    "block_padded",
    "isolated",
    "gated",
    "padded",
    "awkward",
    "block",
    "shared",
    "many",
)


def truth_of(case: str) -> str:
    """The case on one rank with which a case is compared, seeded fault (`case:fault`) or not."""
    case = case.partition(":")[0]
    for special in SPECIAL:
        if special in case:
            return f"one_{special}"
    return "one"


def model_of(name: str) -> str:
    """The case whose checkpoint a case resumes from: of the same model."""
    if name.endswith("_resumed"):
        return SPLIT
    return next((model for model in MODELS if model.removeprefix("one_") in name), "one")
