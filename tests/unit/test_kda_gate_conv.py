"""Gate, norm, convolution and the choice of a backend."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from megatron_ext.config.schema import Gate, KdaBackend
from megatron_ext.errors import ConfigError
from megatron_ext.ops.kda import kda, log_decay, normalise, resolve_backend, short_conv
from tests.support.kda_inputs import Case, make, run

CPU = torch.device("cpu")


def test_gates_equal_their_formulas() -> None:
    z, a, dt = torch.randn(2, 5, 3, 4).double(), torch.randn(3).double(), torch.randn(3, 4).double()
    slope = a.exp()[None, None, :, None]
    want = {
        Gate.bounded: -5 / (1 + torch.exp(-slope * (z + dt))),
        Gate.bounded_plain: -5 / (1 + torch.exp(-(z + dt))),
        Gate.softplus: -slope * torch.log1p(torch.exp(z + dt)),
    }
    for gate, exact in want.items():
        slope_log = None if gate is Gate.bounded_plain else a
        found = log_decay(z, slope_log, dt, gate=gate, lower_bound=-5.0)
        torch.testing.assert_close(found, exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bounded_gate_never_leaves_its_bound(dtype: torch.dtype) -> None:
    z = torch.linspace(-1e4, 1e4, 20001).to(dtype).view(1, -1, 1, 1)
    g = log_decay(z, torch.full((1,), 3.0), torch.zeros(1, 1), gate=Gate.bounded, lower_bound=-5.0)
    assert g.dtype == torch.float32
    assert g.min() == -5.0
    assert g.max() <= 0.0


def test_slope_and_gate_must_fit() -> None:
    z, dt = torch.zeros(1, 1, 1, 1), torch.zeros(1, 1)
    with pytest.raises(ValueError, match="A_log: None"):
        log_decay(z, None, dt, gate=Gate.bounded, lower_bound=-5.0)
    with pytest.raises(ValueError, match="pass None"):
        log_decay(z, torch.zeros(1), dt, gate=Gate.bounded_plain, lower_bound=-5.0)


def test_norm_of_zero_is_zero_with_a_finite_gradient() -> None:
    x = torch.zeros(2, 3, requires_grad=True)
    y = normalise(x)
    y.sum().backward()
    assert torch.equal(y, torch.zeros(2, 3))
    # 1 / sqrt(1e-6): the epsilon is inside the root.
    torch.testing.assert_close(x.grad, torch.full((2, 3), 1e3))


OFFSETS = [None, (0, 20), (0, 1, 2, 5, 5, 17, 20), tuple(range(21))]


@pytest.mark.parametrize("taps", [1, 2, 4, 5])
@pytest.mark.parametrize("offsets", OFFSETS)
@pytest.mark.parametrize("with_state", [False, True])
def test_convolution_equals_its_formula(
    taps: int, offsets: tuple[int, ...] | None, with_state: bool
) -> None:
    batch = 2 if offsets is None else 1
    documents = batch if offsets is None else len(offsets) - 1
    cu = None if offsets is None else torch.tensor(offsets, dtype=torch.int32)
    results = []
    for backend in (KdaBackend.reference, KdaBackend.dense):
        generator = torch.Generator().manual_seed(0)
        leaves = [
            torch.randn(*s, generator=generator, dtype=torch.float64).requires_grad_()
            for s in ((batch, 20, 6), (6, taps), (documents, 6, taps - 1))
        ]
        x, weight, state = leaves
        y, final = short_conv(
            x,
            weight,
            cu_seqlens=cu,
            backend=backend,
            initial_state=state if with_state else None,
            output_final_state=True,
        )
        loss = (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum() + final.square().sum()
        grads = torch.autograd.grad(loss, leaves, allow_unused=True)
        results.append([y, final, *(g for g in grads if g is not None)])
    for a, b in zip(*results, strict=True):
        # Sums of at most 20 terms in float64.
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_convolution_without_documents_equals_torch() -> None:
    x, weight = torch.randn(2, 50, 6).double(), torch.randn(6, 4).double()
    y, _ = short_conv(x, weight)
    plain = F.conv1d(F.pad(x.transpose(1, 2), (3, 0)), weight[:, None], groups=6).transpose(1, 2)
    torch.testing.assert_close(y, F.silu(plain), rtol=1e-12, atol=1e-12)


def test_convolution_gradcheck_and_carried_state() -> None:
    x, weight = torch.randn(1, 9, 2).double(), torch.randn(2, 4).double()
    leaves = (x.requires_grad_(), weight.requires_grad_())
    cu = torch.tensor([0, 4, 9])
    assert torch.autograd.gradcheck(lambda a, b: short_conv(a, b, cu_seqlens=cu)[0], leaves)
    whole, end = short_conv(x, weight, output_final_state=True)
    state, pieces = None, []
    for start, stop in itertools.pairwise((0, 1, 3, 9)):
        piece, state = short_conv(
            x[:, start:stop], weight, initial_state=state, output_final_state=True
        )
        pieces.append(piece)
    torch.testing.assert_close(torch.cat(pieces, 1), whole)
    torch.testing.assert_close(state, end)


def test_convolution_with_offsets_refuses_a_batch() -> None:
    with pytest.raises(ValueError, match="flatten"):
        short_conv(torch.zeros(2, 4, 1), torch.zeros(1, 4), cu_seqlens=torch.tensor([0, 4]))


@pytest.mark.parametrize("gate", list(Gate))
def test_backend_on_a_cpu_is_dense_unless_the_reference_is_asked_for(gate: Gate) -> None:
    shape = {"head_dim": 128, "value_dim": 128, "gate": gate, "lower_bound": -5.0}
    for backend in (KdaBackend.auto, KdaBackend.dense, KdaBackend.fla):
        assert resolve_backend(backend, CPU, torch.bfloat16, **shape) is KdaBackend.dense
    found = resolve_backend(KdaBackend.reference, CPU, torch.bfloat16, **shape)
    assert found is KdaBackend.reference


def test_require_makes_a_fallback_an_error() -> None:
    x = {n: t.float() for n, t in make(Case(4)).items()}
    inputs = [x[n] for n in ("q", "k", "v", "z", "beta", "A_log", "dt_bias")]
    options = {"gate": Gate.bounded, "lower_bound": -5.0, "require": True}
    with pytest.raises(ConfigError, match="use dense"):
        kda(*inputs, backend=KdaBackend.fla, **options)
    kda(*inputs, backend=KdaBackend.auto, **options)  # dense is what auto means on a CPU


def test_wrong_shapes_are_named() -> None:
    x = make(Case(4))
    x["v"] = x["v"][:, :3]
    x["dt_bias"] = x["dt_bias"].flatten()
    with pytest.raises(ValueError, match=r"v: given .*dt_bias: given"):
        run(Case(4), x, backend=KdaBackend.dense, dtype=torch.float32)


def test_using_kda_on_a_cpu_does_not_import_fla_or_triton_kernels() -> None:
    code = (
        "import sys, torch; from megatron_ext.ops import kda;"
        "kda.short_conv(torch.zeros(1, 4, 2), torch.zeros(2, 4));"
        "print([m for m in sys.modules if m.split('.')[0] in ('fla', 'megatron')])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert out.stdout.strip() == "[]"
