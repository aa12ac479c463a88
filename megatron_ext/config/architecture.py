"""Options of the model: attention, experts and their load, residuals, backends. No torch.

`schema` hands these names on: other code imports all options from there.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from megatron_ext.config.option import option


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
    cudnn = "cudnn"  # by name only: fast, with a less accurate gradient of the gate
    triton = "triton"  # fla's forward pass and our backward pass


class KdaCheck(Enum):
    auto = "auto"  # what is made of kernels: fla, cudnn and triton
    always = "always"
    never = "never"


class AttentionBackend(Enum):
    auto = "auto"
    sdpa = "sdpa"
    transformer_engine = "transformer_engine"


class RouterMatmul(Enum):
    auto = "auto"  # bf16 for a bf16 model, whose products are exact in float32, else fp32
    fp32 = "fp32"
    tf32 = "tf32"
    bf16 = "bf16"


class ExpertBackend(Enum):
    auto = "auto"  # grouped_mm on a GPU, else loop
    loop = "loop"
    grouped_mm = "grouped_mm"
    transformer_engine = "transformer_engine"


class ExpertFp8(Enum):
    none = "none"
    current = "current"  # a scale a tensor, of its own largest magnitude
    blockwise = "blockwise"  # a scale a block of 128 or 128 x 128


FP8_ALIGNMENT = 16  # FP8 numbers in the 16 bytes to which rows and columns must be aligned


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
    auto = "auto"  # on a GPU triton, beyond its sizes fla; else dense
    reference = "reference"
    dense = "dense"
    fla = "fla"
    triton = "triton"  # our own kernel


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
        KdaBackend.auto,
        "auto: on a GPU with fla triton where it fits (on Hopper), else fla; without fla, and if "
        "deterministic, dense; triton and cudnn (Hopper) fit bf16, heads of 128, a bounded gate",
    )
    require: bool = option(False, "Make a fallback of the backend an error")
    check: KdaCheck = option(
        KdaCheck.auto,
        "Before the first step compare the backend with the formula in float64 on the same input, "
        "and stop where it is too far off; auto: fla, cudnn and triton",
    )


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
        RouterMatmul.auto,
        "Precision of the router's matrix product, its output is float32; auto: bf16 for a bf16 "
        "model, where it cuts nothing, else fp32",
    )
    dispatcher: Dispatcher = option(Dispatcher.alltoall, "How tokens reach the ranks of experts")
    backend: ExpertBackend = option(ExpertBackend.auto, "Matrix products of the experts")
    fp8: ExpertFp8 = option(
        ExpertFp8.none,
        "These products in FP8, by transformer_engine: a scale a tensor, or one a block of 128",
    )
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
    share_std: float = option(
        0.0, "Standard deviation of the initial scalars of kind=shared; 0: the plain model at first"
    )
    cache_sources: bool = option(
        True, "Interleaved stages keep block sums they have seen, and send new ones only"
    )
    backend: AttentionResidualBackend = option(
        AttentionResidualBackend.auto,
        "Kernel of the mix over sources; auto: triton on a GPU, beyond its sizes fla, "
        "else (and if deterministic) dense",
    )
    require: bool = option(False, "Make a fallback of the backend an error")
