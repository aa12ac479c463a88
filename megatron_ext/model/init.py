"""Layout-free initial weights: a function of (seed, logical parameter name, element index).

Every element of every parameter hashes its own position in the whole logical tensor, so a rank
draws exactly its shard, and all layouts, pipeline splits included, start from the same model. The
names, offsets and logical shapes are those of `sharded_state_dict`, which checkpoints use too.

The hash (`ops.counter_random`) is bit-identical on every device. Its 24 highest bits give s on
(-1, 1), an odd multiple of 2**-24, exact in float32. The initializer (`layers.initializers`) turns
s into the value; erfinv may differ between CPU and GPU in the last bit of float32.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor, nn

from megatron_ext.layers.initializers import Constant, Initializer, Normal
from megatron_ext.ops.counter_random import STEP, symmetric_uniform

# Elements drawn at once. On a CPU the 64-bit counters of a slice stay in the cache; a GPU wants
# long slices, of which 8 bytes an element are alive twice (0.5 GB).
_SLICE = {"cpu": 1 << 16, "cuda": 1 << 25}


@torch.no_grad()
def initialize(chunks: Sequence[nn.Module], *, seed: int) -> None:
    """Fill every parameter of the model chunks in place. No communication; nothing is drawn whole.

    A parameter with an `initializer` gets that; otherwise matrices are normal with the
    configuration's `init_method_std`, biases 0 and other vectors, which are norm weights, 1.
    Buffers keep what they hold. Parameters on the meta device are skipped.

    Args:
        chunks: model chunks, one a virtual stage; wrapped in DDP or bare.
        seed: any integer.

    Raises:
        RuntimeError: a parameter is missing from its module's sharded state dict.
    """
    for wrapped in chunks:
        chunk: Any = wrapped
        while hasattr(chunk, "module"):
            chunk = chunk.module
        drawn: set[int] = set()
        for parameter, shard in named_shards(chunk):
            initializer = getattr(parameter, "initializer", None)
            if initializer is None:
                initializer = _default(shard, std=chunk.config.init_method_std)
            drawn.add(id(parameter))
            if not parameter.is_meta:
                fill(
                    shard.data,
                    initializer,
                    seed=seed,
                    name=_logical_name(shard),
                    global_shape=shard.global_shape[shard.prepend_axis_num :],
                    offset=shard.global_offset[shard.prepend_axis_num :],
                )
        missing = [name for name, p in chunk.named_parameters() if id(p) not in drawn]
        if missing:
            raise RuntimeError(
                f"not in sharded_state_dict, so without initial values: {', '.join(missing)}"
            )


def fill(
    out: Tensor,
    initializer: Initializer,
    *,
    seed: int,
    name: str,
    global_shape: Sequence[int],
    offset: Sequence[int],
) -> None:
    """Draw one shard in place.

    Args:
        out: the shard, any floating dtype and device; the values are float32 or wider before the
            cast. It may be a view of a larger tensor.
        initializer: how elements are drawn.
        seed: of the run.
        name: logical name of the whole tensor.
        global_shape: of the whole tensor.
        offset: of the shard in it, one number an axis.
    """
    if out.numel() == 0:
        return
    digest = hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest()
    key = int.from_bytes(digest, "little", signed=True)
    contiguous = out if out.is_contiguous() else torch.empty_like(out).contiguous()
    starts, run = _runs(out.shape, global_shape, offset, device=out.device)
    # The counter is key + index * step, and a run is the sum of its start and a common ramp.
    starts = starts * STEP + key
    rows = contiguous.view(-1, run)
    size = _SLICE.get(out.device.type, 1 << 20)
    height, width = max(1, size // run), min(run, size)
    for top in range(0, rows.shape[0], height):
        for left in range(0, run, width):
            if width < run or top == 0:
                ramp = torch.arange(left, min(left + width, run), device=out.device) * STEP
            block = rows[top : top + height, left : left + width]
            counter = starts[top : top + height, None] + ramp[: block.shape[1]]
            block.copy_(initializer.from_symmetric(symmetric_uniform(counter)))
    if contiguous is not out:
        out.copy_(contiguous)


def _runs(
    shape: Sequence[int],
    global_shape: Sequence[int],
    offset: Sequence[int],
    *,
    device: torch.device,
) -> tuple[Tensor, int]:
    """Flat global indices at which the shard's longest contiguous runs start, and their length."""
    axis = len(shape) - 1
    while axis > 0 and shape[axis] == global_shape[axis]:
        axis -= 1
    run = prod(shape[axis:])
    # Axes from `axis` on are one run: only its offset counts there.
    starts = torch.tensor([offset[axis] * prod(global_shape[axis + 1 :])] if shape else [0])
    starts = starts.to(device=device, dtype=torch.int64)
    for outer in range(axis):
        stride = prod(global_shape[outer + 1 :])
        step = torch.arange(shape[outer], dtype=torch.int64, device=device) + offset[outer]
        # The innermost axis must vary fastest, and axes come outermost first.
        starts = (starts[:, None] + (step * stride)[None, :]).reshape(-1)
    return starts, run


def named_shards(chunk: Any) -> Iterator[tuple[nn.Parameter, ShardedTensor]]:
    """Each parameter with its logical tensors; a factory may give several for one parameter."""
    metadata: dict[str, Any] = {"non_homogeneous_layers": True}
    groups = getattr(chunk, "pg_collection", None)
    group = getattr(groups, "dp_cp", None)
    if group is not None:
        metadata["dp_cp_group"] = group
    for entry in chunk.sharded_state_dict(metadata=metadata).values():
        if not isinstance(getattr(entry, "data", None), nn.Parameter):
            continue
        if isinstance(entry, ShardedTensorFactory):
            for part in _tensors(entry.build()):
                yield entry.data, part
        elif isinstance(entry, ShardedTensor):
            yield entry.data, entry


def _tensors(built: object) -> Iterator[ShardedTensor]:
    if isinstance(built, ShardedTensor):
        yield built
    elif isinstance(built, dict):
        for value in built.values():
            yield from _tensors(value)
    elif isinstance(built, list | tuple):
        for value in built:
            yield from _tensors(value)


def _logical_name(shard: ShardedTensor) -> str:
    """The key, with the indices of axes that checkpoints put in front (layer or expert number)."""
    ahead = shard.global_offset[: shard.prepend_axis_num]
    return "/".join([shard.key, *(str(index) for index in ahead)])


def _default(shard: ShardedTensor, *, std: float) -> Initializer:
    if len(shard.local_shape) >= 2:
        return Normal(std)
    return Constant(0.0) if shard.key.endswith("bias") else Constant(1.0)
