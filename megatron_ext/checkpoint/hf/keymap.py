"""Which tensor of the Hugging Face layout is which part of which tensor of ours: one table.

Both directions read it. A tensor of theirs is `ours[index]` flattened, followed by zeros if theirs
is longer (`A_log`). Names of theirs are those of the released index; layers count from 0 in both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from megatron_ext.config.layout import LayerKind, expert_layers, layer_kinds
from megatron_ext.config.schema import (
    ExpertOptions,
    Gate,
    KdaOptions,
    MlaOptions,
    ModelOptions,
    OutputGate,
    ResidualKind,
    ResidualOptions,
)

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor of theirs.

    Attributes:
        name: theirs.
        shape: theirs.
        key: of our tensor; None: we have none, since the model never uses it.
        index: leading indices into ours.
        inner: shape of `ours[index]`.
        float32: kept in float32 in every precision.
        fill: what a tensor without a key is full of.
    """

    name: str
    shape: Shape
    key: str | None
    index: Shape = ()
    inner: Shape = ()
    float32: bool = False
    fill: float = 0.0

    @property
    def padding(self) -> int:
        """Zeros at the end of theirs."""
        return prod(self.shape) - prod(self.inner) if self.key is not None else 0


class _At:
    """Makes pieces under a prefix of theirs and one of ours."""

    def __init__(self, theirs: str, ours: str) -> None:
        self.theirs, self.ours = theirs, ours

    def inside(self, theirs: str, ours: str) -> _At:
        return _At(self.theirs + theirs, self.ours + ours)

    def __call__(
        self,
        name: str,
        key: str | None,
        shape: Shape,
        *,
        index: Shape = (),
        inner: Shape | None = None,
        float32: bool = False,
        fill: float = 0.0,
    ) -> Piece:
        name = self.theirs + name
        if key is None:
            return Piece(name, shape, None, float32=float32, fill=fill)
        return Piece(name, shape, self.ours + key, index, inner or shape, float32)


def pieces(model: ModelOptions, residual: ResidualOptions, *, vocab_size: int) -> list[Piece]:
    """Every tensor of the model, in the order of the layers."""
    width, experts, blocks = model.hidden_size, expert_layers(model), _has_mixes(residual)
    top, layers = _At("", ""), _At("model.layers.", "decoder.layers.")
    rows = (vocab_size, width)
    found = [top("model.embed_tokens.weight", "embedding.word_embeddings.weight", rows)]
    for layer, kind in enumerate(layer_kinds(model)):
        at = layers.inside(f"{layer}.", f"{layer}.")
        found.append(at("input_layernorm.weight", "input_layernorm.weight", (width,)))
        found.append(at("post_attention_layernorm.weight", "pre_mlp_layernorm.weight", (width,)))
        if blocks:
            found += _mix(at, "self_attention_res", "input_layernorm." if layer else None, width)
            found += _mix(at, "mlp_res", "pre_mlp_layernorm.", width)
        attention = at.inside("self_attn.", "self_attention.")
        if kind is LayerKind.kda:
            found += _kda(attention, model.kda, width)
        else:
            found += _mla(attention, model.mla, width)
        if layer in experts:
            found += _experts(at.inside("block_sparse_moe.", "mlp."), model.experts, width)
        else:
            found += _glu(at.inside("mlp.", "mlp."), width, model.feed_forward_size)
    if blocks:
        # Ours is named as one more layer, in every layout.
        last = f"decoder.layers.{model.num_layers}."
        found += _mix(top, "model.output_attn_res", last, width)
    found.append(top("model.norm.weight", "decoder.final_layernorm.weight", (width,)))
    found.append(top("lm_head.weight", "output_layer.weight", rows))
    return found


def our_shapes(found: list[Piece]) -> dict[str, Shape]:
    """Whole shapes of our tensors: their indices, then what an index leads to."""
    shapes: dict[str, Shape] = {}
    for piece in found:
        if piece.key is not None:
            known = shapes.get(piece.key, (0,) * len(piece.index))
            lead = (max(a, b + 1) for a, b in zip(known, piece.index, strict=False))
            shapes[piece.key] = (*lead, *piece.inner)
    return shapes


def _has_mixes(residual: ResidualOptions) -> bool:
    return residual.kind is ResidualKind.block


def _mix(at: _At, theirs: str, ours: str | None, width: int) -> list[Piece]:
    """A mix over sources. The first attention of the model has one source and so no mix."""
    norm, query = (None, None) if ours is None else (f"{ours}key_weight", f"{ours}query")
    return [
        at(f"{theirs}_norm.weight", norm, (width,), float32=True, fill=1.0),
        at(f"{theirs}_proj.weight", query, (1, width), inner=(width,), float32=True),
    ]


def _kda(at: _At, options: KdaOptions, width: int) -> list[Piece]:
    heads, head, taps = options.num_heads, options.head_dim, options.conv_width
    inner = heads * head
    rows = []
    for part, letter in enumerate("qkv"):
        rows.append(at(f"{letter}_proj.weight", "qkv.weight", (inner, width), index=(part,)))
        conv, ours = (inner, 1, taps), (inner, taps)
        name = f"{letter}_conv1d.weight"
        rows.append(at(name, "conv_weight", conv, index=(part,), inner=ours, float32=True))
    if options.gate is Gate.softplus:
        stored: Shape = (1, 1, heads, 1)
    else:  # K3 pads it to the width of a head
        stored = (max(heads, head),)
    rows += [
        at("f_a_proj.weight", "decay_down.weight", (options.decay_rank, width)),
        at("f_b_proj.weight", "decay_up.weight", (inner, options.decay_rank)),
        at("dt_bias", "dt_bias", (inner,), float32=True),
        at("A_log", "A_log", stored, inner=(heads,), float32=True),
        at("b_proj.weight", "beta.weight", (heads, width)),
    ]
    if options.output_gate is OutputGate.full_rank:
        rows.append(at("g_proj.weight", "gate_up.weight", (inner, width)))
    else:
        rank = options.output_gate_rank
        rows.append(at("g_a_proj.weight", "gate_down.weight", (rank, width)))
        rows.append(at("g_b_proj.weight", "gate_up.weight", (inner, rank)))
    rows.append(at("o_norm.weight", "norm.weight", (head,)))
    rows.append(at("o_proj.weight", "out.weight", (width, inner)))
    return rows


def _mla(at: _At, options: MlaOptions, width: int) -> list[Piece]:
    heads, rank, latent = options.num_heads, options.q_lora_rank, options.kv_lora_rank
    queries = heads * (options.qk_nope_head_dim + options.qk_rope_head_dim)
    values = heads * options.v_head_dim
    if rank:
        rows = [
            at("q_a_proj.weight", "q_down.weight", (rank, width)),
            at("q_a_layernorm.weight", "q_latent_norm.weight", (rank,)),
            at("q_b_proj.weight", "q_up.weight", (queries, rank)),
        ]
    else:
        rows = [at("q_proj.weight", "q_up.weight", (queries, width))]
    down = (latent + options.qk_rope_head_dim, width)
    rows += [
        at("kv_a_proj_with_mqa.weight", "kv_down.weight", down),
        at("kv_a_layernorm.weight", "kv_latent_norm.weight", (latent,)),
        at("kv_b_proj.weight", "kv_up.weight", (heads * options.qk_nope_head_dim + values, latent)),
    ]
    if options.output_gate:
        rows.append(at("g_proj.weight", "gate.weight", (values, width)))
    rows.append(at("o_proj.weight", "out.weight", (width, values)))
    return rows


def _glu(at: _At, width: int, inner: int) -> list[Piece]:
    return [
        at("gate_proj.weight", "fc1.weight", (inner, width), index=(0,)),
        at("up_proj.weight", "fc1.weight", (inner, width), index=(1,)),
        at("down_proj.weight", "fc2.weight", (width, inner)),
    ]


def _experts(at: _At, options: ExpertOptions, width: int) -> list[Piece]:
    experts, inner, latent = options.num_experts, options.feed_forward_size, options.latent_size
    rows = [
        at("gate.weight", "router.weight", (experts, width)),
        at("gate.e_score_correction_bias", "router.balancer.bias", (experts,), float32=True),
    ]
    if latent is not None:
        rows.append(at("routed_expert_down_proj.weight", "down.weight", (latent, width)))
        if options.latent_norm:
            rows.append(at("routed_expert_norm.weight", "norm.weight", (latent,)))
        rows.append(at("routed_expert_up_proj.weight", "up.weight", (width, latent)))
    shared = options.shared_feed_forward_size
    if shared:
        rows += _glu(at.inside("shared_experts.", "shared."), width, shared)
    rows += _routed(at, experts, width if latent is None else latent, inner)
    return rows


def _routed(at: _At, experts: int, width: int, inner: int) -> Iterator[Piece]:
    for expert in range(experts):
        one, into, back = f"experts.{expert}.", (inner, width), (width, inner)
        yield at(one + "w1.weight", "experts.fc1", into, index=(expert, 0))
        yield at(one + "w3.weight", "experts.fc1", into, index=(expert, 1))
        yield at(one + "w2.weight", "experts.fc2", back, index=(expert,))
