"""The RMS norm against its formula, in values and gradients, alone and with its input handed on."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.config.schema import KernelBackend, KernelOptions
from megatron_ext.errors import ConfigError
from megatron_ext.layers.attn_res import MixNorm
from megatron_ext.layers.norms import ResidualRMSNorm, RMSNorm
from megatron_ext.ops.rms_norm import rms_norm, rms_norm_reference, rms_norm_residual
from tests.support.one_rank import one_rank, small_config
from tests.support.small_model import build


def inputs(dtype: torch.dtype = torch.float64, device: str = "cpu") -> list[Tensor]:
    """x [5, 2, 24] and weight [24]."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(shape, generator=generator) for shape in ((5, 2, 24), (24,))]
    return [x.to(device, dtype).requires_grad_() for x in drawn]


def test_values_and_gradients_are_those_of_the_formula() -> None:
    x, weight = inputs()
    results = []
    for values in (rms_norm(x, weight, eps=1e-2), rms_norm_reference(x, weight, 1e-2)):
        results.append([values, *torch.autograd.grad(values.sin().sum(), [x, weight])])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_one_number_by_hand() -> None:
    x, weight = torch.tensor([3.0, 4.0]).double(), torch.tensor([2.0, 1.0]).double()
    # The root of the mean square of 3 and 4, and of 0.5 more, is sqrt(13).
    for backend in (KernelBackend.dense, KernelBackend.reference):
        found = rms_norm(x, weight, eps=0.5, kernels=KernelOptions(backend=backend))
        torch.testing.assert_close(found, torch.tensor([6.0, 4.0]).double() / 13**0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_cpu_it_is_what_torch_makes_bit_for_bit(dtype: torch.dtype) -> None:
    x, weight = inputs(dtype)
    normed, same = rms_norm_residual(x, weight, eps=1e-5)
    assert same is x
    assert torch.equal(normed, F.rms_norm(x, (24,), weight, 1e-5))


def test_what_is_handed_on_carries_its_gradient() -> None:
    x, weight = inputs()
    normed, same = rms_norm_residual(x, weight, eps=1e-2)
    found = torch.autograd.grad((same.cos() + normed.sin()).sum(), [x, weight])
    y = rms_norm_reference(x, weight, 1e-2)
    wanted = torch.autograd.grad((x.cos() + y.sin()).sum(), [x, weight])
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_a_plan_counts_the_input_once_and_four_bytes_a_row() -> None:
    x, weight = inputs(torch.bfloat16, device="meta")
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        normed, same = rms_norm_residual(x, weight, eps=1e-5)
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in kept}
    assert sum(storages.values()) == x.nbytes + weight.nbytes + 4 * 10
    assert same.untyped_storage()._cdata == x.untyped_storage()._cdata
    (normed + same).backward(torch.empty_like(x))
    assert x.grad is not None
    assert weight.grad is not None


def test_what_does_not_fit_is_an_error() -> None:
    x, weight = inputs()
    for given in ((x, weight[:3]), (x[0, 0, 0], weight)):
        with pytest.raises(ValueError, match="allowed"):
            rms_norm(*given, eps=1e-5)
    options = KernelOptions(backend=KernelBackend.triton, require=True)
    with pytest.raises(ConfigError, match="rms_norm"):
        rms_norm(x, weight, eps=1e-5, kernels=options)


@pytest.mark.parametrize("residual", ["standard", "shared", "block"])
def test_every_norm_of_a_model_has_the_backend_of_the_configuration(residual: str) -> None:
    with one_rank() as groups:
        words = (f"residual={residual}", "model.kernels.backend=reference")
        model, config = build(groups, *words)
    norms = [m for m in model.modules() if isinstance(m, RMSNorm) and not isinstance(m, MixNorm)]
    # Of queries and latents, of the experts, and the final one, at the least.
    assert len(norms) >= 4
    assert all(norm.kernels == config.model.kernels for norm in norms)
    pairs = [type(norm) for norm in norms if isinstance(norm, ResidualRMSNorm)]
    assert len(pairs) == (0 if residual == "block" else 2 * config.model.num_layers)


def test_recomputed_norms_would_free_the_residual_and_are_refused() -> None:
    config = small_config()
    config.recompute_granularity, config.recompute_modules = "selective", ["layernorm"]
    with one_rank(), pytest.raises(ConfigError, match="layernorm"):
        ResidualRMSNorm(config, 24)
