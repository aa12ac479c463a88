"""The state of a sharded optimizer as whole tensors: what its data parallel ranks hold, together.

megatron-core's own way (`sharded_param_state_fully_reshardable`, 0.19.2) is wrong where gradients
are reduced in several buckets: it takes the padding between them out of the tensors, but not out of
the places that it reads parameters from, so that those after the first bucket get numbers of their
neighbours. And it copies the state five times, also where one rank has all of it, while training
waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

PIECE_BYTES = 256 << 20  # of all ranks together, on the device at once


def whole_state(part: DistributedOptimizer) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Every parameter of an optimizer in the order in which it numbers them, with its state.

    Collective over the data parallel ranks of the parameters.

    Yields:
        The model's parameter, and tensors of its shape in float32: `exp_avg`, `exp_avg_sq`, and
        `fp32_param` where the parameter is no float32. With one data parallel rank they are the
        optimizer's own, on its device; else copies in main memory, whole on every rank.
    """
    size = part.data_parallel_group.size()
    for buffer, ranges in zip(part.buffers, part.gbuf_ranges, strict=False):
        (buckets,) = ranges.values()  # one a bucket; all parameters of a buffer have one dtype
        found: dict[int, dict[str, Tensor]] = {}
        for number, held in enumerate(buckets):
            mine = {param: _held(part, param) for param in held["param_map"]}
            if size == 1:
                found |= {id(p): _shaped(tensors, p) for p, tensors in mine.items()}
                continue
            placed = [(held["param_map"][p]["gbuf_local"], mine[p]) for p in mine]
            found |= _gathered(part, buffer, number, placed)
        for param in buffer.param_index_map:
            yield param, found[id(param)]


def empty_state(part: DistributedOptimizer) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """What `whole_state` yields, of zeros in main memory, to be filled."""
    for buffer in part.buffers[: len(part.gbuf_ranges)]:
        for param in buffer.param_index_map:
            yield (
                param,
                {
                    key: torch.zeros(param.shape, dtype=torch.float32, device="cpu")
                    for key in _keys(part, param)
                },
            )


def _gathered(
    part: DistributedOptimizer,
    buffer: _ParamAndGradBuffer,
    number: int,
    placed: Sequence[tuple[Any, dict[str, Tensor]]],
) -> dict[int, dict[str, Tensor]]:
    """State of all parameters of a bucket, by id, from this rank's pieces and the others'.

    Args:
        placed: pieces of this rank, each with its range in the rank's share of the bucket.
    """
    group, bucket = part.data_parallel_group, buffer.buckets[number]
    size, device = group.size(), bucket.grad_data.device
    count = bucket.grad_data.numel() // size  # of a rank, padding included
    inside = {
        param: (start - bucket.offset, end - bucket.offset)
        for param, (start, end, where) in buffer.param_index_map.items()
        if where == number
    }
    found: dict[int, dict[str, Tensor]] = {id(param): {} for param in inside}
    for key in _keys(part, next(iter(inside))):
        own = torch.zeros(count, dtype=torch.float32, device=device)
        for place, tensors in placed:
            own[place.start : place.end].copy_(tensors[key])
        whole = torch.empty(size, count, dtype=torch.float32, device="cpu")
        step = max(1, PIECE_BYTES // 4 // size)
        for begin in range(0, count, step):
            piece = own[begin : begin + step]
            every = piece.new_empty(size * len(piece))  # gloo takes a flat one only
            dist.all_gather_into_tensor(every, piece, group=group)
            whole[:, begin : begin + step].copy_(every.view(size, -1))
        for param, (start, end) in inside.items():
            found[id(param)][key] = whole.view(-1)[start:end].view(param.shape)
    return found


def _keys(part: DistributedOptimizer, param: Tensor) -> tuple[str, ...]:
    """Names of what is kept of a parameter. The main weight of a float32 one is itself."""
    main = () if param.dtype == torch.float32 else ("fp32_param",)
    return (*part.optimizer_state_keys, *main)


def _held(part: DistributedOptimizer, param: Tensor) -> dict[str, Tensor]:
    """This rank's piece of a parameter's state, flat."""
    tensors = part._get_main_param_and_optimizer_states(param)
    tensors["fp32_param"] = tensors.pop("param")
    return {key: tensors[key].detach() for key in _keys(part, param)}


def _shaped(tensors: dict[str, Tensor], param: Tensor) -> dict[str, Tensor]:
    return {key: tensor.float().view(param.shape) for key, tensor in tensors.items()}
