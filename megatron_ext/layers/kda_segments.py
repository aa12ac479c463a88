"""The heads of a KDA layer, a segment of a rank's tokens after the other.

From segment to segment go the state and the last inputs of the convolution, as they do from rank to
rank under context parallelism. So it is the same function; but the projections, convolved heads and
whatever the kernels keep exist for one segment at a time, forward and backward, and what stays for
the backward pass are the layer's input and a state a segment.

Shapes: s tokens of a rank, b batch, h hidden, H heads of a rank, K width of a head, W taps, N
documents of a segment (b rows without documents).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_ext.layers.linears import project_together
from megatron_ext.ops.kda import kda
from megatron_ext.ops.kda.health import AttentionHealth
from megatron_ext.ops.kda.segments import context_segments
from megatron_ext.ops.qkv_conv import qkv_conv
from megatron_ext.ops.segments import Tensors, by_segments
from megatron_ext.parallel.context import Span, after_tail, previous_tail, segment_spans

if TYPE_CHECKING:
    from megatron_ext.layers.kda import KimiDeltaAttention


def heads_by_segments(
    layer: KimiDeltaAttention,
    inputs: Tensors,
    packed: PackedSeqParams | None,
    *,
    size: int,
    health: AttentionHealth | None,
) -> Tensor:
    """What is projected, [s, b, *], to normed and gated heads [s, b, H*K].

    Args:
        layer: whose parameters are used.
        inputs: hidden states and low-rank input of the decay, entered into the tensor-parallel
            region, and that of the output gate where it is of low rank.
        packed: documents, of the whole row.
        size: tokens of a segment; under context parallelism it must be the same on all ranks.
        health: gets the statistics of the tokens, once.
    """
    x, group = inputs[0], layer.cp_group
    run = _Segments(
        layer,
        segment_spans(packed, tokens=x.shape[0], size=size, group=group),
        size=size,
        health=health,
    )
    taps, heads, width = layer.options.conv_width, layer.local_heads, layer.options.head_dim
    chained = x.shape[1]  # with documents there is one row
    wide = torch.promote_types(x.dtype, torch.float32)
    state = x.new_zeros(chained, heads, width, width, dtype=wide)
    if group is None:
        tail = x.new_zeros(taps - 1, chained, 3 * heads * width)
        return by_segments(run.step, inputs, run.weights, size=size, carry=(tail, state))
    spans = run.spans
    return context_segments(
        run.step,
        run.states,
        inputs,
        run.weights,
        tail=previous_tail(layer.qkv(x[x.shape[0] - (taps - 1) :]), group=group),
        state=state,
        size=size,
        continued=spans[0].continued,
        # One document has all of this rank's tokens.
        passing=all(span.continued and _documents(span) == 1 for span in spans),
        group=group,
    )


def _documents(span: Span) -> int:
    return 1 if span.cu_seqlens is None else len(span.cu_seqlens) - 1


class _Segments:
    """A layer's parameters and documents, and what is done to a segment."""

    def __init__(
        self,
        layer: KimiDeltaAttention,
        spans: list[Span],
        *,
        size: int,
        health: AttentionHealth | None,
    ) -> None:
        self.layer, self.spans, self.size, self.health = layer, spans, size, health
        # Entered once, so that its gradient is summed over tensor-parallel ranks once.
        self.norm_weight = layer.norm.entered()
        own = (layer.qkv, layer.decay_up, layer.beta, layer.gate_up)
        self.weights = (
            *(weight for module in own for weight in module.parameters()),
            layer.conv_weight,
            *(() if layer.A_log is None else (layer.A_log,)),
            layer.dt_bias,
            self.norm_weight,
        )

    def step(self, number: int, parts: Tensors, carry: Tensors) -> tuple[Tensor, Tensors]:
        """Heads of segment `number`; hands on the convolution's last inputs and the state."""
        layer, span = self.layer, self.spans[number]
        qkv, beta, *full = project_together(*((parts[0], module) for module in layer.readers()))
        z = layer.decay_up(parts[1])
        heads, tail = self._convolved(qkv, carry[0], span)
        o, final = self._attend(heads, z, beta, carry[1], span)
        gate = full[0] if full else layer.gate_up(parts[2])
        # Gradients are on where a segment is computed again.
        if self.health is not None and not torch.is_grad_enabled():
            ended = final if span.ended else final[: len(final) - len(carry[1])]
            layer.measure(self.health, z, beta, gate, ended, first=number * self.size)
        state = final[len(final) - len(carry[1]) :].clone()
        return layer.norm(o, gate, weight=self.norm_weight), (tail, state)

    def states(self, number: int, parts: Tensors, carry: Tensors) -> Tensors:
        """`step` without heads, of a state and, if there is one, a transition [b, H, K, K]."""
        layer, span = self.layer, self.spans[number]
        z, beta = layer.decay_up(parts[1]), layer.beta(parts[0])
        (q, k, v), tail = self._convolved(layer.qkv(parts[0]), carry[0], span)
        found = []
        for state, value in zip(carry[1:], (v, torch.zeros_like(v)), strict=False):
            _, final = self._attend((q, k, value), z, beta, state, span)
            found.append(final[len(final) - len(state) :])
        return tail, *found

    def _convolved(self, qkv: Tensor, tail: Tensor, span: Span) -> tuple[Tensors, Tensor]:
        """Queries, keys and values [b, s, H, K], and the last W - 1 rows before the convolution."""
        layer, halo = self.layer, len(tail)
        rows = after_tail(tail, qkv, before=span.before)
        bounds = span.cu_seqlens
        heads = qkv_conv(
            rows,
            layer.conv_weight,
            heads=layer.local_heads,
            halo=halo,
            # The tokens in front belong to the first document.
            cu_seqlens=None if bounds is None else F.pad(bounds[1:] + halo, (1, 0)),
            backend=layer.options.backend,
            kernels=layer.kernels,
        )
        # Not a view, which would keep all rows.
        return heads, rows[len(rows) - halo :].clone()

    def _attend(
        self, heads: Tensors, z: Tensor, beta: Tensor, state: Tensor, span: Span
    ) -> tuple[Tensor, Tensor]:
        """The delta rule, to [b, s, H, K] and the state after each document or row."""
        layer, options = self.layer, self.layer.options
        split = (layer.local_heads, options.head_dim)
        initial = state if span.continued else torch.zeros_like(state)
        if span.cu_seqlens is not None:
            others = state.new_zeros(_documents(span) - 1, *state.shape[1:])
            initial = torch.cat((initial, others))
        q, k, v = heads
        o, final = kda(
            q,
            k,
            v,
            z.transpose(0, 1).unflatten(-1, split),
            beta.transpose(0, 1),
            layer.A_log,
            layer.dt_bias.view(split),
            gate=options.gate,
            lower_bound=options.lower_bound,
            cu_seqlens=span.cu_seqlens,
            initial_state=initial,
            output_final_state=True,
            backend=options.backend,
            require=options.require,
            recompute=layer.recompute,
        )
        assert final is not None
        return o, final
