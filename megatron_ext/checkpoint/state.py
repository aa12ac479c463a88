"""A model and its optimizer as sharded tensors whose names do not depend on the layout.

Model tensors keep the names that their modules give them (`decoder.layers.3...`), whatever the
pipeline stage or chunk. Adam's are `optimizer.state.{exp_avg,exp_avg_sq}.<name>`, whether the
optimizer is sharded, chained, or neither; the float32 main weight of a bf16 parameter is
`optimizer.state.fp32_param.<name>`. Of an optimizer's parameter groups only the step is kept: the
learning rate is set every step and all else comes from the configuration, so nothing has to be
matched between a layout with one optimizer and one with two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn

from megatron_ext.checkpoint.gather import empty_state, whole_state
from megatron_ext.optim.groups import LATE

MAIN_WEIGHT = "optimizer.state.fp32_param."
RNG = "rng_state"
WEIGHT_BYTES = 2 + 3 * 4  # in a checkpoint of a bf16 run: a weight, its main weight, two moments

# One parameter's optimizer tensors: `exp_avg`, `exp_avg_sq` and, if kept apart, `fp32_param`.
Entry = dict[str, ShardedTensor | ShardedTensorFactory]


def unwrap(chunk: nn.Module) -> nn.Module:
    """The model chunk inside megatron-core's DistributedDataParallel, or the chunk itself."""
    return chunk.module if isinstance(chunk, DistributedDataParallel) else chunk


def sharding_metadata(mesh: ProcessGroupCollection) -> dict[str, Any]:
    """What megatron-core's `sharded_state_dict` methods have to be told."""
    return {
        # The only one of its formats that any other layout can read.
        "distrib_optim_sharding_type": "fully_reshardable",
        "dp_cp_group": mesh.dp_cp,
        "chained_optim_avoid_prefix": True,
        # One name a layer: layers differ, so they cannot be stacked into one tensor.
        "non_homogeneous_layers": True,
    }


def layout(chunks: Sequence[nn.Module], mesh: ProcessGroupCollection) -> dict[str, int]:
    """Sizes of the layout, as they stand in `extra.json`."""
    sizes = {"world_size": dist.get_world_size(), "virtual_pipeline": len(chunks)}
    names = {"tensor": "tp", "pipeline": "pp", "context": "cp", "data": "dp", "expert": "ep"}
    for name, attribute in {**names, "expert_tensor": "expt_tp"}.items():
        group = getattr(mesh, attribute, None)
        sizes[name] = group.size() if group is not None else 1
    return sizes


def model_state(chunks: Sequence[nn.Module], mesh: ProcessGroupCollection) -> dict[str, Any]:
    """Sharded tensors of all chunks of this rank.

    Raises:
        RuntimeError: a module's `sharded_state_dict` leaves out one of its parameters, which would
            be lost without a word.
    """
    states: dict[str, Any] = {}
    for index, chunk in enumerate(chunks):
        module: Any = unwrap(chunk)
        state = module.sharded_state_dict(prefix="", metadata=sharding_metadata(mesh))
        saved = {id(value.data) for value in nested_values(state)}
        lost = [n for n, p in module.named_parameters() if id(p) not in saved and n not in state]
        if lost:
            raise RuntimeError(f"sharded_state_dict leaves out the parameters {', '.join(lost)}")
        states[f"chunk_{index}"] = state
    return states


def optimizer_parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """The optimizers inside a chained one, less those without parameters on this rank."""
    parts = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    return [part for part in parts if part.optimizer is not None]


def optimizer_step(optimizer: MegatronOptimizer) -> int:
    """Number of updates that the run has made; a group's moments may have seen fewer."""
    groups = [group for part in optimizer_parts(optimizer) for group in part.optimizer.param_groups]
    steps = (int(group.get("step", 0)) + int(group.get(LATE, 0)) for group in groups)
    return max(steps, default=0)


def device_bytes(
    chunks: Sequence[nn.Module], optimizer: MegatronOptimizer, mesh: ProcessGroupCollection
) -> int:
    """About how many bytes a save copies from this rank's device, known before the first update.

    Of weights that several ranks hold each writes a share. The state of an optimizer that ranks
    share is gathered in main memory, so that only one that a rank has alone counts, with two
    moments in float32 and, of a weight of lower precision, a main weight.
    """
    held = [p for chunk in chunks for p in chunk.parameters() if p.device.type != "cpu"]
    size = 0
    for parameter in held:
        group = mesh.dp_cp if getattr(parameter, "allreduce", True) else mesh.expt_dp
        size += parameter.nbytes // group.size()
    for part in optimizer_parts(optimizer):
        if isinstance(part, DistributedOptimizer) and part.data_parallel_group.size() == 1:
            updated = [p for buffer in part.buffers for p in buffer.param_index_map]
            for parameter in updated:
                if parameter.device.type != "cpu":
                    kept = 2 if parameter.dtype is torch.float32 else 3
                    size += kept * 4 * parameter.numel()
    return size


def files(chunks: Sequence[nn.Module], *, file_bytes: int, most: int) -> int:
    """In how many files of about `file_bytes` this rank's share belongs, which are written and
    checked at a time: 1 to `most`. Counts as if no other rank had a part of this one's weights.
    """
    weights = sum(p.numel() for chunk in chunks for p in chunk.parameters())
    return max(1, min(most, weights * WEIGHT_BYTES // file_bytes))


def set_optimizer_step(optimizer: MegatronOptimizer, step: int) -> None:
    """Set the number of updates that the run has made, in every group."""
    for part in optimizer_parts(optimizer):
        for group in part.optimizer.param_groups:
            group["step"] = step - int(group.get(LATE, 0))


def optimizer_state(
    optimizer: MegatronOptimizer,
    model: dict[str, Any],
    mesh: ProcessGroupCollection,
    *,
    loading: bool,
) -> dict[str, dict[int, Entry]]:
    """Sharded tensors of the optimizer, by part and number of the parameter in it.

    Args:
        optimizer: megatron-core's, sharded or not, chained or not.
        model: `model_state` of its chunks.
        mesh: process groups.
        loading: with a sharded optimizer, make tensors to be filled instead of gathering the state.
    """
    by_id = {
        id(value.data): value
        for value in nested_values(model)
        if isinstance(value, ShardedTensor | ShardedTensorFactory)
    }
    state: dict[str, dict[int, Entry]] = {}
    for number, part in enumerate(optimizer_parts(optimizer)):
        # Moments exist from the first update on; a checkpoint of step 0 has them as zeros.
        part.init_state_fn(part.optimizer, part.config)
        entries: dict[int, Entry]
        if isinstance(part, DistributedOptimizer):
            found = empty_state(part) if loading else whole_state(part)
            entries = {
                index: _entry(by_id[id(param)], tensors)
                for index, (param, tensors) in enumerate(found)
            }
        else:
            entries = {}
            for index, (param, main) in enumerate(_plain_parameters(part)):
                entries[index] = _entry(by_id[id(param)], _plain_tensors(part, param, main))
        state[f"part_{number}"] = entries
    return state


def _entry(weight: ShardedTensor | ShardedTensorFactory, tensors: dict[str, Tensor]) -> Entry:
    """What is kept of one parameter, cut into shards as its weight is."""
    return {
        name: make_sharded_optimizer_tensor(weight, tensor, f"optimizer.state.{name}")
        for name, tensor in tensors.items()
    }


@torch.no_grad()
def fill_optimizer(
    optimizer: MegatronOptimizer, loaded: dict[str, dict[int, dict[str, Tensor]]]
) -> None:
    """Put loaded tensors, shaped as `optimizer_state` gave them, into the optimizer."""
    for number, part in enumerate(optimizer_parts(optimizer)):
        entries = loaded.get(f"part_{number}", {})
        if isinstance(part, DistributedOptimizer):
            for index, param in enumerate(_sharded_parameters(part)):
                entries[index].setdefault("fp32_param", param.detach())
            part.load_parameter_state_from_fully_reshardable(entries)
            continue
        for index, (param, main) in enumerate(_plain_parameters(part)):
            for name, target in _plain_tensors(part, param, main).items():
                target.copy_(entries[index][name])


def _sharded_parameters(part: DistributedOptimizer) -> Iterator[Tensor]:
    """Model parameters in the order in which the sharded optimizer numbers them."""
    for buffer in part.buffers[: len(part.gbuf_ranges)]:
        yield from buffer.param_index_map


def _plain_parameters(part: MegatronOptimizer) -> Iterator[tuple[Tensor, Tensor]]:
    """(model parameter, main parameter) of an optimizer that is not sharded."""
    if isinstance(part, FP32Optimizer):
        for group in part.optimizer.param_groups:
            yield from ((param, param) for param in group["params"])
    elif isinstance(part, Float16OptimizerWithFloat16Params):
        for params, mains in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
            yield from zip(params, mains, strict=True)
        for params in part.fp32_from_fp32_groups:
            yield from ((param, param) for param in params)
    else:
        raise TypeError(f"{type(part).__name__}: its state cannot be saved by name")


def _plain_tensors(part: MegatronOptimizer, param: Tensor, main: Tensor) -> dict[str, Tensor]:
    state = part.optimizer.state[main]
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    if main is not param:
        tensors["fp32_param"] = main.detach()
    return tensors


def rng_object(states: dict[str, Any] | None) -> ShardedObject:
    """The random states of this rank as one piece of the checkpoint."""
    return ShardedObject(RNG, states, (dist.get_world_size(),), (dist.get_rank(),))
