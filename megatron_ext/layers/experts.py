"""The routed experts of one rank: two stacked weight tensors, whatever their number.

Shapes: M dispatched rows, L latent width, F width inside an expert, E experts of this rank, p
expert-tensor-parallel ranks.
"""

from __future__ import annotations

from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_ext.config.schema import ExpertOptions, KernelOptions
from megatron_ext.errors import ConfigError
from megatron_ext.layers.initializers import parameter
from megatron_ext.ops.grouped_mlp import grouped_mlp, resolve_backend


class StackedExperts(MegatronModule):
    """y = W2_e [ weight * SiTU_GLU(W1_e x) ] for the rows of each local expert e.

    Expert parallelism cuts the expert axis, expert-tensor parallelism F. Gradients are summed over
    the ranks that hold the same shard (`allreduce=False` tells megatron-core's reduction and
    optimizer so), in every layout alike, so that a checkpoint never sees another nesting.

    Args:
        options: sizes and backend.
        in_features: L.
        beta: bound of the gate branch of SiTU-GLU; None: none.
        linear_beta: bound of its linear branch; None: none.
        kernels: backend of the activation; None takes the defaults.
        pg_collection: with the groups `ep`, `expt_tp` and `expt_dp`.

    Raises:
        ConfigError: experts or their width do not divide over the ranks; or a backend that must
            run cannot.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        options: ExpertOptions,
        in_features: int,
        beta: float | None,
        linear_beta: float | None,
        kernels: KernelOptions | None = None,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        super().__init__(config)
        self.options, self.beta, self.linear_beta = options, beta, linear_beta
        self.kernels = kernels
        self.groups = pg_collection
        expert, tensor = pg_collection.ep.size(), pg_collection.expt_tp.size()
        for key, count, ranks in (
            ("num_experts", options.num_experts, expert),
            ("feed_forward_size", options.feed_forward_size, tensor),
        ):
            if count % ranks:
                raise ConfigError(f"model.experts.{key}={count}: must be a multiple of {ranks}")
        self.num_local_experts = options.num_experts // expert
        width = options.feed_forward_size // tensor
        self.fc1 = self._stacked(2, width, in_features, split=2)
        self.fc2 = self._stacked(in_features, width, split=2)
        # What cannot run as asked for is known before any work, on every rank.
        resolve_backend(
            options.backend,
            self.fc1.device,
            dtype=self.fc1.dtype,
            widths=(in_features, width),
            precision=options.fp8,
            require=options.require,
        )

    def _stacked(self, *shape: int, split: int) -> Any:
        made: Any = parameter(
            self.num_local_experts,
            *shape,
            dtype=self.config.params_dtype,
            tensor_parallel_axis=split,
        )
        made.allreduce = False
        return made

    def forward(self, rows: Tensor, counts: Tensor, weights: Tensor) -> Tensor:
        """Apply each expert to its rows.

        Args:
            rows: [M, L], sorted by local expert.
            counts: integer [E], rows of each; adds up to M.
            weights: [M], the router's.

        Returns:
            [M, L]; with p > 1 the part of this rank's F, to be summed over the p ranks.
        """
        return grouped_mlp(
            rows,
            counts,
            weights,
            self.fc1,
            self.fc2,
            beta=self.beta,
            linear_beta=self.linear_beta,
            kernels=self.kernels,
            backend=self.options.backend,
            precision=self.options.fp8,
            require=self.options.require,
        )

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict | None = None,
    ) -> dict:
        """Each weight as one tensor over all experts of the layer, the same for every layout."""
        ep, tensor, data = self.groups.ep, self.groups.expt_tp, self.groups.expt_dp
        ahead = len(sharded_offsets)
        return {
            prefix + name: ShardedTensor.from_rank_offsets(
                prefix + name,
                value,
                *sharded_offsets,
                (ahead, ep.rank(), ep.size()),
                (ahead + value.partition_dim, tensor.rank(), tensor.size()),
                replica_id=(0, 0, data.rank()),
                prepend_axis_num=ahead,
            )
            for name, value in self.named_parameters()
        }
