"""The output head: logits for inference, the loss of each token for training.

Shapes: s sequence of this context rank, b batch, h hidden, V padded vocabulary.
"""

from __future__ import annotations

from typing import Any

from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_ext.config.schema import KernelOptions
from megatron_ext.layers.linears import enter_tensor_parallel
from megatron_ext.ops.cross_entropy import chunk_for, linear_cross_entropy


class OutputHead(tensor_parallel.ColumnParallelLinear):
    """megatron-core's output layer, which given labels returns losses and never all of the logits.

    The loss is made inside the module's own call, not beside it: that call is where overlapped
    gathering of parameters waits for the weight.

    Args:
        vocab_size: V, split over tensor parallel ranks.
        pg_collection: process groups.
        kernels: backend of the losses; None takes the defaults.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        vocab_size: int,
        pg_collection: ProcessGroupCollection,
        kernels: KernelOptions | None = None,
    ) -> None:
        super().__init__(
            config.hidden_size,
            vocab_size,
            config=config,
            init_method=config.init_method,
            bias=False,
            gather_output=False,
            tp_group=pg_collection.tp,
        )
        self.kernels = kernels

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        *,
        labels: Tensor | None = None,
        chunk_tokens: int | None = None,
    ) -> Any:
        """Logits as megatron-core's class gives them, or with labels the losses.

        Args:
            input_: [s/tp, b, h].
            weight, runtime_gather_output: megatron-core's; not used with labels.
            labels: int64 [b, s], negative where a token does not count.
            chunk_tokens: tokens whose logits exist at once; None: as many as take 256 MiB.

        Returns:
            (logits [s, b, V/tp], None); with labels the losses in nats [b, s], float32 or wider.
        """
        if labels is None:
            return super().forward(input_, weight, runtime_gather_output)
        hidden = enter_tensor_parallel(input_, config=self.config, tp_group=self.tp_group)
        losses = linear_cross_entropy(
            hidden.flatten(0, 1),
            self.weight,
            labels.t().flatten(),
            chunk_tokens=chunk_tokens or chunk_for(self.output_size_per_partition),
            group=self.tp_group,
            kernels=self.kernels,
        )
        return losses.view(hidden.shape[:2]).t()


def losses_of(
    *,
    hidden_states: Tensor,
    output_layer: OutputHead,
    labels: Tensor,
    context: int | None,
    **unused: Any,
) -> Tensor:
    """What GPTModel hands its last hidden states to (`output_processor`, with the tokens of a chunk
    as `output_processor_context`); `unused` is the rest of what it offers such a function."""
    losses: Tensor = output_layer(hidden_states, labels=labels, chunk_tokens=context)
    return losses
