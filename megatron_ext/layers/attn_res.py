"""Attention residuals as megatron-core layers: sublayers read a softmax over what came before them.

Shapes: s sequence of this rank, b batch, h hidden. A *source* is [s, b, h]: the embedding, the sum
of a finished block, and last the sum that runs. The procedure of a layer (Kimi K3 report, 2.2):

    x = norm(mix(sources));  a = attention(x)
    the first layer of a block starts a new sum with a, the others add it to the running one
    x = norm(mix(sources));  the running sum += feed_forward(x)

and after the last layer mix(sources) once more. The first layer has one source and no mix.

Between the layers of a chunk megatron-core's block hands on `hidden_states`, here the last source,
and `context`, here the tuple of those before. So every source is stored once, however many read
it. A chunk ends with one more element of the block's list: `ChunkEnd` joins the sources to the
message for the next stage (`parallel.pipeline`), `OutputMix` mixes them for the final norm. Full
recomputation is done here, layer by layer, since megatron-core's stores one tensor a layer only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
)
from torch import Tensor, nn

from megatron_ext.config.schema import ResidualOptions
from megatron_ext.layers.initializers import Constant, Initializer, Normal, parameter
from megatron_ext.layers.linears import ShardedModule, tensor_group
from megatron_ext.layers.norms import RMSNorm
from megatron_ext.ops.attn_res import depth_mix
from megatron_ext.ops.attn_res.gradients import with_gradient_sum
from megatron_ext.ops.attn_res.health import DepthHealth
from megatron_ext.parallel.pipeline import Boundary

Sources = tuple[Tensor, ...]


def pseudo_query(config: TransformerConfig, *, std: float) -> nn.Parameter:
    """The learned query [h] of one mix. At zero every source has the same weight."""
    return _vector(config, Normal(std) if std else Constant(0.0))


def key_norm_weight(config: TransformerConfig) -> nn.Parameter:
    """The weight [h] of the norm that makes keys of sources."""
    return _vector(config, Constant(1.0))


def _vector(config: TransformerConfig, initializer: Initializer) -> nn.Parameter:
    # Differences between scores are small: these stay float32 in a 16-bit model.
    return parameter(
        config.hidden_size,
        dtype=torch.promote_types(config.params_dtype, torch.float32),
        initializer=initializer,
        weight_decay=False,
        sequence_parallel=config.sequence_parallel,
    )


class FirstNorm(RMSNorm):
    """The pre-norm of the very first sublayer, which has nothing but the embedding to read."""

    def forward(  # type: ignore[override]  # what megatron-core takes from a norm, too
        self, sources: Sources
    ) -> tuple[Tensor, Tensor]:
        """See `MixNorm.forward`; exactly one source."""
        (x,) = sources
        return super().forward(x).to(self.weight.dtype), x


class MixNorm(RMSNorm):
    """A sublayer's pre-norm, over the mix of its sources. Fits megatron-core's norm slots.

    Args:
        options: kernel of the mix, and its initial query.

    Attributes:
        health: gets the statistics of the forward passes of training while it is set.
    """

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-5,
        *,
        options: ResidualOptions,
    ) -> None:
        super().__init__(config, hidden_size, eps)
        self.options = options
        self.health: DepthHealth | None = None
        self.query = pseudo_query(config, std=options.query_std)
        self.key_weight = key_norm_weight(config)

    def forward(  # type: ignore[override]  # what megatron-core takes from a norm, too
        self, sources: Sources
    ) -> tuple[Tensor, Tensor]:
        """norm(mix(sources)) in the model's dtype, and the running sum as the residual; both
        [s, b, h]. megatron-core takes such a pair from a norm."""
        measure(self, sources, eps=self.eps)
        normed = depth_mix(
            sources,
            self.query,
            self.key_weight,
            eps=self.eps,
            norm_weight=self.weight,
            backend=self.options.backend,
            require=self.options.require,
        )
        return normed.to(self.weight.dtype), sources[-1]


def measure(mix: MixNorm | OutputMix, sources: Sources, *, eps: float) -> None:
    """Add what a mix reads to its statistics, if it is measured: in training, and once a token."""
    # Gradients are off in the first of the two passes of a layer that is recomputed.
    if mix.health is not None and mix.training and torch.is_grad_enabled():
        mix.health.add(sources, mix.query, mix.key_weight, eps=eps)


def start_sum(training: bool, fused: bool) -> Callable[..., Tensor]:
    """In the place of megatron-core's bias-dropout-add where a new sum starts: adds no residual."""

    def apply(output: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
        x, bias = output
        x = x if bias is None else x + bias
        return F.dropout(x, p=dropout, training=training).to(residual.dtype)

    return apply


class AttentionResidualLayer(TransformerLayer):
    """A layer of megatron-core between several sources; its sublayers are what the spec says.

    Args:
        submodules: `input_layernorm` and `pre_mlp_layernorm` are `MixNorm` (the first layer of the
            model: `FirstNorm`); the bias-dropout-add of a sublayer that opens a source is
            `start_sum`.
        opens: whether attention and feed-forward open a source (`config.residual.opens_source`).
        boundary: of the chunk that the layer is in.
        recompute: whether the backward pass computes the whole layer again from its sources.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: TransformerLayerSubmodules,
        *,
        opens: tuple[bool, bool],
        boundary: Boundary,
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
        self.opens = opens
        self.boundary = boundary
        self.recompute = recompute
        self.current_microbatch = 0  # megatron-core's schedules count it

    def forward(
        self, hidden_states: Tensor, *, context: Sources | None = None, **rest: Any
    ) -> tuple[Tensor, Sources]:
        """The last source and those before, after this layer.

        Args:
            hidden_states: the last source [s, b, h]; in the first layer of a chunk its message.
            context: the sources before; None in the first layer of a chunk.
            rest: what megatron-core gives its own layer.
        """
        sources = _sources(
            hidden_states, context, boundary=self.boundary, micro_batch=self.current_microbatch
        )
        run = partial(self._run, rest)
        again = self.recompute and self.training
        if self.opens[0] and not again:
            # The running sum is finished: all mixes from here on read it.
            sources = (*sources[:-1], with_gradient_sum(sources[-1]))
        new = tensor_parallel.checkpoint(run, False, *sources) if again else run(*sources)
        kept = sources if self.opens[0] else sources[:-1]
        sources = (*kept, *new)
        return sources[-1], sources[:-1]

    def _run(self, rest: dict[str, Any], *sources: Tensor) -> Sources:
        """The sources that this layer adds or changes; the running sum of before is not among them
        when a new one starts."""
        attended, _ = self._forward_attention(sources, **rest)
        kept = sources if self.opens[0] else sources[:-1]
        out = self._forward_mlp(
            (*kept, attended),
            rest.get("inference_context"),
            padding_mask=rest.get("padding_mask"),
            packed_seq_params=rest.get("packed_seq_params"),
        )
        return (attended, out) if self.opens[1] else (out,)


class ChunkEnd(MegatronModule):
    """The last element of a chunk that is not the model's last: sources to the message onward."""

    def __init__(
        self,
        config: TransformerConfig,
        *,
        boundary: Boundary,
        layer_number: int = 1,
        pg_collection: ProcessGroupCollection | None = None,
        vp_stage: int | None = None,
    ) -> None:
        super().__init__(config)
        # In the place of the layer that would follow; there are no parameters to be named by it.
        self.layer_number = layer_number
        self.boundary = boundary
        self.current_microbatch = 0

    def forward(
        self, hidden_states: Tensor, *, context: Sources | None = None, **unused: Any
    ) -> tuple[Tensor, None]:
        """The message [slots * s, b, h]; arguments as of `AttentionResidualLayer`."""
        number = self.current_microbatch
        sources = _sources(hidden_states, context, boundary=self.boundary, micro_batch=number)
        return self.boundary.leave(sources, micro_batch=number), None


class OutputMix(ShardedModule):
    """The last element of the model's last chunk: one more mix, for the final norm and the head.

    Its parameters are named as those of layer `num_layers` (counted from 0), in every layout.

    Args:
        options: kernel of the mix, and its initial query.
        boundary: of its chunk, which may hold no layer.

    Attributes:
        health: as of `MixNorm`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        options: ResidualOptions,
        boundary: Boundary,
        layer_number: int = 1,
        pg_collection: ProcessGroupCollection | None = None,
        vp_stage: int | None = None,
    ) -> None:
        super().__init__(config, tp_group=tensor_group(pg_collection))
        self.layer_number = config.num_layers + 1
        self.options = options
        self.boundary = boundary
        self.health: DepthHealth | None = None
        self.current_microbatch = 0
        self.query = pseudo_query(config, std=options.query_std)
        self.key_weight = key_norm_weight(config)

    def forward(
        self, hidden_states: Tensor, *, context: Sources | None = None, **unused: Any
    ) -> tuple[Tensor, None]:
        """mix(sources) [s, b, h] in the model's dtype; arguments as of `AttentionResidualLayer`."""
        sources = _sources(
            hidden_states, context, boundary=self.boundary, micro_batch=self.current_microbatch
        )
        measure(self, sources, eps=self.config.layernorm_epsilon)
        mixed = depth_mix(
            sources,
            self.query,
            self.key_weight,
            eps=self.config.layernorm_epsilon,
            backend=self.options.backend,
            require=self.options.require,
        )
        return mixed.to(self.config.params_dtype), None


def _sources(
    hidden_states: Tensor, context: Sources | None, *, boundary: Boundary, micro_batch: int
) -> Sources:
    if context is None:
        return boundary.enter(hidden_states, micro_batch=micro_batch)
    return (*context, hidden_states)
