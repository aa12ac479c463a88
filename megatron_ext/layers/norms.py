"""RMS norms. The arithmetic is in float32, or in the input's type if that is wider."""

from __future__ import annotations

from megatron.core import tensor_parallel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_ext.config.schema import KernelOptions
from megatron_ext.errors import ConfigError
from megatron_ext.layers.initializers import Constant, parameter
from megatron_ext.ops.gating import head_gate
from megatron_ext.ops.rms_norm import rms_norm, rms_norm_residual


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight, over the last axis.

    Fits every norm slot of megatron-core (`LayerNormBuilder`), which its own torch norm does not:
    that one refuses sequence parallelism. The weight is replicated and used on the shard of the
    sequence, hence `sequence_parallel`; it is not decayed.

    Args:
        kernels: backend; None takes the defaults.
    """

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-5,
        *,
        kernels: KernelOptions | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.kernels = kernels
        self.weight = parameter(
            hidden_size,
            dtype=config.params_dtype,
            initializer=Constant(1.0),
            weight_decay=False,
            sequence_parallel=config.sequence_parallel,
        )

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden] to the same shape and dtype."""
        return rms_norm(x, self.weight, eps=self.eps, kernels=self.kernels)


class ResidualRMSNorm(RMSNorm):
    """`RMSNorm` for the slots before attention and feed-forward of a plain pre-norm layer.

    It also gives its input, which megatron-core takes for the residual: the gradients of both then
    meet in one backward kernel.

    Raises:
        ConfigError: `config.recompute_modules` has "layernorm", which frees all that a norm gives,
            hence the residual.
    """

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-5,
        *,
        kernels: KernelOptions | None = None,
    ) -> None:
        if config.recompute_granularity == "selective" and "layernorm" in (
            config.recompute_modules or ()
        ):
            raise ConfigError(
                f"recompute_modules={config.recompute_modules}: layernorm would free the residual "
                "that ResidualRMSNorm gives (allowed all others; or RMSNorm in its place)"
            )
        super().__init__(config, hidden_size, eps, kernels=kernels)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]  # as megatron-core takes it
        """x [..., hidden] to its norm and itself, both of its shape and dtype."""
        return rms_norm_residual(x, self.weight, eps=self.eps, kernels=self.kernels)


class GatedHeadNorm(nn.Module):
    """y = RMSNorm_D(o) * sigmoid(gate), the norm per head, its weight [D] shared by all heads.

    The output of linear attention in Kimi K3 (sigmoid, not SiLU). The weight is replicated but sees
    local heads only, so each rank has a part of its gradient: passing it through the
    tensor-parallel region sums them, with and without sequence parallelism, unlike the
    `sequence_parallel` mark.
    """

    def __init__(
        self,
        config: TransformerConfig,
        head_dim: int,
        *,
        eps: float,
        tp_group: ProcessGroup,
        kernels: KernelOptions | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.kernels = kernels
        self.tp_group = tp_group
        self.weight = parameter(
            head_dim, dtype=config.params_dtype, initializer=Constant(1.0), weight_decay=False
        )

    def entered(self) -> Tensor:
        """The weight [D], for use by local heads: the backward pass sums over their ranks."""
        return tensor_parallel.copy_to_tensor_model_parallel_region(
            self.weight, group=self.tp_group
        )

    def forward(self, o: Tensor, gate: Tensor, *, weight: Tensor | None = None) -> Tensor:
        """o [b, s, H, D] and gate [s, b, H*D] to [s, b, H*D] in o's dtype: see `ops.gating`.

        `weight`: what `entered` gave, for several calls with one sum.
        """
        weight = self.entered() if weight is None else weight
        return head_gate(o, gate, weight=weight, eps=self.eps, kernels=self.kernels)
