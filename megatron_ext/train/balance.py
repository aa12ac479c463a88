"""Balancing in a training step: sum the statistics once, update each bias once, gather the records.

Shapes: E experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import nn
from torch.distributed import ProcessGroup

from megatron_ext.layers.balance import Reduction, start_reduce
from megatron_ext.layers.router import BalancedRouter
from megatron_ext.ops.quantile import HostCopy, LayerLoad


def routers(chunks: Sequence[nn.Module]) -> Iterator[BalancedRouter]:
    """The routers of this rank's chunks, in the order of the layers."""
    for chunk in chunks:
        yield from (module for module in chunk.modules() if isinstance(module, BalancedRouter))


def distinct_tokens(
    mesh: ProcessGroupCollection, *, sequence_parallel: bool
) -> ProcessGroup | None:
    """The ranks whose routers of a layer see other tokens of the same step; None: this one only.

    Data and context parallel ranks do, and tensor parallel ones where they shard the sequence:
    where they do not, each sees all of it, and counting them would count every token again.
    """
    group = mesh.tp_dp_cp if sequence_parallel else mesh.dp_cp
    return group if group.size() > 1 else None


def start(
    chunks: Sequence[nn.Module], mesh: ProcessGroupCollection, *, sequence_parallel: bool
) -> Reduction:
    """Begin to sum the statistics of the step; `finish` it before `Update`."""
    balancers = [router.balancer for router in routers(chunks)]
    return start_reduce(balancers, distinct_tokens(mesh, sequence_parallel=sequence_parallel))


class Update:
    """The biases of the next step, from this one's statistics, before it is known to be accepted.

    So the device computes them behind the passes, and their records are on the way to the host when
    the step is judged. Make one once a step, and `undo` it where the step is not accepted.
    """

    def __init__(self, chunks: Sequence[nn.Module], mesh: ProcessGroupCollection) -> None:
        found = list(routers(chunks))
        self._chunks = chunks
        self._states = [state for r in found for state in r.balancer.state_dict().values()]
        self._before = [state.clone() for state in self._states]
        self._copy = HostCopy([router.balancer.update(router.layer) for router in found])
        self._gathered: list[LayerLoad] | None = None
        if mesh.pp.size() > 1:  # by way of the device: later they would wait for the weights
            self._gathered = gather(self._copy.wait(), mesh.pp)

    def loads(self) -> list[LayerLoad]:
        """What every expert layer of the model was given, in order and on the host, on every rank.

        Waits for the device's work up to this object, and not for what was queued since.
        """
        return self._copy.wait() if self._gathered is None else self._gathered

    @torch.no_grad()
    def undo(self) -> None:
        """Biases as they were, without statistics."""
        for state, before in zip(self._states, self._before, strict=True):
            state.copy_(before)
        discard(self._chunks)


def discard(chunks: Sequence[nn.Module]) -> None:
    """Clear the statistics of passes that are not part of a step; biases stay as they are."""
    for router in routers(chunks):
        router.balancer.discard()


def gather(loads: list[LayerLoad], stages: ProcessGroup) -> list[LayerLoad]:
    """The records of all pipeline stages, by layer: small, and on the host already."""
    gathered: list[list[LayerLoad]] = [[] for _ in range(stages.size())]
    dist.all_gather_object(gathered, loads, group=stages)
    return sorted((load for part in gathered for load in part), key=lambda load: load.layer)
