"""One process that is a whole world of megatron-core, for tests of modules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_ext.config.schema import Device, ParallelOptions, RunOptions
from megatron_ext.layers.initializers import Constant, Initializer, Normal
from megatron_ext.parallel import cpu_support, mesh, runtime


@contextmanager
def one_rank(device: Device = Device.cpu) -> Iterator[ProcessGroupCollection]:
    """Start a world of one process and yield its groups; everything is put back afterwards."""
    runtime.start(RunOptions(device=device))
    try:
        yield mesh.build_mesh(ParallelOptions())
    finally:
        runtime.stop()
        cpu_support.uninstall()


def small_config(**changes: object) -> TransformerConfig:
    """A configuration of a few small layers in float64, so that formulas are compared exactly."""
    values: dict = {
        "num_layers": 2,
        "hidden_size": 24,
        "num_attention_heads": 2,
        "normalization": "RMSNorm",
        "layernorm_epsilon": 1e-5,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "perform_initialization": False,
        "params_dtype": torch.float64,
        "bias_dropout_fusion": False,
        "gradient_accumulation_fusion": False,
    }
    return TransformerConfig(**(values | changes))


@torch.no_grad()
def draw(module: nn.Module, *, seed: int = 0, std: float = 0.2) -> None:
    """Fill a lone module: its own initializers where set, else a normal wide enough to matter.

    Norm weights (constant 1) and zero-initialised gates are moved off their special values.
    """
    torch.manual_seed(seed)
    for parameter in module.parameters():
        initializer: Initializer = getattr(parameter, "initializer", Normal(std))
        uniform = torch.rand(parameter.shape, device=parameter.device) * 1.999 - 0.9995
        value = initializer.from_symmetric(uniform)
        if isinstance(initializer, Constant):
            value = value + std * torch.randn_like(value)
        parameter.copy_(value)


def outputs_and_gradients(
    layer: nn.Module, x: Tensor, upstream: Tensor, **forward: object
) -> list[Tensor]:
    """The output of a megatron-core layer, and the gradients of its input and parameters."""
    x = x.detach().requires_grad_()
    out, _ = layer(x, **forward)
    return [out, *torch.autograd.grad(out, [x, *layer.parameters()], upstream.to(out.dtype))]


def assert_close_in_bfloat16(
    actual: Sequence[Tensor], wanted: Sequence[Tensor], *, tolerance: float = 2e-2
) -> None:
    """Relative L2 distance of each tensor.

    Args:
        tolerance: by default that of a chain of five to ten bfloat16 roundings of 2**-9 each, in
            quadrature, and some margin.
    """
    for got, want in zip(actual, wanted, strict=True):
        # A number a head (A_log) sums terms of both signs over all tokens: 2.3e-2 was seen.
        allowed = max(5e-2, tolerance) if want.numel() < 16 else tolerance
        assert (got.double() - want.double()).norm() <= allowed * want.double().norm()
