"""`residual=shared`: later layers of a block read the attention hidden states of earlier ones.

Shapes: s sequence, b batch, F heads x value width of this tensor-parallel rank. Within a block of
layers, with `a_l` [s, b, F] what the attention of layer l hands to its output projection:

    y_l = W_o ( a_l + sum over earlier layers j of the block  c_lj a_j )

The scalars c start at 0, which is the plain model. Nothing crosses blocks; stages are cut between
blocks (a rule of `config.validate_residual`), so nothing crosses stages either. Between the layers
of a chunk megatron-core's block hands on `context`, here the tuple of the block's a_j.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
)
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.layers.initializers import Constant, Normal, parameter
from megatron_ext.layers.linears import ShardedModule
from megatron_ext.ops.scaled_sum import scaled_sum

Heads = tuple[Tensor, ...]


class HeadShare(ShardedModule):
    """Stands in an attention between its heads and its output projection.

    The scalars [J] are float32 in every model, and not decayed. They are replicated but see local
    heads only, so each tensor-parallel rank has a part of their gradient: passing them through the
    tensor-parallel region sums the parts, with and without sequence parallelism.

    Args:
        earlier: J, layers of the block before this one.
        std: spread of the initial scalars.

    Attributes:
        heads: the a_j of those layers, set by the layer around its call of the attention.
        own: a_l, as that call leaves it.
    """

    def __init__(
        self, config: TransformerConfig, *, earlier: int, std: float, tp_group: ProcessGroup
    ) -> None:
        super().__init__(config, tp_group=tp_group)
        self.scale = None
        if earlier:
            self.scale = parameter(
                earlier,
                dtype=torch.promote_types(config.params_dtype, torch.float32),
                initializer=Normal(std) if std else Constant(0.0),
                weight_decay=False,
            )
        self.heads: Heads = ()
        self.own: Tensor | None = None

    def forward(self, own: Tensor) -> Tensor:
        """a_l [s, b, F] to what is projected, same shape and dtype."""
        self.own = own
        if self.scale is None:
            return own
        scale = tensor_parallel.copy_to_tensor_model_parallel_region(
            self.scale, group=self.tp_group
        )
        return scaled_sum(own, scale, self.heads)

    def take(self) -> Tensor:
        """a_l of the last call; forgets it and those of earlier layers.

        Raises:
            RuntimeError: the attention was not called.
        """
        own, self.own, self.heads = self.own, None, ()
        if own is None:
            raise RuntimeError("the attention of a sharing layer did not pass its heads on")
        return own


class SharingLayer(TransformerLayer):
    """A layer of megatron-core whose attention has a `share` (`HeadShare`).

    Args:
        earlier: layers of its block before it.
        last: no later layer of the block reads it.
        recompute: whether the backward pass computes the whole layer again. Done here, since
            megatron-core's own recomputation stores one tensor a layer only.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: TransformerLayerSubmodules,
        *,
        earlier: int,
        last: bool,
        recompute: bool = False,
        layer_number: int = 1,
        pg_collection: ProcessGroupCollection | None = None,
        vp_stage: int | None = None,
    ) -> None:
        super().__init__(
            config,
            submodules,
            layer_number=layer_number,
            pg_collection=pg_collection,
            vp_stage=vp_stage,
        )
        self.earlier = earlier
        self.last = last
        self.recompute = recompute

    def forward(
        self, hidden_states: Tensor, *, context: Heads | None = None, **rest: Any
    ) -> tuple[Tensor, Heads | None]:
        """The residual stream [s/tp, b, h] after this layer, and the block's heads so far.

        Args:
            context: the heads of the block's earlier layers; in its first layer of no meaning.
            rest: what megatron-core gives its own layer.
        """
        heads = context if self.earlier and context is not None else ()
        run = partial(self._run, rest)
        if self.recompute and self.training:
            out, *own = tensor_parallel.checkpoint(run, False, hidden_states, *heads)
        else:
            out, *own = run(hidden_states, *heads)
        return out, None if self.last else (*heads, *own)

    def _run(self, rest: dict[str, Any], hidden_states: Tensor, *heads: Tensor) -> Heads:
        """What comes after the layer; and its own heads, if a later layer reads them."""
        share: HeadShare = self.self_attention.share
        share.heads = heads
        out, _ = super().forward(hidden_states, **rest)
        own = share.take()
        return (out,) if self.last else (out, own)
