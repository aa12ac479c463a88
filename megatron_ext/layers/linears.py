"""Linear maps under tensor parallelism, with the communication in one place.

Shapes: s sequence, b batch, h hidden; with sequence parallelism a rank holds s/tp of the sequence.

    x [s/tp,b,h] --DuplicatedLinear--> low rank, still a shard of the sequence
    x or low rank --enter_tensor_parallel--> whole sequence; the backward pass sums over ranks
    entered --ColumnShard--> this rank's heads or features, no communication of its own
    heads --megatron-core's RowParallelLinear--> [s/tp,b,h]

A weight is thus used either on a shard of the sequence (duplicated, marked `sequence_parallel`) or
on all of it for local heads (split). Both have complete gradients by construction.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.errors import ConfigError
from megatron_ext.layers.initializers import Initializer, parameter
from megatron_ext.ops.projections import project


class ShardedModule(MegatronModule):
    """A module whose own parameters are each replicated, or split along one axis.

    The axis is read from the parameter (`tensor_parallel_axis` in `initializers.parameter`), so
    the sharded state dict cannot disagree with the parameter.
    """

    def __init__(self, config: TransformerConfig, *, tp_group: ProcessGroup) -> None:
        super().__init__(config)
        self.tp_group = tp_group

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict | None = None,
    ) -> dict:
        """megatron-core's sharded state dict: own parameters by axis, then the children's."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        own: dict[str, Tensor] = {}
        self._save_to_state_dict(own, "", keep_vars=True)
        axes = {
            name: value.partition_dim
            for name, value in self._parameters.items()
            if value is not None and getattr(value, "tensor_model_parallel", False)
        }
        sharded = make_sharded_tensors_for_checkpoint(
            own,
            prefix,
            axes,
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        for name, child in self.named_children():
            sharded.update(
                sharded_state_dict_default(
                    child, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self.tp_group
                )
            )
        return sharded


def tensor_group(pg_collection: ProcessGroupCollection | None) -> ProcessGroup:
    """The tensor-parallel group handed in; given none, megatron-core's own."""
    if pg_collection is None:
        pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp"])
    return pg_collection.tp


def context_group(
    config: TransformerConfig, pg_collection: ProcessGroupCollection | None
) -> ProcessGroup | None:
    """The context-parallel group handed in, else megatron-core's own; None where it is one rank."""
    if config.context_parallel_size == 1:
        return None
    if pg_collection is None:
        pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["cp"])
    return pg_collection.cp


def local_share(count: int, tp_group: ProcessGroup, *, key: str) -> int:
    """`count` divided over the tensor-parallel ranks.

    Raises:
        ConfigError: it does not divide; the message names `key`.
    """
    size = tp_group.size()
    if count % size:
        raise ConfigError(
            f"{key}: {count} does not divide by parallel.tensor={size}; "
            f"the nearest that does is {max(1, round(count / size)) * size}"
        )
    return count // size


def enter_tensor_parallel(
    x: Tensor, *, config: TransformerConfig, tp_group: ProcessGroup
) -> Tensor:
    """The whole sequence [s,b,*], for use by split weights; gradients are summed over the ranks.

    With sequence parallelism an all-gather of [s/tp,b,*] whose backward is a reduce-scatter, else
    the identity whose backward is an all-reduce. On one rank it is x itself, so that
    `project_together` sees one input.
    """
    if tp_group.size() == 1:
        return x
    if config.sequence_parallel:
        return tensor_parallel.gather_from_sequence_parallel_region(x, group=tp_group)
    return tensor_parallel.copy_to_tensor_model_parallel_region(x, group=tp_group)


class DuplicatedLinear(ShardedModule):
    """y = x W^T with W [out, in] replicated over tensor-parallel ranks, on each one's shard of x.

    Args:
        config: gives the dtype, and whether ranks see different parts of the sequence.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        in_features: int,
        out_features: int,
        tp_group: ProcessGroup,
        initializer: Initializer | None = None,
    ) -> None:
        super().__init__(config, tp_group=tp_group)
        self.weight = parameter(
            out_features,
            in_features,
            dtype=config.params_dtype,
            initializer=initializer,
            sequence_parallel=config.sequence_parallel,
        )

    def forward(self, x: Tensor | None) -> Tensor:
        """x [s/tp, b, in] to [s/tp, b, out], same dtype. None gives the matrix [out, in]: see
        `ColumnShard`."""
        return self.weight if x is None else F.linear(x, self.weight)


class ColumnShard(ShardedModule):
    """y = x W^T where W is split over tensor-parallel ranks along its outputs; no communication.

    Args:
        out_features: of one part, over all ranks.
        parts: several maps of equal size in one matrix product. The weight is then
            [parts, out/tp, in] and is split along axis 1, so each part is split by itself and
            resharding never mixes parts. With one part it is [out/tp, in].
        key: configuration key that `out_features` comes from, for the message.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        in_features: int,
        out_features: int,
        tp_group: ProcessGroup,
        key: str,
        parts: int = 1,
        initializer: Initializer | None = None,
    ) -> None:
        super().__init__(config, tp_group=tp_group)
        local = local_share(out_features, tp_group, key=key)
        shape = (local, in_features) if parts == 1 else (parts, local, in_features)
        self.weight = parameter(
            *shape,
            dtype=config.params_dtype,
            initializer=initializer,
            tensor_parallel_axis=len(shape) - 2,
        )

    def forward(self, x: Tensor | None) -> Tensor:
        """x [s, b, in], entered, to [s, b, parts * out/tp], parts one after another; same dtype.

        None gives the matrix [parts * out/tp, in], for an operator that multiplies with it itself.
        Take it by this call: it is where overlapped gathering of parameters waits for it.
        """
        weight = self.weight.flatten(0, -2)
        return weight if x is None else F.linear(x, weight)


def project_together(*uses: tuple[Tensor, DuplicatedLinear | ColumnShard]) -> list[Tensor]:
    """Each linear of its input. Those of one and the same tensor add up its gradient themselves:
    see `ops.projections`, where the sum begins with the last."""
    alike: dict[int, list[int]] = {}
    for place, (x, _) in enumerate(uses):
        alike.setdefault(id(x), []).append(place)
    made: dict[int, Tensor] = {}
    for places in alike.values():
        x = uses[places[0]][0]
        outputs = project(x, [uses[place][1](None) for place in places])
        made.update(zip(places, outputs, strict=True))
    return [made[place] for place in range(len(uses))]


def row_parallel(
    config: TransformerConfig, *, in_features: int, out_features: int, tp_group: ProcessGroup
) -> tensor_parallel.RowParallelLinear:
    """The way out: megatron-core's linear over local features, summed into [s/tp,b,h]."""
    return tensor_parallel.RowParallelLinear(
        in_features,
        out_features,
        config=config,
        init_method=config.output_layer_init_method,
        bias=False,
        input_is_parallel=True,
        skip_bias_add=True,
        tp_group=tp_group,
    )


def recompute_core(config: TransformerConfig) -> bool:
    """Whether the backward pass is to compute the attention core again instead of storing it."""
    return (
        config.recompute_granularity == "selective"
        and "core_attn" in (config.recompute_modules or ())
        and torch.is_grad_enabled()
    )
