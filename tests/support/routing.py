"""The routing of a run on one rank, kept in a file and replayed in another layout."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_ext.config.layout import expert_layers, sequence_parallel
from megatron_ext.data.batches import padded_length
from megatron_ext.layers.replay import RoutingTape
from megatron_ext.train.balance import routers
from megatron_ext.train.state import TrainState


def places_of(state: TrainState, number: int) -> Tensor:
    """Places in the batch of the tokens of this rank's forward pass `number`, in the router's order
    [s, b]; of padding: beyond the batch."""
    config, mesh = state.config, state.mesh
    length, sequences = config.data.sequence_length, config.train.micro_batch_size
    first = (number * mesh.dp.size() + mesh.dp.rank()) * sequences
    rows = (torch.arange(sequences)[:, None] + first) * length + torch.arange(length)
    if config.data.isolate_documents:
        rows = rows.reshape(1, -1)
    tensor = mesh.tp.size() if sequence_parallel(config.parallel) else 1
    own = mesh.cp.rank() * tensor + (mesh.tp.rank() if tensor > 1 else 0)
    total = padded_length(rows.shape[1], ranks=mesh.cp.size(), multiple=tensor)
    total = -(-total // PAD.get("multiple", 1)) * PAD.get("multiple", 1)
    missing = torch.full((len(rows), total - rows.shape[1]), 2**62)
    parts = torch.cat([rows, missing], dim=1).chunk(mesh.cp.size() * tensor, dim=1)
    return parts[own].T.reshape(-1)


PAD: dict[str, int] = {}  # what `append_padding` of the layout worker rounds rows up to


class Replay:
    """Records the routing and the biases of a case, or replays those of another.

    Args:
        path: where they are kept.
        record: write (at `close`) instead of reading.
        free: neither: the run routes by itself.
    """

    def __init__(self, state: TrainState, path: Path, *, record: bool, free: bool) -> None:
        self.state, self.path, self.record = state, path, record
        self.idle = free or not expert_layers(state.config.model)
        self.kept: dict[str, Any] = {}
        self.rerouted = self.first_rerouted = 0
        self.margin = 0.0
        if not self.idle and not record:
            self.kept = torch.load(path)

    def __call__(self, name: str, tokens: int) -> AbstractContextManager[Any]:
        """Around the passes over a batch of so many tokens."""
        return nullcontext() if self.idle else _Playing(self, name, tokens)

    def biases(self, name: str) -> None:
        """After a step: keep the new biases, or put those of the other run in their place."""
        if self.idle:
            return
        for router in routers(self.state.chunks):
            key = f"bias/{name}/{router.layer}"
            if self.record:
                self.kept[key] = router.balancer.bias.clone()
            else:
                router.balancer.bias.copy_(self.kept[key])

    def close(self) -> None:
        """Write what was recorded."""
        if self.record and not self.idle:
            torch.save(self.kept, self.path)


class _Playing:
    def __init__(self, replay: Replay, name: str, tokens: int) -> None:
        self.replay, self.name = replay, name
        state = replay.state
        self.routers = list(routers(state.chunks))
        experts = state.config.model.experts.num_experts
        maps = {}
        for router in self.routers:
            key = f"map/{name}/{router.layer}"
            if replay.record:
                replay.kept[key] = torch.zeros(tokens, experts, dtype=torch.bool)
            maps[router.layer] = replay.kept[key]
        places: Callable[[int], Tensor] = lambda number: places_of(state, number)  # noqa: E731
        self.tape = RoutingTape(maps, places=places, replay=not replay.record)

    def __enter__(self) -> None:
        self.tape.attach(self.routers)

    def __exit__(self, *exception: object) -> None:
        self.tape.detach(self.routers)
        count = sum(self.tape.rerouted.values())
        self.replay.rerouted += count
        if self.name == "step_0":
            self.replay.first_rerouted = count
            self.replay.margin = self.tape.margin
