"""What crosses pipeline stages when sublayers read several sources (see `config.residual`).

megatron-core's schedules exchange one tensor [s, b, h] a hop. The sources of a hop lie in it one
after another along the first axis, each piece contiguous; the schedules are only told another
length. Shapes: s sequence of this rank, b batch, h hidden.

In the interleaved schedule a rank visits a micro-batch several times. It keeps the sources that it
has seen, and a hop carries the others. Within the later chunk a kept source is a leaf of its own
graph, which collects its gradient there; `_Send` of the earlier chunk, whose backward pass comes
later on the same rank, adds it to the source's gradient, once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_ext.config.residual import ChunkSources, chunk_sources, mixes
from megatron_ext.config.schema import RunConfig

Shapes = list[tuple[int, ...]]


class SourceCache:
    """The sources that one rank keeps between its chunks, by micro-batch."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Tensor, ...]] = {}

    def put(self, micro_batch: int, sources: tuple[Tensor, ...]) -> None:
        """Keep them for the next chunk of this rank."""
        self._kept[micro_batch] = sources

    def take(self, micro_batch: int) -> tuple[Tensor, ...]:
        """Hand them over, once.

        Raises:
            RuntimeError: nothing is kept of it, so chunks did not run in the order of layers.
        """
        if micro_batch not in self._kept:
            raise RuntimeError(
                f"no sources are kept of micro-batch {micro_batch} (kept: {sorted(self._kept)}); "
                "model chunks must run in the order of their layers, by megatron-core's schedules"
            )
        return self._kept.pop(micro_batch)


class Boundary:
    """Both ends of one model chunk: its message in to sources, its sources to the message out.

    Args:
        plan: how many sources there are.
        cache: of this rank; the same for all of its chunks.
        dtype: in which sources are kept; None leaves them as they come.
    """

    def __init__(
        self, plan: ChunkSources, cache: SourceCache, *, dtype: torch.dtype | None = None
    ) -> None:
        self.plan = plan
        self.cache = cache
        self.dtype = dtype

    def enter(self, message: Tensor, *, micro_batch: int) -> tuple[Tensor, ...]:
        """The sources [s, b, h] before the chunk's first layer, from a message [slots*s, b, h]."""
        plan = self.plan
        if self.dtype is not None:
            message = message.to(self.dtype)
        received: tuple[Tensor, ...] = (message,)
        if plan.slots_in > 1:
            received = message.split(message.shape[0] // plan.slots_in)[: plan.received]
        if not plan.cached:
            return received
        return self.cache.take(micro_batch) + received

    def leave(self, sources: tuple[Tensor, ...], *, micro_batch: int) -> Tensor:
        """The message [slots*s, b, h] after its last layer; keeps what the next chunk needs."""
        plan = self.plan
        leaves = tuple(
            source.detach().requires_grad_(source.requires_grad) for source in sources[: plan.kept]
        )
        if leaves:
            self.cache.put(micro_batch, leaves)
        message: Tensor = _Send.apply(plan.skipped, plan.slots_out, leaves, *sources)
        return message


class _Send(torch.autograd.Function):
    """Joins the sources that are sent, and takes in the gradients of those that were kept."""

    @staticmethod
    def forward(
        ctx: Any, skipped: int, slots: int, leaves: tuple[Tensor, ...], *sources: Tensor
    ) -> Tensor:
        ctx.skipped, ctx.leaves = skipped, leaves
        sent = list(sources[skipped:])
        length = sources[0].shape[0]
        if slots > len(sent):
            sent.append(sources[0].new_zeros((slots - len(sent)) * length, *sources[0].shape[1:]))
        ctx.length = length
        return torch.cat(sent)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        pieces = grads[0].split(ctx.length)
        found: list[Tensor | None] = []
        for number in range(len(ctx.needs_input_grad) - 3):
            sent = pieces[number - ctx.skipped] if number >= ctx.skipped else None
            kept = ctx.leaves[number].grad if number < len(ctx.leaves) else None
            found.append(sent if kept is None else kept if sent is None else kept + sent)
        ctx.leaves = ()
        return (None, None, None, *found)


def schedule_arguments(config: RunConfig, *, stage: int, sequence_length: int) -> dict[str, Any]:
    """What megatron-core's schedule is told about lengths on one pipeline stage.

    Args:
        stage: of this rank, from 0.
        sequence_length: of a micro-batch, over all ranks.

    Returns:
        `seq_length`, and `adjust_tensor_shapes_fn` where both directions differ.
    """
    arguments: dict[str, Any] = {"seq_length": sequence_length}
    if config.parallel.pipeline == 1 or not mixes(config.residual):
        return arguments
    plans = chunk_sources(config)
    if config.parallel.virtual_pipeline > 1:
        arguments["seq_length"] = sequence_length * plans[0].slots_out
    else:
        arguments["adjust_tensor_shapes_fn"] = _longer(plans[stage])
    return arguments


def _longer(plan: ChunkSources) -> Callable[[Shapes, Shapes], tuple[Shapes, Shapes]]:
    """Shapes of the messages to and from a stage of the plain schedule."""

    def adjust(receive: Shapes, send: Shapes) -> tuple[Shapes, Shapes]:
        return (
            [(length * plan.slots_in, *rest) for length, *rest in receive],
            [(length * plan.slots_out, *rest) for length, *rest in send],
        )

    return adjust
