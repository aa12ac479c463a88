"""Gated multi-head latent attention without positions (NoPE), as a megatron-core module.

Shapes: s sequence, b batch, h hidden, H heads of this rank; N `qk_nope_head_dim`, R
`qk_rope_head_dim` (a key part shared by all heads, never rotated), V `v_head_dim`.

    q = W_qb RMSNorm(W_qa x)                                   H x (N+R)
    [c | k_r] = W_kva x ;  [k_n | v] = W_kvb RMSNorm(c)        H x (N+V)
    k = [k_n | k_r for every head]
    o = softmax(q k^T (N+R)^-1/2 + causal and document mask) v
    y = W_o ( o * sigmoid(W_g x) )

Source: Kimi K3 report, equation 7. The latent and the shared key enter the tensor-parallel region
as one tensor, so the gradient of the shared key is summed over all heads of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from megatron_ext.config.schema import ContextOrder, KernelOptions, MlaOptions
from megatron_ext.layers.core_attention import SdpaAttention
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
from megatron_ext.layers.norms import RMSNorm
from megatron_ext.layers.shared_heads import HeadShare
from megatron_ext.ops.gating import head_gate
from megatron_ext.ops.kda.health import AttentionHealth, Sum
from megatron_ext.ops.latent_attention import LatentWidths, context_latent_attention
from megatron_ext.parallel.context import first_documents, span_of


@dataclass
class GatedMlaSubmodules:
    """What can be exchanged: the kernel over local heads (interface: `core_attention`)."""

    core_attention: ModuleSpec | type = SdpaAttention


class GatedMLA(ShardedModule):
    """Takes the place of a self-attention in any megatron-core layer spec.

    Args:
        options: sizes and the output gate; `q_lora_rank` 0 projects queries straight from x.
        kernels: backend of the output gate and of the norms; None takes the defaults.
        submodules: the attention kernel.
        share: makes the `HeadShare` before the output projection; None: there is none.
        context_order: under context parallelism, which rank computes which queries.
        pg_collection: process groups; None takes megatron-core's.
        layer_number, name, cp_comm_type: given by megatron-core, not needed.

    Attributes:
        health: gets the statistics of the gate in forward passes of training while it is set.

    Raises:
        ConfigError: heads do not divide over the ranks.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        options: MlaOptions,
        kernels: KernelOptions | None = None,
        share: Callable[..., HeadShare] | None = None,
        context_order: ContextOrder = ContextOrder.contiguous,
        submodules: GatedMlaSubmodules | None = None,
        layer_number: int = 1,
        pg_collection: ProcessGroupCollection | None = None,
        name: str | None = None,
        cp_comm_type: str | None = None,
    ) -> None:
        tp_group = tensor_group(pg_collection)
        super().__init__(config, tp_group=tp_group)
        self.cp_group = context_group(config, pg_collection)
        self.options = options
        self.kernels = kernels
        self.context_order = context_order
        self.health: AttentionHealth | None = None
        self.local_heads = local_share(options.num_heads, tp_group, key="model.mla.num_heads")
        key_width = options.qk_nope_head_dim + options.qk_rope_head_dim
        hidden = config.hidden_size

        def column(in_features: int, head_width: int) -> ColumnShard:
            return ColumnShard(
                config,
                in_features=in_features,
                out_features=options.num_heads * head_width,
                tp_group=tp_group,
                key="model.mla.num_heads",
            )

        def duplicated(out_features: int) -> DuplicatedLinear:
            return DuplicatedLinear(
                config, in_features=hidden, out_features=out_features, tp_group=tp_group
            )

        # Not named q_layernorm or k_layernorm: megatron-core sums gradients of such names again.
        self.q_down: DuplicatedLinear | None = None
        self.q_latent_norm: RMSNorm | None = None
        if options.q_lora_rank:
            self.q_down = duplicated(options.q_lora_rank)
            self.q_latent_norm = RMSNorm(
                config, options.q_lora_rank, options.norm_eps, kernels=kernels
            )
        self.q_up = column(options.q_lora_rank or hidden, key_width)
        self.kv_down = duplicated(options.kv_lora_rank + options.qk_rope_head_dim)
        self.kv_latent_norm = RMSNorm(
            config, options.kv_lora_rank, options.norm_eps, kernels=kernels
        )
        self.kv_up = column(options.kv_lora_rank, options.qk_nope_head_dim + options.v_head_dim)
        self.gate = column(hidden, options.v_head_dim) if options.output_gate else None
        self.core_attention = build_module(
            (submodules or GatedMlaSubmodules()).core_attention,
            config,
            num_heads=self.local_heads,
            k_channels=key_width,
            v_channels=options.v_head_dim,
            softmax_scale=key_width**-0.5,
        )
        self.share = share(config, tp_group=tp_group) if share is not None else None
        self.out = row_parallel(
            config,
            in_features=options.num_heads * options.v_head_dim,
            out_features=hidden,
            tp_group=tp_group,
        )

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
            attention_mask: ignored, attention is causal within documents.
            packed_seq_params: document bounds (`cu_seqlens_q`, with b = 1). Under context
                parallelism those of the whole row.
            unused: megatron-core's keywords for rotary positions and inference.
        """
        options = self.options
        x = hidden_states
        if self.q_down is None or self.gate is not None:
            x = self._enter(hidden_states)
        *gates, q, kv = project_together(
            *([] if self.gate is None else [(x, self.gate)]),
            (x, self.q_up) if self.q_down is None else (hidden_states, self.q_down),
            (hidden_states, self.kv_down),
        )
        if self.q_latent_norm is not None:
            q = self.q_up(self._enter(self.q_latent_norm(q)))
        latent, shared_key = kv.split([options.kv_lora_rank, options.qk_rope_head_dim], dim=-1)
        entered = self._enter(torch.cat([self.kv_latent_norm(latent), shared_key], dim=-1))
        core_inputs = (q, entered, packed_seq_params)
        core: Callable[..., Tensor] = self._core
        if self.cp_group is not None:
            core = partial(self._context_core, group=self.cp_group)
        if self.training and recompute_core(self.config):
            # Nothing in the core is random, so no generator state has to be kept.
            o = checkpoint(core, *core_inputs, use_reentrant=False, preserve_rng_state=False)
        else:
            o = core(*core_inputs)
        if not gates:
            o = o.flatten(-2).transpose(0, 1).contiguous()
        else:
            gate = gates[0]
            # Gradients are off in the first of the two passes of a layer that is recomputed.
            if self.health is not None and self.training and torch.is_grad_enabled():
                logits = gate.transpose(0, 1)
                self.health.add_gate(Sum.ATTENTION_OUTPUTS, Sum.ATTENTION_GATE, logits)
            o = head_gate(o, gate, kernels=self.kernels)
        return self.out(o if self.share is None else self.share(o))

    def _enter(self, x: Tensor) -> Tensor:
        return enter_tensor_parallel(x, config=self.config, tp_group=self.tp_group)

    def _core(self, q: Tensor, entered: Tensor, packed: PackedSeqParams | None) -> Tensor:
        """[s, b, H*(N+R)] and latent with shared key [s, b, C+R] to [b, s, H, V]."""
        bounds = longest = None
        if packed is not None:
            bounds, longest = packed.cu_seqlens_q, packed.max_seqlen_q
        return self._local(q, entered, bounds, longest)

    def _context_core(
        self, q: Tensor, entered: Tensor, packed: PackedSeqParams | None, *, group: ProcessGroup
    ) -> Tensor:
        """`_core` where a document may begin on an earlier rank, of which there is one at most.

        That one meets the latents of all ranks block by block; documents that begin here are
        nobody else's, and go the usual way. In head-tail order the first one goes with the others'
        wherever it began, and a rank computes what the order gives it.
        """
        options, length = self.options, q.shape[0]
        span = span_of(packed, tokens=length, group=group)
        end, bounds = span.first_end, span.cu_seqlens
        firsts = None
        if self.context_order is ContextOrder.head_tail:
            firsts = first_documents(packed, tokens=length, group=group)
            end = firsts[group.rank()][0]
        widths = LatentWidths(
            heads=self.local_heads,
            nope=options.qk_nope_head_dim,
            shared=options.qk_rope_head_dim,
            value=options.v_head_dim,
        )
        parts = [
            context_latent_attention(
                q[:end].transpose(0, 1).unflatten(-1, (self.local_heads, -1)),
                entered,
                self.kv_up(None),
                widths=widths,
                scale=widths.key**-0.5,
                before=span.before,
                group=group,
                firsts=firsts,
            )
        ]
        if end < length:
            if bounds is not None and end:
                bounds = bounds[1:] - end
            parts.append(self._local(q[end:], entered[end:], bounds, span.longest))
        return torch.cat(parts, dim=1)

    def _local(
        self, q: Tensor, entered: Tensor, bounds: Tensor | None, longest: int | None
    ) -> Tensor:
        """Documents that lie here as a whole: as `_core`, to [b, s, H, V]."""
        options, heads = self.options, self.local_heads
        latent, shared_key = entered.split([options.kv_lora_rank, options.qk_rope_head_dim], dim=-1)
        q, kv = (x.unflatten(-1, (heads, -1)) for x in (q, self.kv_up(latent)))
        # Cut before the batch comes to the front, so that gradients are joined as `kv_up` reads.
        parts = kv.split([options.qk_nope_head_dim, options.v_head_dim], dim=-1)
        q, key, value = (x.transpose(0, 1) for x in (q, *parts))
        shared = shared_key.transpose(0, 1).unsqueeze(-2).expand(-1, -1, heads, -1)
        return self.core_attention(
            q,
            torch.cat([key, shared], dim=-1),
            value,
            cu_seqlens=bounds,
            max_seqlen=longest,
        )
