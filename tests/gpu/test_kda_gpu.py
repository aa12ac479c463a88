"""fla, our own backend and the dense path on a GPU against the float64 recurrence on the CPU."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_ext.config.schema import Gate, KdaBackend
from megatron_ext.ops.kda import kda, resolve_backend, short_conv
from megatron_ext.ops.situ import situ_glu, situ_glu_reference
from tests.support.kda_inputs import Case, errors, make, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
needs_fla = pytest.mark.skipif(
    importlib.util.find_spec("fla") is None, reason="needs the package fla-core"
)
# bfloat16 operands (8 bits) through two chained products: measured 2e-3 to 5e-3 by all kernels.
BFLOAT16 = 1e-2
# As on the CPU; float32 products on a GPU are exact float32 unless TF32 is switched on.
FLOAT32 = 1e-5

CASES = [
    Case(200, batch=2, heads=2, key_dim=64, value_dim=64),
    Case(200, heads=2, key_dim=64, value_dim=64, offsets=(0, 1, 64, 130, 131, 200)),
    Case(130, heads=2, key_dim=64, value_dim=64, gate_shift=30.0),
    Case(130, heads=2, key_dim=64, value_dim=64, gate=Gate.bounded_plain),
    Case(130, heads=2, key_dim=64, value_dim=64, gate=Gate.softplus),
]


@pytest.mark.parametrize("case", CASES)
def test_dense_equals_the_recurrence(case: Case) -> None:
    inputs = {n: x.float().double() for n, x in make(case).items()}
    want = run(case, inputs, backend=KdaBackend.reference, dtype=torch.float64)
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        got = run(case, inputs, backend=KdaBackend.dense, dtype=torch.float32, device="cuda")
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
    got = {n: x.cpu() for n, x in got.items()}
    assert max(errors(got, want).values()) < FLOAT32


def wide(case: Case) -> Case:
    """In the one width of our own kernels."""
    return replace(case, heads=1, key_dim=128, value_dim=128)


HALF = ("q", "k", "v", "z", "beta")


def on_gpu(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Leaves there, in bfloat16 what a model has in it."""
    return {
        n: x.to("cuda", torch.bfloat16 if n in HALF else torch.float32).requires_grad_()
        for n, x in inputs.items()
    }


def forward(
    case: Case, leaves: dict[str, torch.Tensor], **options: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Output and last state."""
    return kda(
        *(leaves[n] for n in HALF),
        leaves.get("A_log"),
        leaves["dt_bias"],
        gate=case.gate,
        lower_bound=-5.0,
        cu_seqlens=None if case.offsets is None else torch.tensor(case.offsets, device="cuda"),
        initial_state=leaves["initial_state"],
        output_final_state=True,
        **options,
    )


OWN = [
    *(wide(case) for case in CASES if case.gate is not Gate.softplus),
    wide(Case(130, gate_shift=-6.0, gate_spread=0.5)),
    wide(Case(130, gate_spread=8.0)),
    wide(Case(3)),
    wide(Case(4500, gate_shift=-6.0, gate_spread=0.5)),  # few heads: swept in segments
]


@needs_fla
@pytest.mark.parametrize(
    ("backend", "case"),
    [(KdaBackend.triton, case) for case in OWN] + [(KdaBackend.fla, case) for case in CASES],
)
def test_kernels_equal_the_recurrence(backend: KdaBackend, case: Case) -> None:
    inputs = {n: x.bfloat16().double() for n, x in make(case).items()}
    for name in ("A_log", "dt_bias", "initial_state"):
        if name in inputs:
            inputs[name] = make(case)[name].float().double()
    # Thousands of tokens are too many for the recurrence; in float64 `dense` is as exact.
    exact = (KdaBackend.reference, "cpu") if case.tokens < 1000 else (KdaBackend.dense, "cuda")
    want = run(case, inputs, backend=exact[0], dtype=torch.float64, device=exact[1])
    want = {n: x.cpu() for n, x in want.items()}
    leaves = on_gpu(inputs)
    o, final = forward(case, leaves, backend=backend, require=True)
    generator = torch.Generator().manual_seed(99)
    upstream = [
        torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) for x in (o, final)
    ]
    grads = torch.autograd.grad([o, final], list(leaves.values()), upstream)
    got = {"o": o, "final": final} | {f"d_{n}": g for n, g in zip(leaves, grads, strict=True)}
    found = errors({n: x.detach().cpu() for n, x in got.items()}, want)
    assert final.dtype == torch.float32
    assert all(math.isfinite(x) for x in found.values())
    assert max(found.values()) < BFLOAT16, found


@needs_fla
@pytest.mark.parametrize(
    ("backend", "case"),
    [(KdaBackend.triton, case) for case in OWN] + [(KdaBackend.fla, case) for case in CASES],
)
def test_what_is_kept_is_what_would_be_computed_again(backend: KdaBackend, case: Case) -> None:
    found, sizes = [], []
    for recompute in (True, False):
        leaves = on_gpu(make(case))
        kept: list[torch.Tensor] = []

        def keep(x: torch.Tensor, kept: list[torch.Tensor] = kept) -> torch.Tensor:
            kept.append(x)
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            o, final = forward(case, leaves, backend=backend, recompute=recompute)
        upstream = [torch.ones_like(o), torch.ones_like(final)]
        grads = torch.autograd.grad([o, final], list(leaves.values()), upstream)
        found.append(dict(zip(("o", "final", *leaves), (o, final, *grads), strict=True)))
        sizes.append(sum(x.nbytes for x in kept))
    # The same kernels on the same numbers; sums of few tokens may be added in another order.
    for name, x in found[0].items():
        assert (found[1][name] - x).norm() <= 1e-5 * x.norm(), name
    row = case.batch * case.tokens * leaves["v"].shape[2] * case.key_dim * 2
    assert sizes[1] - sizes[0] > (5 if backend is KdaBackend.triton else 7) * row


@needs_fla
def test_outputs_of_our_backend_do_not_depend_on_later_tokens_even_by_rounding() -> None:
    case = wide(Case(130, gate_spread=8.0))
    inputs = {n: x.to("cuda", torch.bfloat16) for n, x in make(case).items()}
    del inputs["initial_state"]
    found = []
    for later in (1.0, -3.0):
        for name in ("q", "k", "v", "z", "beta"):
            inputs[name] = inputs[name].clone()
            inputs[name][:, 77:] *= later
        o, _ = kda(*inputs.values(), gate=case.gate, lower_bound=-5.0, backend=KdaBackend.triton)
        found.append(o[:, :77])
    assert torch.equal(*found)


@needs_fla
def test_fla_convolution_equals_the_dense_one_and_carries_its_state() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(1, 50, 64, device="cuda"), torch.randn(64, 4, device="cuda")
    offsets = torch.tensor([0, 2, 20, 50], device="cuda")
    state = torch.randn(3, 64, 3, device="cuda")
    results = [
        short_conv(
            x,
            weight,
            cu_seqlens=offsets,
            backend=backend,
            initial_state=state,
            output_final_state=True,
        )
        for backend in (KdaBackend.dense, KdaBackend.fla)
    ]
    for a, b in zip(*results, strict=True):
        # Four products in float32, in another order.
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@needs_fla
def test_auto_is_our_backend_on_hopper_where_it_fits_and_else_fla() -> None:
    device = torch.device("cuda")
    hopper = torch.cuda.get_device_capability(device) == (9, 0)
    ours = KdaBackend.triton if hopper else KdaBackend.fla
    for gate in Gate:
        for dtype in (torch.bfloat16, torch.float32):
            for width in (64, 128):
                fits = gate is not Gate.softplus and dtype is torch.bfloat16 and width == 128
                found = resolve_backend(
                    KdaBackend.auto,
                    device,
                    dtype,
                    head_dim=width,
                    value_dim=width,
                    gate=gate,
                    lower_bound=-5.0,
                )
                assert found is (ours if fits else KdaBackend.fla)


@needs_fla
def test_float64_is_refused_by_fla() -> None:
    case = Case(8)
    with pytest.raises(ValueError, match="use dense"):
        run(case, make(case), backend=KdaBackend.fla, dtype=torch.float64, device="cuda")


def test_situ_in_bfloat16() -> None:
    gate, up = (torch.randn(4096, device="cuda").bfloat16() for _ in range(2))
    exact = situ_glu_reference(gate.double(), up.double(), beta=4.0, linear_beta=25.0)
    found = situ_glu(gate, up, beta=4.0, linear_beta=25.0).double()
    # One rounding of the result to 8 bits.
    torch.testing.assert_close(found, exact, rtol=2**-8, atol=1e-6)
