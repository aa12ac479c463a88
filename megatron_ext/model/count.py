"""Parameters, counted from the real modules without memory, and FLOPs, from a formula.

Shapes: D hidden, H heads, K key width, V value width, C tokens of a KDA chunk, S sequence length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from megatron_ext.config.layout import LayerKind, expert_layers, layer_kinds, stage_layers
from megatron_ext.config.schema import (
    KdaOptions,
    MlaOptions,
    ModelOptions,
    OutputGate,
    ParallelOptions,
    Recompute,
    RunConfig,
)
from megatron_ext.model.build import build_chunks
from megatron_ext.parallel.fake import fake_world, on_meta, one_rank_mesh
from megatron_ext.parallel.mcore_config import transformer_config
from megatron_ext.parallel.mesh import fewest_ranks

PARTS = {
    "embedding": "input embedding",
    "kda": "KDA",
    "mla": "gated MLA",
    "gated": "KDA and gated MLA under a gate",
    "feed_forward": "dense feed-forward",
    "router": "routers",
    "latent": "latent projections and norms",
    "experts": "routed experts",
    "shared": "shared experts",
    "residual": "attention residuals",
    "norms": "layer and final norms",
    "head": "output head",
}
# Modules of a mixture of experts, by the part that they belong to.
MIXTURE = {
    "router": "router",
    "down": "latent",
    "norm": "latent",
    "up": "latent",
    "experts": "experts",
    "shared": "shared",
}
KDA_CHUNK = 64  # tokens; of the chunk-wise form whose work is counted


@dataclass(frozen=True)
class Counts:
    """Numbers of parameters.

    Attributes:
        total: all that were counted.
        active: those a token meets in a matrix product or a norm: all but the input embedding, of
            which it reads one row, and top-k of the routed experts.
        by_part: keys of `PARTS`, those present only, in that order. They add up to `total`.
        layers: number of layers of each part that counts by layer.
    """

    total: int
    active: int
    by_part: dict[str, int]
    layers: dict[str, int]


def count_parameters(config: RunConfig, vocab_size: int) -> Counts:
    """Count the whole model as one rank would hold it.

    Builds the real modules on the meta device; needs no process group and disturbs none, so a
    running job of any layout may call it. Takes about a second for 93 layers.

    Args:
        config: layout and recomputation are ignored.
        vocab_size: padded size.
    """
    alone = replace(
        config,
        parallel=ParallelOptions(),
        train=replace(config.train, recompute=Recompute.none),
        run=replace(config.run, deterministic=False),
    )
    with on_meta():
        chunks = build_chunks(
            alone, transformer_config(alone), one_rank_mesh(), vocab_size=vocab_size
        )
    every_layer = [list(range(config.model.num_layers))]
    return _count(chunks, config.model, every_layer)


def count_stages(config: RunConfig, vocab_size: int) -> list[Counts]:
    """Count what one rank of each pipeline stage holds, from the layout's own modules.

    Data parallel ranks hold the same modules, so the fewest ranks of the layout stand for a job
    of any size (groups of 4096 fake ranks take a second and a half to make).

    Args:
        config: with the layout.
        vocab_size: padded size.

    Raises:
        RuntimeError: a process group is running in this process.
    """
    parallel = config.parallel
    world_size = fewest_ranks(parallel)
    counts = []
    for stage, layers in enumerate(stage_layers(parallel, config.model.num_layers)):
        # Pipeline is the slowest axis, so this is the first rank of the stage.
        rank = stage * (world_size // parallel.pipeline)
        with fake_world(parallel, rank=rank, world_size=world_size) as groups, on_meta():
            chunks = build_chunks(config, transformer_config(config), groups, vocab_size=vocab_size)
        counts.append(_count(chunks, config.model, layers))
    return counts


def _count(
    chunks: Sequence[nn.Module], model: ModelOptions, layers: Sequence[Sequence[int]]
) -> Counts:
    """Sum the chunks' parameters by part; `layers` are the 0-based layer numbers of each chunk."""
    kinds, experts = layer_kinds(model), expert_layers(model)
    sums = dict.fromkeys(PARTS, 0)
    for chunk, numbers in zip(chunks, layers, strict=True):
        for name, parameter in chunk.named_parameters():
            sums[_part(name, kinds, numbers)] += parameter.numel()
    here = [number for numbers in layers for number in numbers]
    by_layer = {kind.name: sum(kinds[n] is kind for n in here) for kind in LayerKind}
    by_layer["feed_forward"] = sum(n not in experts for n in here)
    by_layer |= dict.fromkeys(MIXTURE.values(), sum(n in experts for n in here))
    by_part = {part: number for part, number in sums.items() if number}
    total = sum(by_part.values())
    # All experts of a layer are alike, so the sum divides.
    idle = sums["experts"] // model.experts.num_experts * model.experts.top_k - sums["experts"]
    return Counts(
        total=total,
        active=total - sums["embedding"] + idle,
        by_part=by_part,
        layers={part: layers for part, layers in by_layer.items() if part in by_part and layers},
    )


def _layer(name: str, numbers: Sequence[int]) -> int:
    return numbers[int(name.split(".")[2])]


def _part(name: str, kinds: Sequence[LayerKind], numbers: Sequence[int]) -> str:
    if name.startswith("embedding."):
        return "embedding"
    if name.startswith("output_layer."):
        return "head"
    fields = name.split(".")
    if fields[:2] == ["decoder", "layers"] and fields[3] == "self_attention":
        if fields[4] == "share":
            return "residual"
        return kinds[_layer(name, numbers)].name
    if fields[:2] == ["decoder", "layers"] and fields[3] == "mlp":
        return MIXTURE.get(fields[4], "feed_forward")
    if fields[-1] in ("query", "key_weight"):
        return "residual"
    return "norms"


def flops_per_token(model: ModelOptions, *, vocab_size: int, sequence_length: int) -> float:
    """FLOPs that one training token needs, forward and backward; recomputation is not counted.

    - A matrix product costs 2 a weight forward and twice that backward: 6 x the weights.
    - Causal softmax attention: query t meets t keys, on average (S + 1) / 2, in two products of
      widths K and V; 3 x for training. Documents inside a sequence are not subtracted.
    - The chunk-wise KDA core: see `kda_core_flops`. The short convolution: 2 a tap and channel.
    - Norms, activations, gates, mixes of attention residuals, the embedding's look-up and the
      optimizer are left out.

    - An expert layer: the router, both latent projections, top-k routed experts, the shared one.

    Args:
        model: sizes.
        vocab_size: padded size.
        sequence_length: S, in tokens.
    """
    dense, mixture = 6.0 * feed_forward_weights(model), 6.0 * active_expert_weights(model)
    experts = expert_layers(model)
    flops = 6.0 * model.hidden_size * vocab_size
    for number, kind in enumerate(layer_kinds(model)):
        if kind in (LayerKind.kda, LayerKind.gated):
            flops += 6.0 * kda_weights(model.kda, hidden_size=model.hidden_size)
            flops += kda_core_flops(model.kda)
        if kind in (LayerKind.mla, LayerKind.gated):
            flops += 6.0 * mla_weights(model.mla, hidden_size=model.hidden_size)
            flops += mla_core_flops(model.mla, sequence_length=sequence_length)
        if kind is LayerKind.gated:
            flops += 6.0 * model.hidden_size  # the gate that mixes the two, one value a token
        flops += mixture if number in experts else dense
    return flops


def feed_forward_weights(model: ModelOptions) -> int:
    """Weights of the three matrices of one dense gated feed-forward."""
    return 3 * model.hidden_size * model.feed_forward_size


def active_expert_weights(model: ModelOptions) -> int:
    """Weights of the matrices that a token meets in the feed-forward of one expert layer."""
    hidden, experts = model.hidden_size, model.experts
    latent = experts.latent_size or hidden
    return (
        hidden * experts.num_experts
        + (2 * hidden * latent if experts.latent_size else 0)
        + experts.top_k * 3 * latent * experts.feed_forward_size
        + 3 * hidden * experts.shared_feed_forward_size
    )


def kda_weights(options: KdaOptions, *, hidden_size: int) -> int:
    """Weights of the matrices of one KDA layer: q, k, v, decay (low rank), beta, gate, output."""
    keys, values = options.num_heads * options.head_dim, options.num_heads * options.value_dim
    gate = (
        hidden_size * values
        if options.output_gate is OutputGate.full_rank
        else options.output_gate_rank * (hidden_size + values)
    )
    return (
        hidden_size * (2 * keys + values)
        + options.decay_rank * (hidden_size + keys)
        + hidden_size * options.num_heads
        + gate
        + values * hidden_size
    )


def kda_core_flops(options: KdaOptions, *, chunk: int = KDA_CHUNK) -> float:
    """FLOPs of the KDA recurrence for one token of one layer in its chunk-wise form, training.

    A token and head, forward: the products of a chunk's keys with keys and queries (2CK each), the
    triangular inverse (C^2) applied to keys and values (2CK + 2CV), the state read twice and
    written once (6KV), and the queries' scores times values (2CV). Backward: two products for each
    one forward and 4 C^2 for the inverse. With K = V = 128 and C = 64 that is 184,320 forward and
    376,832 backward. The convolution over q, k and v adds 2 a tap and channel, 6 in training.
    """
    heads, key, value = options.num_heads, options.head_dim, options.value_dim
    products = 6 * chunk * key + 4 * chunk * value + 6 * key * value
    recurrence = 3 * products + 5 * chunk**2
    convolution = 6 * options.conv_width * (2 * key + value)
    return float(heads * (recurrence + convolution))


def mla_weights(options: MlaOptions, *, hidden_size: int) -> int:
    """Weights of the matrices of one gated MLA layer: q and kv through their latents, gate, out."""
    heads = options.num_heads
    queries = heads * (options.qk_nope_head_dim + options.qk_rope_head_dim)
    keys_values = heads * (options.qk_nope_head_dim + options.v_head_dim)
    values = heads * options.v_head_dim
    return (
        (
            options.q_lora_rank * (hidden_size + queries)
            if options.q_lora_rank
            else hidden_size * queries
        )
        + hidden_size * (options.kv_lora_rank + options.qk_rope_head_dim)
        + options.kv_lora_rank * keys_values
        + (hidden_size * values if options.output_gate else 0)
        + values * hidden_size
    )


def mla_core_flops(options: MlaOptions, *, sequence_length: int) -> float:
    """FLOPs of causal scores and values for one token of one layer, training, exactly the lower
    triangle with its diagonal."""
    width = options.qk_nope_head_dim + options.qk_rope_head_dim + options.v_head_dim
    return 3.0 * options.num_heads * 2 * width * (sequence_length + 1) / 2
