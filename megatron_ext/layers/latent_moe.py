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

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

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
from megatron_ext.layers.linears import DuplicatedLinear, ShardedModule, project_together
from megatron_ext.layers.norms import RMSNorm
from megatron_ext.layers.router import BalancedRouter
from megatron_ext.ops.expert_rows import (
    expert_rows,
    order_by_expert,
    reorder,
    sum_rows,
    take_rows,
)
from megatron_ext.ops.segments import by_segments

GROUPS = ["tp", "cp", "tp_cp", "ep", "expt_tp", "tp_ep", "expt_dp"]


class AnyNumberAlltoAll(MoEAlltoAllTokenDispatcher):
    """megatron-core's all-to-all where a token may take any number of experts.

    Without its capacity mode the original takes every token to have exactly top-k, which padding
    (none) and rules with a threshold or with dropped slots do not keep. The permutations and the
    last sum are our own: rows of many experts come into order by one index instead of by a slice
    for each rank and expert, and a token's experts are added in float32, in their order.

    Attributes:
        kernels: backend of the sums; None takes the defaults.
        known_rows: rows of the next pass, if that is known without asking the device: a rank that
            has all experts then waits for no device.
    """

    num_local_experts: int
    kernels: KernelOptions | None = None
    known_rows: int | None = None

    def preprocess(self, routing_map: Tensor) -> Tensor:
        """Also counts the rows, before the first permutation needs their number on the host."""
        counts = super().preprocess(routing_map)
        if not self._waits_for_nothing():
            self.num_out_tokens = routing_map.sum()
            self._maybe_update_cuda_sync_point("before_permutation_1")
        # On the device still; megatron-core moves its own to the host.
        self.rows_by_rank = getattr(self, "num_global_tokens_per_local_expert", None)
        return counts

    def _waits_for_nothing(self) -> bool:
        return self.known_rows is not None and self.tp_size * self.ep_size == 1

    def _maybe_dtoh_and_synchronize(
        self, point: str, tokens_per_expert: Tensor | None = None
    ) -> Any:
        if self._waits_for_nothing():
            return tokens_per_expert
        return super()._maybe_dtoh_and_synchronize(point, tokens_per_expert)

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

    def dispatch_postprocess(
        self, global_input_tokens: Tensor, global_probs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rows [M', L] and weights [M'] of this rank's experts by expert, and how many each has."""
        with self._without_slices():
            rows, counts, weights = super().dispatch_postprocess(global_input_tokens, global_probs)
        self.sorting = self._sorting(rows)
        if self.sorting is not None:
            rows, weights = (reorder(x, *self.sorting) for x in (rows, weights))
        return rows, counts, weights

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Rows by expert, [M', L], back by rank."""
        if self.sorting is not None:
            order, back = self.sorting
            hidden_states = reorder(hidden_states, back, order)
        with self._without_slices():
            return super().combine_preprocess(hidden_states)

    def _sorting(self, rows: Tensor) -> tuple[Tensor, Tensor] | None:
        """What brings rows by rank into the order of experts, and back; None: they are in it."""
        if self.rows_by_rank is None or self.tp_size * self.ep_size == 1:
            return None
        return order_by_expert(self.rows_by_rank, rows=rows.shape[0])

    @contextmanager
    def _without_slices(self) -> Iterator[None]:
        """megatron-core sorts where a rank has several experts; told that it has one, it does all
        else."""
        several, self.num_local_experts = self.num_local_experts, 1
        try:
            yield
        finally:
            self.num_local_experts = several

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
        kernels: backend of routing, activation, norm and sums over experts; None takes the
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
            config,
            options=options,
            balance=balance,
            kernels=kernels,
            pg_collection=pg_collection,
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
            self.norm = RMSNorm(config, latent, config.layernorm_epsilon, kernels=kernels)
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
        first = None
        if self.down is not None and self.shared is not None and self.tp_group.size() == 1:
            latent, first = project_together(
                (hidden_states, self.down), (hidden_states, self.shared.fc1)
            )
        else:
            latent = hidden_states if self.down is None else self.down(hidden_states)
        # Without sequence parallelism every tensor parallel rank has all tokens: each takes its
        # share of them to the experts, and hands the others what came back.
        shared_out = self.config.sequence_parallel or self.tp_group.size() == 1
        rows = latent.flatten(0, 1)
        tokens = rows.shape[0]
        exact = padding_mask is None and shared_out and self.router.exactly_top_k
        if not shared_out:
            missing = -tokens % self.tp_group.size()  # rows that no expert takes
            rows, weights, chosen = (F.pad(x, (0, 0, 0, missing)) for x in (rows, weights, chosen))
            rows, weights = (self._scatter(x) for x in (rows, weights))
            chosen = self._my_part(chosen, rows.shape[0])
        rows = self._in_chunks(rows, weights, chosen, exact=exact)
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
            out = out + self.shared(hidden_states, first=first)[0]
        return out, None

    def _in_chunks(self, rows: Tensor, weights: Tensor, chosen: Tensor, *, exact: bool) -> Tensor:
        """`_through_experts`, some tokens at a time if there are many."""
        size, through = self.chunk_tokens, partial(self._through_experts, exact=exact)
        if size is None or rows.shape[0] <= size:
            return through(rows, weights, chosen)
        return by_segments(
            lambda number, parts, carry: (through(*parts), ()),
            (rows, weights, chosen),
            tuple(self.experts.parameters()),
            size=size,
        )

    def _through_experts(
        self, rows: Tensor, weights: Tensor, chosen: Tensor, *, exact: bool
    ) -> Tensor:
        """Dispatch [t, L] rows by the map [t, E], apply the experts, and bring back the sums."""
        dispatcher = self.dispatcher
        if isinstance(dispatcher, AnyNumberAlltoAll):
            dispatcher.known_rows = rows.shape[0] * self.router.options.top_k if exact else None
        rows, weights = dispatcher.dispatch_preprocess(rows, chosen, weights)
        rows, weights = dispatcher.token_dispatch(rows, weights)
        rows, counts, weights = dispatcher.dispatch_postprocess(rows, weights)
        rows = self.experts(rows, counts, weights)
        rows = dispatcher.token_combine(dispatcher.combine_preprocess(rows))
        out = dispatcher.combine_postprocess(rows)
        # Kept, weights would keep the graph of this pass alive, and through it the whole model;
        # maps of all layers are gigabytes.
        for name in ("probs", "local_probs", "routing_map", "local_map", "rows", "sorting"):
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
