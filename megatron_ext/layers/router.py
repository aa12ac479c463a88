"""The router: scores in float32, selection through a balancing rule, weights without its bias.

Shapes: s sequence (this rank's part), b batch, h hidden, T = s * b tokens, E experts, k a token.

    score = sigmoid(W x)                                   float32, on the full hidden state
    taken = the balancer's choice of k experts             top-k of score + bias for most rules
    weight = scaling * score / (sum of taken scores)       the bias never enters

Source: Kimi K3 report, equation 11.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_ext.config.schema import BalanceOptions, ExpertOptions, KernelOptions
from megatron_ext.layers.balance import Selection, TokenGroup, build_balancer
from megatron_ext.layers.initializers import parameter
from megatron_ext.layers.linears import ShardedModule
from megatron_ext.ops.router import Routing, route_tokens, router_logits, weights_of

GROUPS = ["tp", "cp", "tp_cp"]


class RouteHook(Protocol):
    """Sees what a router has chosen, and may choose otherwise."""

    def __call__(self, router: BalancedRouter, scores: Tensor, selection: Selection) -> Tensor:
        """The map bool [T, E] to use, for scores [T, E] and the balancer's selection."""
        ...


class BalancedRouter(ShardedModule):
    """Fits the `router` slot of megatron-core's MoELayer, and our own LatentMoE.

    The weight [E, h] is replicated over tensor parallel ranks. It sees this rank's tokens: with
    sequence parallelism another part on every rank (its gradients are summed), without it the same
    tokens on all of them (its gradients are whole).

    Statistics are taken in training with gradients enabled: not in evaluation, and once under
    recomputation (whose first pass runs without gradients). Padding is in none of them.

    Args:
        options: number of experts, top-k, scaling, precision of the matrix product.
        balance: the rule.
        kernels: backend of what follows the matrix product, for rules that are no more than a bias
            and without a hook; None takes the defaults.
        pg_collection: process groups; None takes megatron-core's.
        is_mtp_layer: given by megatron-core, not needed.

    Attributes:
        balancer: state of the rule; `train.balance` updates it once a step.
        hook: replaces the map that was chosen, when set: `layers.replay`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        options: ExpertOptions,
        balance: BalanceOptions,
        kernels: KernelOptions | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        is_mtp_layer: bool = False,
    ) -> None:
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=GROUPS)
        super().__init__(config, tp_group=pg_collection.tp)
        self.options = options
        # The ranks that share a sequence out among them, in its order.
        self.sharing = pg_collection.tp_cp if config.sequence_parallel else pg_collection.cp
        self.weight = parameter(
            options.num_experts,
            config.hidden_size,
            dtype=config.params_dtype,
            sequence_parallel=config.sequence_parallel,
        )
        self.balancer = build_balancer(
            balance, num_experts=options.num_experts, top_k=options.top_k
        )
        self.kernels = self.balancer.kernels = kernels
        self.layer = 0
        self.hook: RouteHook | None = None

    @property
    def exactly_top_k(self) -> bool:
        """Whether every token that is not padding is taken by exactly k experts."""
        return self.balancer.exactly_top_k and self.hook is None

    def set_layer_number(self, layer_number: int) -> None:
        """Called by megatron-core with the 1-based number of the layer."""
        self.layer = layer_number - 1

    def forward(
        self, hidden_states: Tensor, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Route this rank's tokens.

        Args:
            hidden_states: [s, b, h].
            padding_mask: bool [s, b], True for padding, which no expert takes; None: no padding.

        Returns:
            Weights [T, E], float32 or wider, 0 where not taken, and the map bool [T, E].
        """
        length, batch = hidden_states.shape[:2]
        valid = None if padding_mask is None else ~padding_mask.reshape(-1)
        flat = hidden_states.reshape(length * batch, -1)
        logits = router_logits(flat, self.weight, precision=self.options.router_matmul)
        tokens = self._tokens(length, batch, device=logits.device)
        if self.balancer.largest_biased and self.hook is None:
            routing = route_tokens(
                logits,
                self.balancer.bias,
                top_k=self.options.top_k,
                scaling=self.options.scaling,
                valid=valid,
                positions=tokens.positions,
                kernels=self.kernels,
            )
        else:
            routing = self._route(logits, valid, tokens)
        weights, chosen, scores, cutoff = routing
        if self.training and torch.is_grad_enabled():
            self.balancer.observe(
                scores.detach(), Selection(chosen, cutoff), valid=valid, tokens=tokens
            )
            loss = self.balancer.auxiliary_loss(scores, chosen, valid=valid, tokens=tokens)
            if loss is not None:
                # Adds the loss's gradient to the backward pass, scaled as the token losses are;
                # what is reported stays without it.
                weights = MoEAuxLossAutoScaler.apply(weights, loss)
        return weights, chosen

    def _tokens(self, length: int, batch: int, *, device: torch.device) -> TokenGroup:
        first = self.sharing.rank() * length
        places = torch.arange(first, first + length, device=device)
        return TokenGroup(
            group=self.sharing if self.sharing.size() > 1 else None,
            positions=places.repeat_interleave(batch),
        )

    def _route(self, logits: Tensor, valid: Tensor | None, tokens: TokenGroup) -> Routing:
        """By the rule's own selection, and the hook's."""
        scores = torch.sigmoid(logits)
        selection = self._select(scores.detach(), valid, tokens)
        if self.hook is not None:
            selection = replace(selection, map=self.hook(self, scores.detach(), selection))
        weights = weights_of(scores, selection.map, scaling=self.options.scaling)
        return Routing(weights, selection.map, scores, selection.cutoff)

    @torch.no_grad()
    def _select(self, scores: Tensor, valid: Tensor | None, tokens: TokenGroup) -> Selection:
        selection = self.balancer.select(scores, valid=valid, tokens=tokens)
        if valid is None:
            return selection
        return replace(selection, map=selection.map & valid.unsqueeze(-1))
