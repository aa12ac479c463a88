"""Kimi Delta Attention: linear attention whose state decays by channel, as a megatron-core module.

Shapes: s sequence, b batch, h hidden, H heads of this rank, K width of a head, W convolution taps.

    q, k, v = SiLU(conv_W(W_qkv x))        z = W_fb W_fa x        beta = sigmoid(W_b x)
    o = delta rule over (q, k, v, decay(z), beta)                 (ops.kda: normalisation, gates)
    y = W_o [ RMSNorm_K(o) * sigmoid(W_g x) ]

Source: Kimi K3 report, equations 5 and 6; Kimi Linear, arXiv:2510.26692.
All weights are head-major, so tensor parallelism is a plain split.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, float32, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from megatron_ext.config.schema import Gate, GateInit, KdaOptions, KernelOptions, OutputGate
from megatron_ext.errors import ConfigError
from megatron_ext.layers.initializers import (
    Constant,
    LogOfUniform,
    LogUniformSoftplusInverse,
    Uniform,
    parameter,
)
from megatron_ext.layers.kda_segments import heads_by_segments
from megatron_ext.layers.linears import (
    ColumnShard,
    DuplicatedLinear,
    ShardedModule,
    context_group,
    enter_tensor_parallel,
    local_share,
    project_together,
    recompute_core,
    row_parallel,
    tensor_group,
)
from megatron_ext.layers.norms import GatedHeadNorm
from megatron_ext.layers.shared_heads import HeadShare
from megatron_ext.ops.kda import context_kda, kda
from megatron_ext.ops.kda.health import AttentionHealth, Sum
from megatron_ext.ops.qkv_conv import qkv_conv
from megatron_ext.parallel.context import span_of, with_previous


class KimiDeltaAttention(ShardedModule):
    """Takes the place of a self-attention in any megatron-core layer spec.

    A_log [H], dt_bias [H*K] and the convolution [3, H*K, W] are float32 in every model and are not
    decayed by the optimizer.

    Args:
        options: sizes, gate and backend.
        kernels: backend of the convolution, the output norm and gate; None takes the defaults.
        share: makes the `HeadShare` before the output projection; None: there is none.
        segment_tokens: where a rank has more tokens it takes so many at a time, and the backward
            pass computes each segment again: see `kda_segments`. None: all at once.
        recompute: the backward pass of the delta rule computes again what it could keep.
        pg_collection: process groups; None takes megatron-core's.
        layer_number, name, cp_comm_type: given by megatron-core, not needed.

    Attributes:
        health: gets the statistics of the forward passes of training while it is set.

    Raises:
        ConfigError: heads do not divide over the ranks, or value and key heads differ in width.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        options: KdaOptions,
        kernels: KernelOptions | None = None,
        share: Callable[..., HeadShare] | None = None,
        segment_tokens: int | None = None,
        recompute: bool = True,
        layer_number: int = 1,
        pg_collection: ProcessGroupCollection | None = None,
        name: str | None = None,
        cp_comm_type: str | None = None,
    ) -> None:
        tp_group = tensor_group(pg_collection)
        super().__init__(config, tp_group=tp_group)
        if options.value_dim != options.head_dim:
            raise ConfigError(
                f"model.kda.value_dim: {options.value_dim} given, queries, keys and values are "
                f"projected together and share one width; use {options.head_dim}, "
                "as model.kda.head_dim"
            )
        self.cp_group = context_group(config, pg_collection)
        self.options, self.kernels = options, kernels
        self.segment_tokens, self.recompute = segment_tokens, recompute
        self.health: AttentionHealth | None = None
        heads = local_share(options.num_heads, tp_group, key="model.kda.num_heads")
        self.local_heads = heads
        width = options.num_heads * options.head_dim
        hidden = config.hidden_size

        def column(in_features: int, out_features: int, *, parts: int = 1) -> ColumnShard:
            return ColumnShard(
                config,
                in_features=in_features,
                out_features=out_features,
                parts=parts,
                tp_group=tp_group,
                key="model.kda.num_heads",
            )

        def duplicated(out_features: int) -> DuplicatedLinear:
            return DuplicatedLinear(
                config, in_features=hidden, out_features=out_features, tp_group=tp_group
            )

        self.qkv = column(hidden, width, parts=3)
        self.conv_weight = parameter(
            3,
            heads * options.head_dim,
            options.conv_width,
            dtype=float32,
            initializer=Uniform(-(options.conv_width**-0.5), options.conv_width**-0.5),
            weight_decay=False,
            tensor_parallel_axis=1,
        )
        self.decay_down = duplicated(options.decay_rank)
        self.decay_up = column(options.decay_rank, width)
        self.beta = column(hidden, options.num_heads)
        self.A_log, self.dt_bias = self._gate_parameters(options, heads)
        self.gate_down: DuplicatedLinear | None = None
        if options.output_gate is OutputGate.low_rank:
            self.gate_down = duplicated(options.output_gate_rank)
        self.gate_up = column(hidden if self.gate_down is None else options.output_gate_rank, width)
        self.norm = GatedHeadNorm(
            config,
            options.head_dim,
            eps=config.layernorm_epsilon,
            tp_group=tp_group,
            kernels=kernels,
        )
        self.share = share(config, tp_group=tp_group) if share is not None else None
        self.out = row_parallel(config, in_features=width, out_features=hidden, tp_group=tp_group)

    @staticmethod
    def _gate_parameters(
        options: KdaOptions, heads: int
    ) -> tuple[nn.Parameter | None, nn.Parameter]:
        """A_log [H], absent in the plain bounded gate, and dt_bias [H*K]."""
        slow = options.gate_init is GateInit.slow
        log_rate = None
        if options.gate is not Gate.bounded_plain:
            log_rate = parameter(
                heads,
                dtype=float32,
                initializer=Constant(0.0) if slow else LogOfUniform(1.0, 16.0),
                weight_decay=False,
                tensor_parallel_axis=0,
            )
        dt_bias = parameter(
            heads * options.head_dim,
            dtype=float32,
            initializer=LogUniformSoftplusInverse(1e-3, 0.1) if slow else Constant(0.0),
            weight_decay=False,
            tensor_parallel_axis=0,
        )
        return log_rate, dt_bias

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        **unused: object,
    ) -> tuple[Tensor, None]:
        """[s/tp, b, h] to ([s/tp, b, h], None): megatron-core's (output, bias) pair.

        Args:
            attention_mask: ignored, the operator is causal by itself.
            packed_seq_params: document bounds (`cu_seqlens_q`, with b = 1); the state and the
                convolution start anew at each. Under context parallelism those of the whole row.
            unused: megatron-core's keywords for rotary positions and inference.
        """
        x, size = self._enter(hidden_states), self.segment_tokens
        segmented = size is not None and x.shape[0] > size
        downs = [module for module in (self.decay_down, self.gate_down) if module is not None]
        made = project_together(
            *((hidden_states, module) for module in downs),
            *(() if segmented else ((x, module) for module in self.readers())),
        )
        low = [self._enter(y) for y in made[: len(downs)]]
        # Gradients are off in the first of the two passes of a layer that is recomputed.
        health = self.health if self.training and torch.is_grad_enabled() else None
        if size is not None and segmented:
            inputs = (x, *low)
            heads = heads_by_segments(self, inputs, packed_seq_params, size=size, health=health)
        else:
            heads = self._heads(low, made[len(downs) :], packed_seq_params, health=health)
        return self.out(heads if self.share is None else self.share(heads))

    def _enter(self, x: Tensor) -> Tensor:
        return enter_tensor_parallel(x, config=self.config, tp_group=self.tp_group)

    def readers(self) -> list[ColumnShard]:
        """The maps of the entered hidden states: to qkv, to beta and, of full rank, to the gate."""
        return [self.qkv, self.beta, *([self.gate_up] if self.gate_down is None else [])]

    def _heads(
        self,
        low: Sequence[Tensor],
        made: Sequence[Tensor],
        packed_seq_params: PackedSeqParams | None,
        *,
        health: AttentionHealth | None,
    ) -> Tensor:
        """All tokens at once: what is of low rank and what `readers` gave, all [s, b, *], to gated
        heads [s, b, H*K]."""
        qkv, beta, *full = made
        # Kernels want it with the batch in front: what is of low rank is copied, here and backward.
        z = self.decay_up(low[0].transpose(0, 1)).transpose(0, 1)
        core_inputs = (qkv, z, beta, packed_seq_params)
        core = partial(self._core, keep_state=health is not None)
        if self.training and recompute_core(self.config):
            # Nothing in the core is random, so no generator state has to be kept.
            o, state = checkpoint(core, *core_inputs, use_reentrant=False, preserve_rng_state=False)
        else:
            o, state = core(*core_inputs)
        gate = full[0] if full else self.gate_up(low[1])
        if health is not None:
            self.measure(health, core_inputs[1], core_inputs[2], gate, state)
        return self.norm(o, gate)

    def measure(
        self,
        health: AttentionHealth,
        z: Tensor,
        beta_logits: Tensor,
        output_gate: Tensor,
        state: Tensor | None,
        *,
        first: int = 0,
    ) -> None:
        """Add the statistics of some tokens, of which each row has `first` before these."""
        options, heads = self.options, self.local_heads
        health.add_decay(
            z.detach().transpose(0, 1).unflatten(-1, (heads, options.head_dim)),
            self.A_log,
            self.dt_bias.view(heads, options.head_dim),
            gate=options.gate,
            lower_bound=options.lower_bound,
            first=first,
        )
        health.add_gate(Sum.WRITES, Sum.BETA, beta_logits.transpose(0, 1), first=first)
        health.add_gate(
            Sum.OUTPUTS,
            Sum.OUTPUT_GATE,
            output_gate.transpose(0, 1).unflatten(-1, (heads, options.head_dim)),
            first=first,
        )
        if state is not None:
            health.add_state(state)

    def _core(
        self,
        qkv: Tensor,
        z: Tensor,
        beta_logits: Tensor,
        packed: PackedSeqParams | None,
        *,
        keep_state: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Convolution and delta rule: [s, b, 3*H*K], [s, b, H*K], [s, b, H] to [b, s, H, K], and
        if it is wanted the state after the last token of each row or document that ends here."""
        options, heads, group = self.options, self.local_heads, self.cp_group
        cu_seqlens = conv_bounds = None if packed is None else packed.cu_seqlens_q
        halo = 0
        if group is not None:
            span = span_of(packed, tokens=qkv.shape[0], group=group)
            halo = options.conv_width - 1
            qkv = with_previous(qkv, halo, before=span.before, group=group)
            cu_seqlens = span.cu_seqlens
            # The tokens in front belong to the first document.
            conv_bounds = None if cu_seqlens is None else F.pad(cu_seqlens[1:] + halo, (1, 0))
        q, k, v = qkv_conv(
            qkv,
            self.conv_weight,
            heads=heads,
            halo=halo,
            cu_seqlens=conv_bounds,
            backend=options.backend,
            kernels=self.kernels,
        )
        inputs = (
            q,
            k,
            v,
            z.transpose(0, 1).unflatten(-1, (heads, options.head_dim)),
            beta_logits.transpose(0, 1),
            self.A_log,
            self.dt_bias.view(heads, options.head_dim),
        )
        if group is not None:
            o, state = context_kda(
                *inputs,
                gate=options.gate,
                lower_bound=options.lower_bound,
                group=group,
                continued=span.continued,
                cu_seqlens=cu_seqlens,
                backend=options.backend,
                require=options.require,
                recompute=self.recompute,
            )
            return o, _of_ended(state, packed, group=group, tokens=len(z)) if keep_state else None
        return kda(
            *inputs,
            gate=options.gate,
            lower_bound=options.lower_bound,
            cu_seqlens=cu_seqlens,
            output_final_state=keep_state,
            backend=options.backend,
            require=options.require,
            recompute=self.recompute,
        )


def _of_ended(
    state: Tensor, packed: PackedSeqParams | None, *, group: ProcessGroup, tokens: int
) -> Tensor | None:
    """Of the states after this rank's part [N, H, K, V], those of rows or documents that end here:
    a last one that goes on is zero or left out."""
    if packed is None:
        return state if group.rank() == group.size() - 1 else None
    ends = (packed.cu_seqlens_q == (group.rank() + 1) * tokens).any()
    return torch.cat([state[:-1], state[-1:] * ends])
