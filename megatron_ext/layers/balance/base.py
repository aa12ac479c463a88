"""The interface of every balancing rule: select, observe, reduce, update.

Shapes: T tokens of a micro-batch on this rank, E experts, k experts a token.

    selection = balancer.select(scores, ...)    every forward, also in evaluation; changes nothing
    balancer.observe(scores, selection, ...)    forward of training, once a token
    reduce(balancers, group)                    once a step, all layers in one collective a dtype
    load = balancer.update(layer)               once a step; the new bias is used from the next one
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_ext.config.schema import BalanceOptions, KernelOptions
from megatron_ext.ops.quantile import LayerLoad, add_load, select_top_k, settle


@dataclass(frozen=True)
class TokenGroup:
    """Where the tokens at hand belong: for rules that look at all of a micro-batch, and for ties.

    Attributes:
        group: ranks that hold other tokens of this micro-batch, in the order of the sequence
            (context parallel ranks, and tensor parallel ones when they shard the sequence), each
            as many; None when this rank holds all of them.
        positions: int64 [T], a number for each token that no layout changes, such as its place in
            its sequence: ties between experts are dealt out by it. None: 0, 1, ... of this rank.
    """

    group: ProcessGroup | None = None
    positions: Tensor | None = None


@dataclass(frozen=True)
class Selection:
    """Which expert takes which token.

    Attributes:
        map: bool [T, E].
        cutoff: what `observe` needs besides: as scores [T], the (k+1)-th largest biased score of
            each token; of rule `threshold` [E], the smallest score that an expert takes.
    """

    map: Tensor
    cutoff: Tensor


class Balancer(nn.Module):
    """State and rule of one layer. `bias` is float32 whatever the model's dtype, and is saved.

    Persistent buffers are the same on all ranks after `update`. By itself this is the rule `none`:
    it counts, and leaves the bias alone.

    Args:
        options: of the rule.
        num_experts: E.
        top_k: k.
        device: of the state; None: the current CUDA device.

    Attributes:
        kernels: backend of statistics that have a kernel; None takes the defaults.
    """

    kernels: KernelOptions | None = None

    #: Whether `select` gives every token exactly k experts.
    exactly_top_k = True

    bias: Tensor
    counts: Tensor

    def __init__(
        self,
        options: BalanceOptions,
        *,
        num_experts: int,
        top_k: int,
        device: torch.device | int | str | None = None,
    ) -> None:
        super().__init__()
        self.options = options
        self.num_experts = num_experts
        self.top_k = top_k
        self.device = torch.cuda.current_device() if device is None else device
        self.register_buffer("bias", torch.zeros(num_experts, device=self.device))
        # Tokens an expert, then valid tokens. Of the step under way, hence zero whenever a
        # checkpoint is written.
        counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=self.device)
        self.register_buffer("counts", counts, persistent=False)

    @property
    def largest_biased(self) -> bool:
        """Whether the rule is no more than a bias: the selection is of the largest score + bias,
        and no loss looks at scores. `ops.router.route_tokens` may then select instead."""
        mine = type(self)
        return mine.select is Balancer.select and mine.auxiliary_loss is Balancer.auxiliary_loss

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Moves, never casts: `model.bfloat16()` leaves scores' statistics in float32."""

        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(move, recurse)

    @torch.no_grad()
    def select(self, scores: Tensor, *, valid: Tensor | None, tokens: TokenGroup) -> Selection:
        """Which expert takes which token.

        Args:
            scores: float32, or float64 in tests, [T, E] in [0, 1], unbiased.
            valid: bool [T], False for padding; None: all are valid.
            tokens: for rules that look at the whole micro-batch, and for ties.
        """
        return Selection(*select_top_k(scores + self.bias, self.top_k, positions=tokens.positions))

    @torch.no_grad()
    def observe(
        self, scores: Tensor, selection: Selection, *, valid: Tensor | None, tokens: TokenGroup
    ) -> None:
        """Add the statistics of a micro-batch. The caller calls it once a token: in training with
        gradients enabled, not in evaluation, not twice under recomputation. Where `tokens.group`
        is given, all of its ranks call it together."""
        add_load(self.counts, selection.map, valid=valid)

    def statistics(self) -> list[Tensor]:
        """Tensors to be summed, in place, over all ranks that hold other tokens of the step."""
        return [self.counts]

    def gather(self, group: ProcessGroup) -> None:
        """For rules whose statistics cannot be summed: collect them over the same ranks."""

    def auxiliary_loss(
        self, scores: Tensor, map: Tensor, *, valid: Tensor | None, tokens: TokenGroup
    ) -> Tensor | None:
        """A loss, as a sum over the valid tokens of this rank, to be added to the token losses.

        Args:
            scores: float32 [T, E] in [0, 1], with their gradient.
            map: bool [T, E], the selection.
            valid: bool [T], False for padding; None: all are valid.
            tokens: for rules that look at the whole micro-batch.

        Returns:
            float32 [], or None where the rule has no loss.
        """
        return None

    @torch.no_grad()
    def update(self, layer: int) -> LayerLoad:
        """Set the bias for the next step from the reduced statistics, and clear these.

        Args:
            layer: 0-based number of the layer, for the record.
        """
        return self._finish(layer, new_bias=self.bias)

    def discard(self) -> None:
        """Clear the statistics of a step whose update is left out; the bias stays as it is."""
        for tensor in self.statistics():
            tensor.zero_()

    def _finish(
        self,
        layer: int,
        *,
        new_bias: Tensor,
        predicted: Tensor | None = None,
        out_of_range: Tensor | None = None,
        bin_width: Tensor | None = None,
    ) -> LayerLoad:
        """The record of the step; takes over the bias and clears the counts."""
        return settle(
            self.counts,
            self.bias,
            layer=layer,
            top_k=self.top_k,
            new_bias=new_bias,
            predicted=predicted,
            out_of_range=out_of_range,
            bin_width=bin_width,
        )
