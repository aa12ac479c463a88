"""The experts' feed-forward: the loop against the formula, and groups without rows."""

from __future__ import annotations

import pytest
import torch

from megatron_ext.config.schema import ExpertBackend
from megatron_ext.errors import ConfigError
from megatron_ext.ops.grouped_mlp import (
    engine,
    grouped_mlp,
    grouped_mlp_reference,
    resolve_backend,
)

BOUNDS = {"beta": 4.0, "linear_beta": 25.0}


def inputs(counts: list[int], *, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    rows, experts, latent, width = sum(counts), len(counts), 5, 7
    x = torch.randn(rows, latent, dtype=dtype, requires_grad=True)
    scale = torch.rand(rows, dtype=torch.promote_types(dtype, torch.float32), requires_grad=True)
    fc1 = torch.randn(experts, 2, width, latent, dtype=dtype, requires_grad=True)
    fc2 = torch.randn(experts, latent, width, dtype=dtype, requires_grad=True)
    return x, torch.tensor(counts), scale, fc1, fc2


def test_the_loop_is_the_formula_forward_and_backward() -> None:
    leaves = inputs([3, 0, 4, 1])
    ours = grouped_mlp(*leaves, **BOUNDS, backend=ExpertBackend.loop)
    truth = grouped_mlp_reference(*leaves, **BOUNDS)
    torch.testing.assert_close(ours, truth, rtol=1e-12, atol=1e-12)  # order of sums in float64
    direction = torch.randn_like(truth)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    for got, expected in zip(
        torch.autograd.grad(ours, wanted, direction),
        torch.autograd.grad(truth, wanted, direction),
        strict=True,
    ):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("counts", [[0, 2, 0], [0, 0, 0]])
def test_experts_without_rows_get_zero_gradients(counts: list[int]) -> None:
    # What the allocator hands out next was full of NaN: an unset gradient would show.
    for _ in range(8):
        torch.full((3, 2, 7, 5), float("nan"))
    x, sizes, scale, fc1, fc2 = inputs(counts, dtype=torch.float32)
    grouped_mlp(x, sizes, scale, fc1, fc2, **BOUNDS).sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape
    for weight in (fc1, fc2):
        assert weight.grad is not None
        for expert, count in enumerate(counts):
            assert bool(weight.grad[expert].any()) == bool(count)


def test_the_weight_of_a_row_may_stand_before_or_after_the_second_map() -> None:
    x, counts, scale, fc1, fc2 = inputs([2, 3])
    before = grouped_mlp(x, counts, scale, fc1, fc2, **BOUNDS)
    after = grouped_mlp(x, counts, torch.ones_like(scale), fc1, fc2, **BOUNDS) * scale[:, None]
    torch.testing.assert_close(before, after, rtol=1e-12, atol=1e-12)


def test_a_backend_that_cannot_run_is_an_error_if_required() -> None:
    cpu = {"device": torch.device("cpu"), "dtype": torch.float32, "widths": (8, 8)}
    assert resolve_backend(ExpertBackend.auto, **cpu) is ExpertBackend.loop
    assert resolve_backend(ExpertBackend.auto, **cpu, require=True) is ExpertBackend.loop
    with pytest.raises(ConfigError, match=r"model\.experts\.backend=grouped_mm.*CUDA"):
        resolve_backend(ExpertBackend.grouped_mm, **cpu, require=True)


def grouped_gemm(a, b, out, *, quantization_params, out_dtype, layout, m_splits, **options):
    """What Transformer Engine's function of that name does, on any device: op(B) op(A), row-major.

    It leaves what belongs to groups without rows as it was.
    """
    assert len(a) == len(b) == len(m_splits) == len(quantization_params)
    assert all(matrix.is_contiguous() for matrix in (*a, *b, *out))
    targets = out[0].split(m_splits) if options.get("single_output") else out
    for left, right, target in zip(b, a, targets, strict=True):
        if left.numel() and right.numel():
            left, right = (
                left.T if layout[1] == "T" else left,
                right.T if layout[0] == "T" else right,
            )
            target.copy_(left @ right)


@pytest.mark.parametrize("counts", [[3, 0, 4, 1], [0, 0, 0, 2]])
def test_the_calls_of_transformer_engine_are_the_formula(counts, monkeypatch) -> None:
    monkeypatch.setattr(engine, "misfit", lambda *_: None)
    monkeypatch.setattr(engine, "grouped_gemm", lambda: grouped_gemm)
    leaves = inputs(counts)
    for _ in range(8):
        torch.full((4, 2, 7, 5), float("nan"), dtype=torch.float64)
    ours = grouped_mlp(*leaves, **BOUNDS, backend=ExpertBackend.transformer_engine)
    truth = grouped_mlp_reference(*leaves, **BOUNDS)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    direction = torch.randn_like(truth).t().contiguous().t()  # with strides that it does not take
    torch.testing.assert_close(ours, truth, rtol=1e-12, atol=1e-12)  # order of sums in float64
    for got, expected in zip(
        torch.autograd.grad(ours, wanted, direction),
        torch.autograd.grad(truth, wanted, direction),
        strict=True,
    ):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


def test_transformer_engine_is_never_replaced(monkeypatch) -> None:
    options = {"dtype": torch.bfloat16, "widths": (8, 8)}
    asked = ExpertBackend.transformer_engine
    with pytest.raises(ConfigError, match="Transformer Engine is not installed"):
        resolve_backend(asked, torch.device("cuda"), **options)
    # A plan needs neither it nor a GPU.
    assert resolve_backend(asked, torch.device("meta"), **options) is ExpertBackend.grouped_mm
    monkeypatch.setattr(engine.importlib.util, "find_spec", lambda _: True)
    with pytest.raises(ConfigError, match="needs a CUDA device, the tensors are on cpu"):
        resolve_backend(asked, torch.device("cpu"), **options)

    def older(a, b, out, out_dtype, workspaces, layout="TN", m_splits=None): ...

    monkeypatch.setattr(engine, "grouped_gemm", lambda: older)
    with pytest.raises(ConfigError, match="has no grad, quantization_params, single_output"):
        resolve_backend(asked, torch.device("cuda"), **options)


def test_shapes_that_do_not_fit_are_refused() -> None:
    x, counts, scale, fc1, fc2 = inputs([2, 3])
    with pytest.raises(ValueError, match="counts"):
        grouped_mlp(x, counts[:1], scale, fc1, fc2, **BOUNDS)
    with pytest.raises(ValueError, match="fc2"):
        grouped_mlp(x, counts, scale, fc1, fc2[:1], **BOUNDS)
