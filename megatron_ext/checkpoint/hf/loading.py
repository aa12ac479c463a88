"""A model of any layout straight from a folder in the Hugging Face layout, without a conversion."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import nn

from megatron_ext.checkpoint import paths, state
from megatron_ext.checkpoint.hf.folder import Folder
from megatron_ext.checkpoint.hf.keymap import our_shapes
from megatron_ext.checkpoint.load import raise_together
from megatron_ext.errors import CheckpointError, ConfigError


def is_folder(path: Path) -> bool:
    """Whether `path` is in that layout, and not one of our checkpoints."""
    return (path / "config.json").is_file() and not paths.is_complete(path)


@torch.no_grad()
def load_folder(path: Path, chunks: Sequence[nn.Module], mesh: ProcessGroupCollection) -> None:
    """Fill the model chunks of this rank. Collective over all ranks; each reads its own parts.

    State of a balancing rule other than its bias keeps its initial values.

    Args:
        path: the folder.
        chunks: model chunks of this rank, DDP-wrapped or bare.
        mesh: process groups.

    Raises:
        CheckpointError: the folder is not what it should be, or its tensors are not those of the
            model. The same on every rank.
    """
    problems: list[str] = []
    folder = None
    try:
        folder = Folder(path)
    except (CheckpointError, ConfigError) as error:
        problems.append(str(error))
    raise_together(path, problems)
    assert folder is not None
    shapes = our_shapes(folder.pieces)
    names = sorted(shapes)
    asked = torch.zeros(len(names), dtype=torch.int32, device=_device(chunks))
    place = {name: i for i, name in enumerate(names)}
    wanted = []
    for name, tensor in _tensors(state.model_state(chunks, mesh)):
        if tensor.key not in shapes:
            if ".router.balancer." not in name:
                problems.append(f"missing in the folder: {tensor.key}")
        elif tuple(tensor.global_shape) != shapes[tensor.key]:
            theirs, mine = list(shapes[tensor.key]), list(tensor.global_shape)
            problems.append(f"shape: {tensor.key} is {theirs} there and {mine} here")
        else:
            asked[place[tensor.key]] = 1
            wanted.append(tensor)
    dist.all_reduce(asked, op=dist.ReduceOp.MAX)
    left = [name for name, is_asked in zip(names, asked.tolist(), strict=True) if not is_asked]
    raise_together(path, problems + [f"not in the model: {name}" for name in left])
    try:
        for tensor in wanted:
            low = tensor.global_offset
            high = [a + n for a, n in zip(low, tensor.local_shape, strict=True)]
            tensor.data.copy_(folder.read_box(tensor.key, low, high, tensor.data.dtype))
    except CheckpointError as error:
        problems.append(str(error))
    raise_together(path, problems)


def _tensors(states: dict[str, Any]) -> Iterator[tuple[str, ShardedTensor]]:
    for chunk in states.values():
        for name, value in chunk.items():
            if isinstance(value, ShardedTensor):
                yield name, value
            elif not isinstance(value, ShardedObject):  # what a backend keeps beside its weights
                raise TypeError(f"{name}: {type(value).__name__} cannot be filled from a folder")


def _device(chunks: Sequence[nn.Module]) -> torch.device:
    return next((p.device for chunk in chunks for p in chunk.parameters()), torch.device("cpu"))
