"""The configuration, as plain dataclasses: types, defaults, units and meanings. No torch here.

One dataclass a Hydra group; groups with a file of their own are imported here. Cross-field rules
live in `validate`, sizes of presets in `configs/`. Every field is made with `option`, whose help
text the reference page and `--help` are made from.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from megatron_ext.config.architecture import (
    AttentionBackend,
    AttentionPattern,
    AttentionResidualBackend,
    BalanceOptions,
    BalanceRule,
    BinPlacement,
    Dispatcher,
    ExpertBackend,
    ExpertFp8,
    ExpertOptions,
    Gate,
    GateInit,
    KdaBackend,
    KdaCheck,
    KdaOptions,
    KernelBackend,
    KernelOptions,
    MlaOptions,
    ModelOptions,
    OutputGate,
    ResidualKind,
    ResidualOptions,
    RouterMatmul,
)
from megatron_ext.config.curriculum import CurriculumOptions
from megatron_ext.config.operations import (
    GenerateOptions,
    LaunchOptions,
    ProfileOptions,
    ResilienceOptions,
    ScoreOptions,
)
from megatron_ext.config.option import option

__all__ = [
    "AttentionBackend",
    "AttentionPattern",
    "AttentionResidualBackend",
    "BalanceOptions",
    "BalanceRule",
    "BinPlacement",
    "CheckpointOptions",
    "ContextOrder",
    "DataOptions",
    "Device",
    "Dispatcher",
    "EvaluateOptions",
    "ExpertBackend",
    "ExpertFp8",
    "ExpertOptions",
    "Gate",
    "GateInit",
    "GenerateOptions",
    "KdaBackend",
    "KdaCheck",
    "KdaOptions",
    "KernelBackend",
    "KernelOptions",
    "LoggingOptions",
    "MlaOptions",
    "Mode",
    "ModelOptions",
    "OptimOptions",
    "OutputGate",
    "Packing",
    "ParallelOptions",
    "PlanOptions",
    "Precision",
    "ProfileOptions",
    "Recompute",
    "ResidualKind",
    "ResidualOptions",
    "RouterMatmul",
    "RunConfig",
    "RunOptions",
    "Schedule",
    "ScoreOptions",
    "SourceOptions",
    "TrainOptions",
    "Wandb",
]


class Mode(Enum):
    train = "train"
    plan = "plan"
    evaluate = "evaluate"
    generate = "generate"
    score = "score"


class Device(Enum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Precision(Enum):
    fp32 = "fp32"
    bf16 = "bf16"


class Recompute(Enum):
    none = "none"
    selective = "selective"  # the attention cores and the feed-forward
    full = "full"  # whole layers


class ContextOrder(Enum):
    contiguous = "contiguous"  # those that it holds
    head_tail = "head_tail"  # one share near the begin of a sequence and one near its end


class Packing(Enum):
    concat = "concat"  # one after the other, cut where a sequence is full
    best_fit = "best_fit"  # cut only what must be
    spiral = "spiral"  # long and short documents in turns


class Schedule(Enum):
    constant = "constant"
    cosine = "cosine"
    wsd = "wsd"


class Wandb(Enum):
    auto = "auto"  # online with a key, offline without
    online = "online"
    offline = "offline"
    disabled = "disabled"


@dataclass
class RunOptions:
    name: str = option("", "Names the run, its folder and its wandb run; default: model.name")
    dir: str | None = option(None, "Run folder; default: runs/<run.name>")
    fresh: bool = option(False, "Move an existing run folder aside and start anew")
    seed: int = option(1234, "Seed of initial weights, data order and dropout")
    deterministic: bool = option(False, "Refuse every nondeterministic operator, by name")
    device: Device = option(Device.auto, "auto takes CUDA when there is a GPU")
    precision: Precision = option(Precision.fp32, "fp32, or bf16 with fp32 main weights")
    mode: Mode = option(Mode.train, "What to do")
    timeout_seconds: float = option(1800.0, "Longest wait for another rank", unit="seconds")


@dataclass
class ParallelOptions:
    tensor: int = option(1, "Tensor parallel size", unit="ranks")
    pipeline: int = option(1, "Pipeline stages", unit="ranks")
    virtual_pipeline: int = option(1, "Model chunks a rank in the interleaved schedule")
    context: int = option(1, "Context parallel size", unit="ranks")
    context_order: ContextOrder = option(
        ContextOrder.contiguous, "Which queries of full attention a context parallel rank computes"
    )
    expert: int = option(1, "Expert parallel size", unit="ranks")
    expert_tensor: int = option(1, "Tensor parallel size inside an expert", unit="ranks")
    sequence: bool | None = option(None, "Sequence parallelism; default: on when tensor > 1")
    distributed_optimizer: bool = option(True, "Shard optimizer state over data parallel ranks")
    overlap_grad_reduce: bool = option(False, "Reduce gradients while the backward pass runs")
    overlap_param_gather: bool = option(False, "Gather weights while the forward pass runs")
    stage_layers: list[int] | None = option(
        None, "Layers of each of the pipeline * virtual_pipeline chunks; default: even"
    )


@dataclass
class SourceOptions:
    name: str = option("???", "Name in metrics")
    path: str = option("???", "Folder written by data/prepare.py")
    weight: float = option(1.0, "Share of tokens, relative to the other sources")


@dataclass
class DataOptions:
    sequence_length: int = option(256, "Tokens a sequence", unit="tokens")
    sources: list[SourceOptions] = field(
        default_factory=list, metadata={"help": "Corpora to blend", "unit": ""}
    )
    demo: bool = option(
        False, "Without sources: the running Python's own library, prepared on first use"
    )
    tokenizer: str = option("byte", "byte, or the path of a tokenizer.json or tiktoken file")
    held_out: float = option(0.05, "Share of documents kept for evaluation")
    verify: bool = option(False, "Check the tokens of sources above 64 MiB at open too")
    allow_change: bool = option(
        False, "Resume although the data is not what the checkpoint was trained on"
    )
    cache_dir: str | None = option(None, "Where prepared demo data goes; default: the user's cache")
    isolate_documents: bool = option(False, "Reset state and block attention between documents")
    packing: Packing = option(Packing.concat, "How documents are laid out in sequences")
    spiral_segment: int = option(
        0, "packing=spiral: tokens of each document in turn; 0: whole ones", unit="tokens"
    )


@dataclass
class TrainOptions:
    steps: int = option(100, "Optimizer steps of the whole run", unit="steps")
    batch_tokens: int = option(8192, "Tokens of a global batch", unit="tokens")
    micro_batch_size: int = option(1, "Sequences of a micro-batch", unit="sequences")
    recompute: Recompute = option(Recompute.none, "What the backward pass computes again")
    cuda_graph: bool = option(
        False,
        "One CUDA graph a micro-batch: the GPU no longer waits for the host (one GPU a model)",
    )
    loss_chunk_tokens: int | None = option(
        None, "Tokens whose logits exist at once; default: 256 MiB of them", unit="tokens"
    )
    expert_chunk_tokens: int | None = option(
        None,
        "Tokens of a rank that are at the experts at once; the backward pass sends each chunk "
        "again; default: all at once, nothing again",
        unit="tokens",
    )
    kda_segment_tokens: int | None = option(
        None,
        "Tokens of a rank that a layer of linear attention takes at a time; the backward pass "
        "computes each segment again; best a multiple of 64; default: all at once, nothing again",
        unit="tokens",
    )
    kda_recompute: bool = option(
        True,
        "The backward pass of linear attention computes its decay, states and factors again; "
        "false: they are kept, some 2 KiB a token and head of 128 (backends triton and fla)",
    )
    trainable: list[str] = option(
        ["all"],
        "What is trained: of all, embedding, position, experts, head, or patterns of parameter "
        "names such as '*.norm.weight'; the rest is frozen",
    )
    frozen_layers: int = option(
        0, "Lowest layers that are frozen, with the embedding below them", unit="layers"
    )


@dataclass
class OptimOptions:
    lr: float = option(1e-3, "Peak learning rate")
    min_lr_ratio: float = option(0.1, "Final learning rate over the peak")
    schedule: Schedule = option(Schedule.cosine, "Learning rate over tokens")
    warmup_tokens: int = option(0, "Linear warm-up", unit="tokens")
    decay_tokens: int = option(0, "Final decay of wsd", unit="tokens")
    schedule_tokens: int | None = option(None, "Length; default: all of the run", unit="tokens")
    beta1: float = option(0.9, "Adam's first moment")
    beta2: float = option(0.95, "Adam's second moment")
    eps: float = option(1e-8, "Adam's epsilon")
    weight_decay: float = option(0.1, "Decoupled weight decay of matrices")
    clip_grad: float = option(1.0, "Largest global gradient norm; 0: no clipping")


@dataclass
class EvaluateOptions:
    interval_tokens: int = option(
        0, "Evaluate every so many tokens; 0: at the end only", unit="tokens"
    )
    tokens: int = option(65536, "Held-out tokens an evaluation", unit="tokens")
    position_bucket: int = option(
        1024, "Loss by position: where the second bucket begins, doubling; 0: none", unit="tokens"
    )
    lengths: list[int] = option(
        [], "At the end: finding a key, and use of context, at these lengths", unit="tokens"
    )
    length_factors: list[int] = option(
        [], "At the end: the same at these multiples of data.sequence_length, such as [1,4]"
    )
    probes: int = option(8, "Texts for each length and each depth of a key in them")


@dataclass
class CheckpointOptions:
    interval: int = option(100, "Save every so many steps; 0: at the end only", unit="steps")
    keep: int = option(3, "Newest checkpoints to keep; 0: all")
    keep_every: int = option(0, "Keep every checkpoint of these steps for ever", unit="steps")
    asynchronous: bool = option(True, "Write in the background")
    load: str | None = option(None, "Start from this checkpoint of another run")


@dataclass
class LoggingOptions:
    interval: int = option(1, "Console row every so many steps", unit="steps")
    expert_interval: int = option(
        10, "Every expert's load to layers.jsonl every so many steps; 0: never", unit="steps"
    )
    health_interval: int = option(
        50,
        "Decay and gates of attention, and weights over depth, measured every so many steps; "
        "0: never",
        unit="steps",
    )
    rank_interval: int = option(
        100,
        "Times of every rank compared, slow ones named, every so many steps; 0: never",
        unit="steps",
    )
    wandb: Wandb = option(Wandb.disabled, "Weights & Biases")
    wandb_project: str = option("megatron-ext", "Project on wandb")
    wandb_entity: str | None = option(None, "Team or user on wandb")
    wandb_group: str | None = option(None, "Group on wandb")
    tensorboard: bool = option(False, "Write TensorBoard events too")


@dataclass
class PlanOptions:
    world_size: int | None = option(None, "Ranks; default: the fewest that the layout needs")
    imbalance: float = option(1.1, "Rows of the busiest rank's experts, over the mean")
    search: bool = option(False, "Propose layouts for plan.cluster instead of planning this one")
    cluster: str | None = option(None, "JSON file of the machines to search layouts for")
    calibration: str | None = option(None, "JSON file of speeds; default: those of the H200")
    gpu_hour_price: float | None = option(
        None, "Price of a GPU for an hour, in any currency; given, the plan tells the cost"
    )


@dataclass
class RunConfig:
    """The whole configuration of a run; what `config.yaml` in the run folder holds."""

    run: RunOptions = option(RunOptions, "The run itself")
    model: ModelOptions = option(ModelOptions, "Architecture")
    balance: BalanceOptions = option(BalanceOptions, "Load of experts")
    residual: ResidualOptions = option(ResidualOptions, "What a sublayer reads of those before")
    parallel: ParallelOptions = option(ParallelOptions, "Layout over ranks")
    data: DataOptions = option(DataOptions, "What is read")
    train: TrainOptions = option(TrainOptions, "Length and batch")
    optim: OptimOptions = option(OptimOptions, "Optimizer and learning rate")
    curriculum: CurriculumOptions = option(CurriculumOptions, "Stages, one after the other")
    evaluate: EvaluateOptions = option(EvaluateOptions, "Held-out loss")
    checkpoint: CheckpointOptions = option(CheckpointOptions, "Saving and loading")
    logging: LoggingOptions = option(LoggingOptions, "Where numbers go")
    resilience: ResilienceOptions = option(ResilienceOptions, "What to do when training goes wrong")
    profile: ProfileOptions = option(ProfileOptions, "Looking closely at some steps")
    launch: LaunchOptions = option(LaunchOptions, "How launch/ starts a run")
    generate: GenerateOptions = option(GenerateOptions, "run.mode=generate")
    score: ScoreOptions = option(ScoreOptions, "run.mode=score")
    plan: PlanOptions = option(PlanOptions, "run.mode=plan")
