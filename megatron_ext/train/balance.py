"""Balancing in a training step: sum the statistics once, update each bias once, gather the records.

Shapes: E experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import nn
from torch.distributed import ProcessGroup

from megatron_ext.layers.balance import Reduction, start_reduce
from megatron_ext.layers.router import BalancedRouter
from megatron_ext.ops.quantile import LayerLoad, to_host


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
    """Begin to sum the statistics of the step; `finish` it before `update`."""
    balancers = [router.balancer for router in routers(chunks)]
    return start_reduce(balancers, distinct_tokens(mesh, sequence_parallel=sequence_parallel))


def update(chunks: Sequence[nn.Module], mesh: ProcessGroupCollection) -> list[LayerLoad]:
    """Set the biases for the next step. Call it once, when the step is accepted.

    Returns:
        What every expert layer of the model was given, in order and on the host, on every rank.
    """
    loads = [router.balancer.update(router.layer) for router in routers(chunks)]
    return gather(to_host(loads), mesh.pp)


def discard(chunks: Sequence[nn.Module]) -> None:
    """Instead of `update`, after a step that was not accepted: biases stay as they are."""
    for router in routers(chunks):
        router.balancer.discard()


def gather(loads: list[LayerLoad], stages: ProcessGroup) -> list[LayerLoad]:
    """The records of all pipeline stages, by layer: small, and on the host already."""
    if stages.size() == 1:
        return loads
    gathered: list[list[LayerLoad]] = [[] for _ in range(stages.size())]
    dist.all_gather_object(gathered, loads, group=stages)
    return sorted((load for part in gathered for load in part), key=lambda load: load.layer)
