"""Latent mixture of experts: tokens travel to routed experts at a fraction of the hidden width.

Shapes: s sequence, b batch, h hidden, L latent width, E experts; with sequence parallelism a rank
holds s/tp of the sequence.

    weight, map = router(x)                                      on the full hidden state
    z = W_down x                                                 before dispatch
    y = sum over taken experts of weight_e * expert_e(z)         megatron-core's dispatchers
    out = W_up RMSNorm(y) + shared(x)

Without a latent width experts work at the hidden one, and there are no projections and no norm.

Source: Kimi K3 report, section 2.3 (Stable LatentMoE), equation 11. The norm stands after the sum
over experts and before the up-projection, so the overall size of the weights does not matter.
"""

from __future__ import annotations

import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.token_dispatcher import (
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
    MoETokenDispatcher,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_ext.config.schema import (
    BalanceOptions,
    Dispatcher,
    ExpertOptions,
    KernelOptions,
)
from megatron_ext.layers.experts import StackedExperts
from megatron_ext.layers.feed_forward import SituFeedForward
from megatron_ext.layers.linears import DuplicatedLinear, ShardedModule
from megatron_ext.layers.norms import RMSNorm
from megatron_ext.layers.router import BalancedRouter
from megatron_ext.ops.expert_rows import expert_rows, sum_rows, take_rows
from megatron_ext.ops.segments import by_segments

GROUPS = ["tp", "cp", "tp_cp", "ep", "expt_tp", "tp_ep", "expt_dp"]


class AnyNumberAlltoAll(MoEAlltoAllTokenDispatcher):
    """megatron-core's all-to-all where a token may take any number of experts.

    Without its capacity mode the original takes every token to have exactly top-k, which padding
    (none) and rules with a threshold or with dropped slots do not keep. The first permutation and
    the last sum are our own: a token's experts are added in float32, in their order.

    Attributes:
        kernels: backend of the sums; None takes the defaults.
    """

    kernels: KernelOptions | None = None

    def preprocess(self, routing_map: Tensor) -> Tensor:
        """Also counts the rows, before the first permutation needs their number on the host."""
        counts = super().preprocess(routing_map)
        self.num_out_tokens = routing_map.sum()
        self._maybe_update_cuda_sync_point("before_permutation_1")
        return counts

    def dispatch_preprocess(
        self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Rows [M, L] and weights [M] in the order of experts, of tokens [t, L] and [t, E]."""
        self.routing_map = routing_map
        self.probs = probs  # in their dtype the parts of a divided expert's output are added
        self.tokens_per_expert = self._maybe_dtoh_and_synchronize(
            "before_permutation_1", self.preprocess(routing_map)
        )
        self.rows = expert_rows(routing_map, rows=int(self.num_out_tokens))
        taken = self.rows.token * probs.shape[1] + self.rows.expert
        weights = probs.flatten().gather(0, taken)
        return take_rows(hidden_states, self.rows, kernels=self.kernels), weights

    def combine_postprocess(self, permutated_local_input_tokens: Tensor) -> Tensor:
        """What came back, [M, L], as sums at the tokens [t, L]."""
        return sum_rows(permutated_local_input_tokens, self.rows, kernels=self.kernels)


class LatentMoE(ShardedModule):
    """Fits the `mlp` slot of megatron-core's TransformerLayer.

    A module of its own instead of a subclass of megatron-core's MoELayer, which asks for
    Transformer Engine as soon as there is a latent width, refuses tensor without sequence
    parallelism, and has no norm after the sum.

    Router, projections, norm and shared expert are where the tokens of the layer's input are, hence
    whole without sequence parallelism. The routed experts always work on each rank's own share of
    the tokens.

    Args:
        options: sizes, dispatcher and backend.
        balance: how the load is levelled.
        beta: bound of the gate branch of SiTU-GLU; None: none.
        linear_beta: bound of its linear branch; None: none.
        kernels: backend of the activation and of the sums over experts; None takes the
            defaults.
        chunk_tokens: tokens of a rank that are at the experts at once, forward and backward; where
            there are more, the backward pass sends each chunk to the experts again. Ranks that
            exchange tokens must have as many. None: all at once, nothing again.
        pg_collection: process groups; None takes megatron-core's.
        is_mtp_layer, name: given by megatron-core, not needed.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        options: ExpertOptions,
        balance: BalanceOptions,
        beta: float | None,
        linear_beta: float | None,
        kernels: KernelOptions | None = None,
        chunk_tokens: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        is_mtp_layer: bool = False,
        name: str | None = None,
    ) -> None:
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=GROUPS)
        super().__init__(config, tp_group=pg_collection.tp)
        self.chunk_tokens = chunk_tokens
        hidden = config.hidden_size
        latent = options.latent_size or hidden
        self.router = BalancedRouter(
            config, options=options, balance=balance, pg_collection=pg_collection
        )
        self.experts = StackedExperts(
            config,
            options=options,
            in_features=latent,
            beta=beta,
            linear_beta=linear_beta,
            kernels=kernels,
            pg_collection=pg_collection,
        )
        self.down = self._projection(hidden, latent) if options.latent_size else None
        self.up = self._projection(latent, hidden) if options.latent_size else None
        self.norm: RMSNorm | None = None
        if options.latent_size and options.latent_norm:
            self.norm = RMSNorm(config, latent, config.layernorm_epsilon)
        self.shared: SituFeedForward | None = None
        if options.shared_feed_forward_size:
            self.shared = SituFeedForward(
                config,
                feed_forward_size=options.shared_feed_forward_size,
                beta=beta,
                linear_beta=linear_beta,
                kernels=kernels,
                pg_collection=pg_collection,
                key="model.experts.shared_feed_forward_size",
            )
        self.dispatcher = self._dispatcher(options, kernels, pg_collection)

    def _projection(self, in_features: int, out_features: int) -> DuplicatedLinear:
        return DuplicatedLinear(
            self.config,
            in_features=in_features,
            out_features=out_features,
            tp_group=self.tp_group,
        )

    def _dispatcher(
        self,
        options: ExpertOptions,
        kernels: KernelOptions | None,
        pg_collection: ProcessGroupCollection,
    ) -> MoETokenDispatcher:
        kinds: dict[Dispatcher, type[MoETokenDispatcher]] = {
            Dispatcher.alltoall: AnyNumberAlltoAll,
            Dispatcher.allgather: MoEAllGatherTokenDispatcher,
        }
        local = self.experts.num_local_experts
        first = pg_collection.ep.rank() * local
        made = kinds[options.dispatcher](
            local,
            list(range(first, first + local)),
            config=self.config,
            pg_collection=pg_collection,
        )
        if isinstance(made, AnyNumberAlltoAll):
            made.kernels = kernels
        return made

    def set_layer_number(self, layer_number: int) -> None:
        """Called by megatron-core with the 1-based number of the layer."""
        self.router.set_layer_number(layer_number)

    def forward(
        self, hidden_states: Tensor, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """[s/tp, b, h] to ([s/tp, b, h], None): megatron-core's (output, bias) pair.

        Args:
            padding_mask: bool [b, s/tp] or [b, s], True for padding. It is routed to no expert and
                counted nowhere; the shared expert treats it like any token.
        """
        if padding_mask is not None:
            padding_mask = self._my_part(padding_mask.transpose(0, 1), hidden_states.shape[0])
        weights, chosen = self.router(hidden_states, padding_mask)
        latent = hidden_states if self.down is None else self.down(hidden_states)
        # Without sequence parallelism every tensor parallel rank has all tokens: each takes its
        # share of them to the experts, and hands the others what came back.
        shared_out = self.config.sequence_parallel or self.tp_group.size() == 1
        rows = latent.flatten(0, 1)
        tokens = rows.shape[0]
        if not shared_out:
            missing = -tokens % self.tp_group.size()  # rows that no expert takes
            rows, weights, chosen = (F.pad(x, (0, 0, 0, missing)) for x in (rows, weights, chosen))
            rows, weights = (self._scatter(x) for x in (rows, weights))
            chosen = self._my_part(chosen, rows.shape[0])
        rows = self._in_chunks(rows, weights, chosen)
        if not shared_out:
            rows = tensor_parallel.gather_from_sequence_parallel_region(
                rows, tensor_parallel_output_grad=False, group=self.tp_group
            )[:tokens]
        out = rows.view_as(latent)
        if self.norm is not None:
            out = self.norm(out)
        if self.up is not None:
            out = self.up(out)
        if self.shared is not None:
            out = out + self.shared(hidden_states)[0]
        return out, None

    def _in_chunks(self, rows: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """`_through_experts`, some tokens at a time if there are many."""
        size = self.chunk_tokens
        if size is None or rows.shape[0] <= size:
            return self._through_experts(rows, weights, chosen)
        return by_segments(
            lambda number, parts, carry: (self._through_experts(*parts), ()),
            (rows, weights, chosen),
            tuple(self.experts.parameters()),
            size=size,
        )

    def _through_experts(self, rows: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Dispatch [t, L] rows by the map [t, E], apply the experts, and bring back the sums."""
        dispatcher = self.dispatcher
        rows, weights = dispatcher.dispatch_preprocess(rows, chosen, weights)
        rows, weights = dispatcher.token_dispatch(rows, weights)
        rows, counts, weights = dispatcher.dispatch_postprocess(rows, weights)
        rows = self.experts(rows, counts, weights)
        rows = dispatcher.token_combine(dispatcher.combine_preprocess(rows))
        out = dispatcher.combine_postprocess(rows)
        # Kept, weights would keep the graph of this pass alive, and through it the whole model;
        # maps of all layers are gigabytes.
        for name in ("probs", "local_probs", "routing_map", "local_map", "rows"):
            vars(dispatcher).pop(name, None)
        return out

    def _scatter(self, x: Tensor) -> Tensor:
        return tensor_parallel.scatter_to_sequence_parallel_region(x, group=self.tp_group)

    def _my_part(self, x: Tensor, length: int) -> Tensor:
        """This rank's share of the first axis, which the others have too; no change if it is."""
        if x.shape[0] == length:
            return x
        first = self.tp_group.rank() * length
        return x[first : first + length]
