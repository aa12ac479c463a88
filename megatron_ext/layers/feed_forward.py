"""The dense feed-forward: SiTU-GLU between a column-split pair of maps and a row-split one."""

from __future__ import annotations

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_ext.config.schema import KernelOptions
from megatron_ext.layers.linears import (
    ColumnShard,
    ShardedModule,
    enter_tensor_parallel,
    row_parallel,
    tensor_group,
)
from megatron_ext.ops.situ import situ_glu


class SituFeedForward(ShardedModule):
    """y = W2 [ beta tanh(g/beta) sigmoid(g) * linear_beta tanh(u/linear_beta) ], (g, u) = W1 x.

    Kimi K3's activation (`ops.situ`). Fits the `mlp` slot of megatron-core's TransformerLayer,
    whose arguments `is_mtp_layer` and `name` are not needed here.

    Args:
        feed_forward_size: width between the two maps, over all ranks.
        beta: bound of the gate branch; None: none.
        linear_beta: bound of the linear branch; None: none.
        kernels: backend of the activation; None takes the defaults.
        key: configuration key that `feed_forward_size` comes from, for messages.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        feed_forward_size: int,
        beta: float | None,
        linear_beta: float | None,
        kernels: KernelOptions | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        is_mtp_layer: bool = False,
        name: str | None = None,
        key: str = "model.feed_forward_size",
    ) -> None:
        tp_group = tensor_group(pg_collection)
        super().__init__(config, tp_group=tp_group)
        self.beta = beta
        self.linear_beta = linear_beta
        self.kernels = kernels or KernelOptions()
        self.fc1 = ColumnShard(
            config,
            in_features=config.hidden_size,
            out_features=feed_forward_size,
            parts=2,
            tp_group=tp_group,
            key=key,
        )
        self.fc2 = row_parallel(
            config,
            in_features=feed_forward_size,
            out_features=config.hidden_size,
            tp_group=tp_group,
        )

    def forward(
        self,
        hidden_states: Tensor,
        padding_mask: Tensor | None = None,
        *,
        first: Tensor | None = None,
    ) -> tuple:
        """[s/tp, b, h] to ([s/tp, b, h], None): megatron-core's (output, bias) pair.

        Args:
            padding_mask: is for routed experts; a dense layer treats every position alike.
            first: what `fc1` gives for the entered input, where it was computed already.
        """
        if first is None:
            first = self.fc1(
                enter_tensor_parallel(hidden_states, config=self.config, tp_group=self.tp_group)
            )
        hidden = situ_glu(
            first,
            beta=self.beta,
            linear_beta=self.linear_beta,
            backend=self.kernels.backend,
            require=self.kernels.require,
        )
        return self.fc2(hidden)
