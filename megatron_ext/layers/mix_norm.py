"""The pre-norms that read several sources: the mix over depth and the norm after it.

Shapes: s sequence of this rank, b batch, h hidden. A *source* is [s, b, h]; see `layers.attn_res`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_ext.config.schema import ResidualOptions
from megatron_ext.layers.initializers import Constant, Initializer, Normal, parameter
from megatron_ext.layers.norms import RMSNorm
from megatron_ext.ops.attn_res import depth_mix
from megatron_ext.ops.attn_res.health import DepthHealth
from megatron_ext.ops.attn_res.two_phase import BankMix, first_phase, pays, second_phase

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


@dataclass
class Reading:
    """What a pre-norm reads; lives for one pass through a layer.

    Attributes:
        sources: what is mixed.
        then: the layer's next mix, which reads the first `kept` sources too, and one source more.
        next_bank: set by the mix that reads: those sources mixed for `then`, in the same pass over
            them; stays None where that does not pay.
        bank: for the next mix, such a `next_bank`: of all its sources but the last.
    """

    sources: Sources
    then: MixNorm | None = None
    kept: int = 0
    next_bank: BankMix | None = None
    bank: BankMix | None = None


class FirstNorm(RMSNorm):
    """The pre-norm of the very first sublayer, which has nothing but the embedding to read."""

    def forward(  # type: ignore[override]  # what megatron-core takes from a norm, too
        self, reading: Reading
    ) -> tuple[Tensor, Tensor]:
        """See `MixNorm.forward`; exactly one source."""
        (x,) = reading.sources
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
        self, reading: Reading
    ) -> tuple[Tensor, Tensor]:
        """norm(mix(sources)) in the model's dtype, and the running sum as the residual; both
        [s, b, h]. megatron-core takes such a pair from a norm."""
        measure(self, reading.sources, eps=self.eps)
        return self._mixed(reading).to(self.weight.dtype), reading.sources[-1]

    def _mixed(self, reading: Reading) -> Tensor:
        sources, then, backend = reading.sources, reading.then, self.options.backend
        if reading.bank is not None:
            return second_phase(
                reading.bank,
                sources[-1],
                self.query,
                self.key_weight,
                eps=self.eps,
                norm_weight=self.weight,
                backend=backend,
            )
        if then is not None and pays(sources, bank_sources=reading.kept, backend=backend):
            mixed, reading.next_bank = first_phase(
                sources,
                self.query,
                self.key_weight,
                bank_query=then.query,
                bank_key_weight=then.key_weight,
                bank_sources=reading.kept,
                eps=self.eps,
                norm_weight=self.weight,
                backend=backend,
            )
            return mixed
        return depth_mix(
            sources,
            self.query,
            self.key_weight,
            eps=self.eps,
            norm_weight=self.weight,
            backend=backend,
            require=self.options.require,
        )


class Mix(Protocol):
    """A mix that may be measured."""

    health: DepthHealth | None
    query: nn.Parameter
    key_weight: nn.Parameter
    training: bool


def measure(mix: Mix, sources: Sources, *, eps: float) -> None:
    """Add what a mix reads to its statistics, if it is measured: in training, and once a token."""
    # Gradients are off in the first of the two passes of a layer that is recomputed.
    if mix.health is not None and mix.training and torch.is_grad_enabled():
        mix.health.add(sources, mix.query, mix.key_weight, eps=eps)
