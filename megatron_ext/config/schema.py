"""The configuration, as plain dataclasses: types, defaults, units and meanings. No torch here.

One dataclass a Hydra group. Cross-field rules live in `validate`, sizes of presets in `configs/`.
Every field is made with `option`, whose help text the reference page and `--help` are made from.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from megatron_ext.config.operations import LaunchOptions, ResilienceOptions
from megatron_ext.config.option import option


class Mode(Enum):
    train = "train"
    plan = "plan"
    evaluate = "evaluate"
    generate = "generate"


class Device(Enum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Precision(Enum):
    fp32 = "fp32"
    bf16 = "bf16"


class AttentionPattern(Enum):
    interleaved = "interleaved"  # KDA, with full attention in every n-th and the last layer (K3)
    kda = "kda"
    mla = "mla"
    gated = "gated"  # both branches in every layer, mixed by a learned gate for each token


class Gate(Enum):
    bounded = "bounded"  # lower_bound * sigmoid(exp(A_log) * (z + dt_bias))       (K3)
    bounded_plain = "bounded_plain"  # lower_bound * sigmoid(z + dt_bias), no A_log
    softplus = "softplus"  # -exp(A_log) * softplus(z + dt_bias), unbounded        (Kimi Linear)


class GateInit(Enum):
    slow = "slow"  # A_log = 0, softplus(dt_bias) log-uniform in [1e-3, 0.1]: half-lives 1.5 to 139
    wide = "wide"  # A_log = log U(1, 16), dt_bias = 0: half-saturated and forgetful


class OutputGate(Enum):
    full_rank = "full_rank"
    low_rank = "low_rank"


class KdaBackend(Enum):
    auto = "auto"
    reference = "reference"
    dense = "dense"
    fla = "fla"


class AttentionBackend(Enum):
    auto = "auto"
    sdpa = "sdpa"
    transformer_engine = "transformer_engine"


class RouterMatmul(Enum):
    fp32 = "fp32"
    tf32 = "tf32"
    bf16 = "bf16"


class ExpertBackend(Enum):
    auto = "auto"  # grouped_mm on a GPU, else loop
    loop = "loop"
    grouped_mm = "grouped_mm"


class KernelBackend(Enum):
    auto = "auto"  # triton on a GPU where it passes its check, else dense
    reference = "reference"
    dense = "dense"
    triton = "triton"


class Dispatcher(Enum):
    alltoall = "alltoall"
    allgather = "allgather"


class BalanceRule(Enum):
    quantile = "quantile"  # K3: quantile of the margins of the global batch, from histograms
    quantile_exact = "quantile_exact"  # the same from sorted margins
    microbatch_mean = "microbatch_mean"  # megatron-core's: mean of the micro-batches' quantiles
    sign = "sign"  # DeepSeek's constant step against the load
    aux_loss = "aux_loss"  # Switch's auxiliary loss
    threshold = "threshold"  # a score threshold an expert, from the micro-batch
    reject = "reject"  # overloaded experts skip the tokens they are least confident about
    none = "none"


class BinPlacement(Enum):
    uniform = "uniform"  # equally wide over the whole range (K3, with 1000 bins)
    centred = "centred"  # the finer, the nearer to the bias in use


class ResidualKind(Enum):
    block = "block"  # softmax over embedding, finished block sums and running sum     (K3)
    full = "full"  # softmax over the embedding and every sublayer's output
    shared = "shared"  # attention hidden states are shared within a block of layers
    standard = "standard"  # plain pre-norm residual


class AttentionResidualBackend(Enum):
    auto = "auto"  # fla on a GPU that has it, else dense
    reference = "reference"
    dense = "dense"
    fla = "fla"


class Recompute(Enum):
    none = "none"
    selective = "selective"  # the attention cores and the feed-forward
    full = "full"  # whole layers


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
class KdaOptions:
    num_heads: int = option(4, "Heads of linear attention")
    head_dim: int = option(32, "Width of a query and key head")
    value_dim: int = option(32, "Width of a value head")
    conv_width: int = option(4, "Taps of the short causal convolution", unit="tokens")
    gate: Gate = option(Gate.bounded, "Form of the decay gate")
    lower_bound: float = option(-5.0, "Smallest log-decay a token, in [-5, 0)", unit="nats")
    gate_init: GateInit = option(GateInit.slow, "Initial decay")
    decay_rank: int = option(32, "Rank of the decay projection")
    output_gate: OutputGate = option(OutputGate.full_rank, "K3 is full rank, Kimi Linear low rank")
    output_gate_rank: int = option(32, "Rank of a low-rank output gate")
    backend: KdaBackend = option(
        KdaBackend.auto, "auto: fla on a GPU that has it, else (and if deterministic) dense"
    )
    require: bool = option(False, "Make a fallback of the backend an error")


@dataclass
class MlaOptions:
    num_heads: int = option(4, "Heads of full attention")
    q_lora_rank: int = option(64, "Rank of the query compression; 0: none")
    kv_lora_rank: int = option(32, "Width of the compressed key-value latent")
    qk_nope_head_dim: int = option(32, "Width of the part of a key that is made from the latent")
    qk_rope_head_dim: int = option(16, "Width of the key part shared by all heads (never rotated)")
    v_head_dim: int = option(32, "Width of a value head")
    norm_eps: float = option(1e-6, "Epsilon of the two low-rank norms")
    output_gate: bool = option(True, "Sigmoid gate on the attention output")
    backend: AttentionBackend = option(AttentionBackend.auto, "Kernel of softmax attention")
    require: bool = option(False, "Make a fallback of the backend an error")


@dataclass
class ExpertOptions:
    num_experts: int = option(16, "Routed experts of a layer")
    top_k: int = option(4, "Experts a token", unit="experts")
    latent_size: int | None = option(
        64, "Width at which routed experts work; null: hidden_size, no projections"
    )
    latent_norm: bool = option(True, "RMS norm over the latent sum of experts")
    feed_forward_size: int = option(64, "Width inside a routed expert")
    shared_feed_forward_size: int = option(
        128, "Width inside the shared expert, on the full hidden state; 0: none"
    )
    scaling: float = option(1.0, "Factor on the renormalised weights")
    router_matmul: RouterMatmul = option(
        RouterMatmul.fp32, "Precision of the router's matrix product; its output is float32"
    )
    dispatcher: Dispatcher = option(Dispatcher.alltoall, "How tokens reach the ranks of experts")
    backend: ExpertBackend = option(ExpertBackend.auto, "Matrix products of the experts")
    require: bool = option(False, "Make a fallback of the backend an error")


@dataclass
class KernelOptions:
    backend: KernelBackend = option(
        KernelBackend.auto, "auto: triton on a GPU where it passes a check, else dense"
    )
    require: bool = option(False, "Make a fallback of the backend an error")


@dataclass
class ModelOptions:
    name: str = option("custom", "Name of the preset")
    num_layers: int = option(6, "Layers")
    first_dense_layers: int | None = option(
        None, "Layers before the first expert layer; default: every layer is dense"
    )
    hidden_size: int = option(128, "Width of the residual stream")
    feed_forward_size: int = option(352, "Width of the dense feed-forward")
    vocab_size: int | None = option(None, "Default: the tokenizer's size, rounded up to 128")
    attention: AttentionPattern = option(AttentionPattern.interleaved, "Which layer attends how")
    full_attention_interval: int = option(4, "Every n-th layer is full attention")
    full_attention_last: bool = option(True, "The last layer is full attention too")
    full_attention_layers: list[int] | None = option(
        None, "Numbers, from 1, of the layers with full attention, instead of every n-th"
    )
    norm_eps: float = option(1e-5, "Epsilon of the RMS norms")
    init_std: float = option(0.02, "Standard deviation of initial linear weights")
    situ_beta: float | None = option(
        4.0, "Bound of the gate branch of SiTU-GLU; null: none (with both null: SwiGLU)"
    )
    situ_linear_beta: float | None = option(
        25.0, "Bound of the linear branch of SiTU-GLU; null: none"
    )
    kda: KdaOptions = option(KdaOptions, "Linear attention")
    mla: MlaOptions = option(MlaOptions, "Full attention")
    experts: ExpertOptions = option(ExpertOptions, "Mixture of experts, where layers have one")
    kernels: KernelOptions = option(KernelOptions, "Operators without a backend key of their own")


@dataclass
class BalanceOptions:
    rule: BalanceRule = option(BalanceRule.quantile, "How the load of experts is levelled")
    bins: int = option(128, "Bins of a histogram, an expert; even if centred")
    placement: BinPlacement = option(BinPlacement.centred, "Where the bins lie")
    sign_step: float = option(1e-3, "Step of the bias of rule=sign")
    aux_coefficient: float = option(1e-2, "Weight of the loss of rule=aux_loss")
    capacity_factor: float = option(
        1.25, "Most tokens an expert takes under rule=threshold, over the mean"
    )
    overload: float = option(1.05, "Running load over the mean from which rule=reject skips tokens")
    rejection_probability: float = option(1.0, "Chance that rule=reject skips such a token")
    refill: bool = option(True, "rule=reject gives a freed slot to the next-best expert")
    running_decay: float = option(
        0.9, "Weight of the past in running quantiles and loads of rule=reject"
    )


@dataclass
class ResidualOptions:
    kind: ResidualKind = option(ResidualKind.standard, "What a sublayer reads")
    block_size: int = option(
        12,
        "Layers whose outputs are summed to one source (kind=block) or share (kind=shared)",
        unit="layers",
    )
    fp32: bool = option(False, "Keep the sums over layers in float32, also between stages")
    query_std: float = option(
        0.0, "Standard deviation of initial pseudo-queries; 0: all sources alike at first"
    )
    cache_sources: bool = option(
        True, "Interleaved stages keep block sums they have seen, and send new ones only"
    )
    backend: AttentionResidualBackend = option(
        AttentionResidualBackend.auto,
        "Kernel of the mix over sources; auto: fla on a GPU that has it, else (and if "
        "deterministic) dense",
    )
    require: bool = option(False, "Make a fallback of the backend an error")


@dataclass
class ParallelOptions:
    tensor: int = option(1, "Tensor parallel size", unit="ranks")
    pipeline: int = option(1, "Pipeline stages", unit="ranks")
    virtual_pipeline: int = option(1, "Model chunks a rank in the interleaved schedule")
    context: int = option(1, "Context parallel size", unit="ranks")
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
    loss_chunk_tokens: int | None = option(
        None, "Tokens whose logits exist at once; default: 256 MiB of them", unit="tokens"
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
        50, "Decay and gates of attention measured every so many steps; 0: never", unit="steps"
    )
    wandb: Wandb = option(Wandb.disabled, "Weights & Biases")
    wandb_project: str = option("megatron-ext", "Project on wandb")
    wandb_entity: str | None = option(None, "Team or user on wandb")
    wandb_group: str | None = option(None, "Group on wandb")
    tensorboard: bool = option(False, "Write TensorBoard events too")


@dataclass
class GenerateOptions:
    prompt: str = option("def ", "Text to go on from")
    max_new_tokens: int = option(128, "Tokens to add", unit="tokens")
    temperature: float = option(0.8, "0 takes the likeliest token")
    top_k: int = option(40, "Sample among the likeliest k; 0: all")


@dataclass
class PlanOptions:
    world_size: int | None = option(None, "Ranks; default: the fewest that the layout needs")


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
    evaluate: EvaluateOptions = option(EvaluateOptions, "Held-out loss")
    checkpoint: CheckpointOptions = option(CheckpointOptions, "Saving and loading")
    logging: LoggingOptions = option(LoggingOptions, "Where numbers go")
    resilience: ResilienceOptions = option(ResilienceOptions, "What to do when training goes wrong")
    launch: LaunchOptions = option(LaunchOptions, "How launch/ starts a run")
    generate: GenerateOptions = option(GenerateOptions, "run.mode=generate")
    plan: PlanOptions = option(PlanOptions, "run.mode=plan")
