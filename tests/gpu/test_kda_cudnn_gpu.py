"""cuDNN's kernels of KDA on a Hopper GPU against the float64 recurrence, and the start-up check."""

from __future__ import annotations

import math
import re
import time

import pytest
import torch
from torch import Tensor

from megatron_ext.config.schema import Gate, KdaBackend
from megatron_ext.errors import ConfigError
from megatron_ext.ops.kda import cudnn, fla, kda
from megatron_ext.ops.kda.check import Problem, bound, errors, rejection
from tests.support.kda_inputs import Case, make, run
from tests.support.kda_inputs import errors as relative

DEVICE = torch.device("cuda")
REASONS = (
    cudnn.misfits(DEVICE, head_dim=128, gate=Gate.bounded)
    if torch.cuda.is_available()
    else ["needs a CUDA GPU"]
)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(REASONS), reason="; ".join(REASONS) or "never"),
]
ALLOWED = bound(KdaBackend.cudnn, torch.bfloat16, tf32=False)
# Every way of the kernels: whole chunks and a cut one, rows of a batch, packed documents (one is
# empty, three are added to make eight), a slow decay whose state lasts, the bound, eight heads.
CASES = {
    "whole chunks": Case(256, heads=2),
    "a cut chunk": Case(200, heads=3),
    "less than a chunk": Case(9, heads=2),
    "rows": Case(200, batch=3, heads=2),
    "documents": Case(200, heads=2, offsets=(0, 1, 64, 130, 130, 200)),
    "slow decay": Case(300, heads=2, gate_shift=-6.0, gate_spread=0.5),
    "slow documents": Case(300, heads=2, offsets=(0, 129, 300), gate_shift=-6.0),
    "at the bound": Case(130, heads=2, gate_shift=30.0),
    "no slope": Case(130, heads=2, gate=Gate.bounded_plain),
    "eight heads": Case(256, heads=8),
}


def in_bfloat16(case: Case) -> dict[str, Tensor]:
    """Inputs as the backend takes them, in float64."""
    halves = ("q", "k", "v", "z", "beta")
    return {n: (x.bfloat16() if n in halves else x.float()).double() for n, x in make(case).items()}


def outcome(case: Case, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """As `kda_inputs.run`, by cuDNN's kernels, on the CPU."""
    halves = ("q", "k", "v", "z", "beta")
    leaves = {
        n: x.to(DEVICE, torch.bfloat16 if n in halves else torch.float32).requires_grad_()
        for n, x in inputs.items()
    }
    offsets = None if case.offsets is None else torch.tensor(case.offsets, device=DEVICE)
    o, final = kda(
        *(leaves[n] for n in halves),
        leaves.get("A_log"),
        leaves["dt_bias"],
        gate=case.gate,
        lower_bound=-5.0,
        cu_seqlens=offsets,
        initial_state=leaves["initial_state"],
        output_final_state=True,
        backend=KdaBackend.cudnn,
    )
    assert final is not None
    assert final.dtype == torch.float32
    generator = torch.Generator().manual_seed(99)
    upstream = [
        torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) for x in (o, final)
    ]
    grads = torch.autograd.grad([o, final], list(leaves.values()), upstream)
    found = {"o": o, "final": final} | {f"d_{n}": g for n, g in zip(leaves, grads, strict=True)}
    return {n: x.detach().cpu() for n, x in found.items()}


def assert_allowed(found: dict[str, float]) -> None:
    told = ", ".join(f"{n} {x:.1e}" for n, x in found.items())
    for name, error in found.items():
        limit = ALLOWED.limit(name)
        assert math.isfinite(error), told
        assert error < limit, f"{name}: {error:.1e}, allowed {limit:.0e}; all: {told}"


@pytest.mark.parametrize("name", CASES)
def test_cudnn_equals_the_recurrence_with_states(name: str) -> None:
    case = CASES[name]
    case = Case(**(vars(case) | {"key_dim": 128, "value_dim": 128}))
    inputs = in_bfloat16(case)
    want = run(case, inputs, backend=KdaBackend.reference, dtype=torch.float64)
    assert_allowed(relative(outcome(case, inputs), want))


def test_a_sequence_in_two_parts_equals_the_whole() -> None:
    """What context parallelism does: the state goes on, and its gradient comes back."""
    generator = torch.Generator().manual_seed(3)
    leaves = [
        torch.randn(1, 256, 2, *width, generator=generator).to(DEVICE, torch.bfloat16)
        for width in ((128,), (128,), (128,), (128,), ())
    ]
    leaves[3] = leaves[3] - 5.0  # a slow decay: the state of the first part matters
    leaves += [torch.zeros(2, device=DEVICE), torch.zeros(2, 128, device=DEVICE)]
    leaves = [x.requires_grad_() for x in leaves]
    upstream = torch.randn(1, 256, 2, 128, generator=generator).to(leaves[2])
    options = {"gate": Gate.bounded, "lower_bound": -5.0, "backend": KdaBackend.cudnn}
    whole, _ = kda(*leaves, **options)
    before = [*(x[:, :128] for x in leaves[:5]), *leaves[5:]]
    after = [*(x[:, 128:] for x in leaves[:5]), *leaves[5:]]
    first, state = kda(*before, output_final_state=True, **options)
    second, _ = kda(*after, initial_state=state, **options)
    parts = torch.cat([first, second], 1)
    alone, _ = kda(*after, **options)
    assert (alone - whole[:, 128:]).norm() > 0.1 * whole[:, 128:].norm()  # the state matters
    names = ("o", "d_q", "d_k", "d_v", "d_z", "d_beta_logits", "d_A_log", "d_dt_bias")
    found, want = (
        dict(zip(names, [o.detach(), *torch.autograd.grad(o, leaves, upstream)], strict=True))
        for o in (parts, whole)
    )
    assert_allowed(relative(found, want))


def test_the_same_call_twice_is_the_same_bit_for_bit() -> None:
    case = Case(1000, heads=12, key_dim=128, value_dim=128, offsets=(0, 333, 1000))
    inputs = in_bfloat16(case)
    first, second = outcome(case, inputs), outcome(case, inputs)
    assert [n for n, x in first.items() if not torch.equal(x, second[n])] == []


def test_other_numbers_of_documents_need_no_other_plan() -> None:
    from cudnn.linear_attention.ops import kda as frontend

    five, six = (0, 50, 100, 150, 200, 256), (0, 9, 256, 256, 256, 256, 256)
    seen = []
    for offsets in (five, six, (0, 1, 2, 3, 4, 5, 6, 7, 256)):
        case = Case(256, key_dim=128, value_dim=128, offsets=offsets)
        outcome(case, in_bfloat16(case))
        seen.append((len(frontend.fprop_cache), len(frontend.bprop_cache)))
    assert seen[0] == seen[1] == seen[2]


def test_what_it_cannot_take_is_refused() -> None:
    case = Case(16, key_dim=128, value_dim=128)
    with pytest.raises(ValueError, match=r"run\.precision=bf16"):
        run(case, make(case), backend=KdaBackend.cudnn, dtype=torch.float32, device="cuda")
    narrow = Case(16, key_dim=64, value_dim=64, gate=Gate.softplus)
    with pytest.raises(ConfigError, match=r"head_dim=128, got 64; needs a bounded gate"):
        run(narrow, make(narrow), backend=KdaBackend.cudnn, dtype=torch.bfloat16, device="cuda")


@pytest.mark.parametrize("backend", [KdaBackend.cudnn, KdaBackend.fla, KdaBackend.dense])
@pytest.mark.parametrize("documents", [False, True])
def test_the_check_of_a_run_passes_and_is_cheap(backend: KdaBackend, documents: bool) -> None:
    if backend is KdaBackend.fla and not fla.available(DEVICE):
        pytest.skip("needs the package fla-core")
    problem = Problem(heads=12, tokens=8192, width=128, documents=documents)
    options = {"backend": backend, "device": DEVICE, "dtype": torch.bfloat16}
    found = errors(problem, **options)
    print(backend.value, {name: f"{x:.1e}" for name, x in found.items()})
    torch.cuda.synchronize()
    begin = time.perf_counter()
    reason = rejection(problem, **options)
    seconds = time.perf_counter() - begin
    assert reason is None
    assert seconds < 1.0, f"{backend.value}: {seconds:.2f} s"


def test_a_wrong_kernel_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel given other queries than it should: what a bad variant would look like."""
    sound = cudnn._kernels

    def broken(inputs: list[Tensor], *rest: Tensor | None, **more: bool) -> object:
        return sound([inputs[0] * 1.05, *inputs[1:]], *rest, **more)

    monkeypatch.setattr(cudnn, "_kernels", broken)
    reason = rejection(
        Problem(heads=2, tokens=256, width=128),
        backend=KdaBackend.cudnn,
        device=DEVICE,
        dtype=torch.bfloat16,
    )
    assert reason is not None
    assert re.search(r"o [45]\.\de-02, allowed 1e-02", reason), reason
