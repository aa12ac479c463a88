"""What is around cuDNN's kernels of KDA, which need a Hopper GPU: refusals, layouts, memory.

Where numbers are compared the recurrence takes the kernels' place, in their layout.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_ext.config.schema import Gate, KdaBackend
from megatron_ext.errors import ConfigError
from megatron_ext.ops.kda import cudnn, kda, recurrent_kda, resolve_backend, short_conv
from tests.support.kda_inputs import Case, errors, make, run

CPU, META = torch.device("cpu"), torch.device("meta")
CASES = {
    "one row": Case(50, key_dim=128, value_dim=128),
    "rows": Case(30, batch=3, key_dim=128, value_dim=128),
    "documents": Case(50, key_dim=128, value_dim=128, offsets=(0, 1, 20, 20, 33, 50)),
    "no slope": Case(20, key_dim=128, value_dim=128, gate=Gate.bounded_plain),
}


@pytest.fixture
def recurrence(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The recurrence in the place of the kernels; the offsets of every call."""
    calls: list[tuple[int, ...]] = []

    def run_it(
        inputs: list[Tensor], offsets: Tensor, state: Tensor | None, *, output_final_state: bool
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v, g, beta = inputs
        assert {x.dtype for x in (q, k, v)} == {torch.bfloat16}
        assert {x.dtype for x in (g, beta)} == {torch.float32}
        assert offsets.dtype == torch.int32
        assert all(x.is_contiguous() for x in inputs)
        assert state is None or state.is_contiguous()
        calls.append(tuple(offsets.tolist()))
        o, final = recurrent_kda(
            *((q * q.shape[-1] ** -0.5)[None], k[None], v[None], g[None], beta[None]),
            cu_seqlens=offsets,
            initial_state=None if state is None else state.transpose(-1, -2),
            output_final_state=output_final_state,
        )
        return o[0], None if final is None else final.transpose(-1, -2)

    monkeypatch.setattr(cudnn, "_kernels", run_it)
    monkeypatch.setattr(cudnn, "misfits", lambda device, **options: [])
    return calls


@pytest.mark.parametrize("name", CASES)
def test_everything_around_the_kernels_is_that_of_the_formula(name: str, recurrence) -> None:
    case = CASES[name]
    inputs = {n: x.bfloat16().double() for n, x in make(case).items()}
    want = run(case, inputs, backend=KdaBackend.reference, dtype=torch.float64)
    got = run(case, inputs, backend=KdaBackend.cudnn, dtype=torch.bfloat16)
    # Roundings of inputs, normalised keys and results to 8 bits.
    assert max(errors(got, want).values()) < 1e-2
    assert got["final"].dtype == torch.float32


def test_offsets_of_the_kernels(recurrence) -> None:
    for case in CASES.values():
        inputs = make(case)
        run(case, inputs, backend=KdaBackend.cudnn, dtype=torch.bfloat16)
    # Rows follow each other; packed documents are filled up to a power of two with empty ones.
    assert recurrence[1] == (0, 30, 60, 90)
    assert recurrence[2] == (0, 1, 20, 20, 33, 50, 50, 50, 50)


def test_no_tokens_leave_the_state(recurrence) -> None:
    inputs = {n: x.bfloat16() for n, x in make(Case(0, key_dim=128, value_dim=128)).items()}
    state = inputs.pop("initial_state")
    options = {"gate": Gate.bounded, "lower_bound": -5.0, "backend": KdaBackend.cudnn}
    for before, after in ((state, state.float()), (None, torch.zeros(1, 2, 128, 128))):
        more = {"initial_state": before, "output_final_state": True}
        o, final = kda(*inputs.values(), **options, **more)
        assert o.shape == (1, 0, 2, 128)
        assert torch.equal(final, after)
    assert recurrence == []


@pytest.mark.parametrize(
    ("head_dim", "gate", "said"),
    [
        (128, Gate.bounded, ["needs a GPU, the tensors are on cpu"]),
        (64, Gate.softplus, ["head_dim=128, got 64", "needs a bounded gate", "got softplus"]),
    ],
)
def test_where_it_cannot_run_it_is_refused_and_not_replaced(head_dim, gate, said) -> None:
    shape = {"head_dim": head_dim, "value_dim": head_dim, "gate": gate, "lower_bound": -5.0}
    with pytest.raises(ConfigError) as caught:
        resolve_backend(KdaBackend.cudnn, CPU, torch.bfloat16, **shape)
    for part in [*said, "allowed model.kda.backend=auto, fla or dense"]:
        assert part in str(caught.value)
    case = Case(8, key_dim=128, value_dim=128)
    with pytest.raises(ConfigError, match="needs a GPU"):
        run(case, make(case), backend=KdaBackend.cudnn, dtype=torch.bfloat16)


def test_other_gpus_and_a_missing_package_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(cudnn.importlib.util, "find_spec", lambda name: None)
    found = cudnn.misfits(torch.device("cuda"), head_dim=128, gate=Gate.bounded)
    assert found == [
        "needs a Hopper GPU (compute capability 9.0), got NVIDIA A100 (8.0)",
        "needs the package nvidia-cudnn-frontend >= 1.32 with cuda-bindings, which is missing",
    ]


def test_auto_never_takes_it() -> None:
    shape = {"head_dim": 128, "value_dim": 128, "gate": Gate.bounded, "lower_bound": -5.0}
    for device in (CPU, META):
        found = resolve_backend(KdaBackend.auto, device, torch.bfloat16, **shape)
        assert found is not KdaBackend.cudnn


def refused(case: Case, **options: object) -> None:
    inputs = {n: x.bfloat16() for n, x in make(case).items() if n != "initial_state"}
    arguments = {"gate": case.gate, "lower_bound": -5.0, "backend": KdaBackend.cudnn, **options}
    kda(*inputs.values(), **arguments)


def test_inputs_that_its_kernels_cannot_take_are_refused(recurrence) -> None:
    case = Case(8, key_dim=128, value_dim=128)
    with pytest.raises(ValueError, match=r"given torch\.float32.*run\.precision=bf16"):
        run(case, make(case), backend=KdaBackend.cudnn, dtype=torch.float32)
    with pytest.raises(ValueError, match="value_dim: given 64, allowed 128"):
        refused(Case(8, key_dim=128, value_dim=64))
    with pytest.raises(ValueError, match=r"lower_bound: given -6, allowed \[-5, 0\)"):
        refused(case, lower_bound=-6.0)
    with pytest.raises(ValueError, match="flatten"):
        refused(Case(8, batch=2, key_dim=128, value_dim=128), cu_seqlens=torch.tensor([0, 8]))
    many = torch.zeros(40_000, dtype=torch.int32)
    with pytest.raises(ValueError, match="given 39999 in one call with 2 heads, allowed 32767"):
        refused(case, cu_seqlens=many)
    assert recurrence == []


def test_a_power_of_two_that_the_grid_cannot_take_is_cut(recurrence) -> None:
    case = Case(4, heads=2, key_dim=128, value_dim=128)
    offsets = torch.full((32_001,), 4, dtype=torch.int32)
    offsets[0] = 0
    kept = cudnn._offsets(torch.empty(1, 4, 2, 128), offsets)
    assert (len(kept) - 1) * case.heads <= cudnn.MOST_STATES
    assert len(kept) - 1 >= 32_000


def test_its_convolution_is_that_of_auto() -> None:
    x, weight = torch.randn(1, 9, 4), torch.randn(4, 4)
    found, _ = short_conv(x, weight, backend=KdaBackend.cudnn)
    assert torch.equal(found, short_conv(x, weight)[0])


def test_a_plan_counts_what_it_allocates() -> None:
    tokens, heads, kept = 256, 2, []

    def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=META, requires_grad=True)

    row = (1, tokens, heads, 128)
    inputs = [*(tensor(*row) for _ in range(4)), tensor(*row[:3])]
    parameters = [tensor(heads, dtype=torch.float32), tensor(heads, 128, dtype=torch.float32)]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        o, final = kda(
            *inputs,
            *parameters,
            gate=Gate.bounded,
            lower_bound=-5.0,
            cu_seqlens=torch.empty(4, dtype=torch.int32, device=META),
            output_final_state=True,
            backend=KdaBackend.cudnn,
        )
    assert o.shape == row
    assert final is not None
    assert final.shape == (3, heads, 128, 128)
    # Normalised queries and keys, and the log-decay, as the operator keeps them.
    shape = (tokens, heads, 128)
    wide = [x for x in kept if x.shape == shape and x.dtype is torch.float32]
    half = [x for x in kept if x.shape == shape and x.dtype is torch.bfloat16]
    assert (len(wide), len(half)) == (1, 3)
    torch.autograd.grad([o, final], inputs, [torch.empty_like(o), torch.empty_like(final)])
