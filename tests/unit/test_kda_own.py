"""What is around our own backend of KDA, which needs a GPU and fla: refusals, memory."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from torch import Tensor

from megatron_ext.config.schema import Gate, KdaBackend
from megatron_ext.errors import ConfigError
from megatron_ext.ops.kda import kda, own, resolve_backend, short_conv
from megatron_ext.ops.kda.check import bound
from tests.support.kda_inputs import Case, make, run

CPU, META = torch.device("cpu"), torch.device("meta")
CASE = Case(8, key_dim=128, value_dim=128)


@pytest.mark.parametrize(
    ("head_dim", "gate", "said"),
    [
        (128, Gate.bounded, ["needs a GPU, the tensors are on cpu"]),
        (64, Gate.softplus, ["head_dim=128, got 64", "needs a bounded gate", "got softplus"]),
    ],
)
def test_where_it_cannot_run_it_is_refused_and_not_replaced(head_dim, gate, said) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_backend(KdaBackend.triton, CPU, head_dim=head_dim, gate=gate)
    for part in [*said, "allowed model.kda.backend=auto, fla or dense"]:
        assert part in str(caught.value)
    with pytest.raises(ConfigError, match="needs a GPU"):
        run(CASE, make(CASE), backend=KdaBackend.triton, dtype=torch.bfloat16)


def test_auto_never_takes_it_and_its_convolution_is_that_of_auto() -> None:
    for device in (CPU, META):
        found = resolve_backend(KdaBackend.auto, device, head_dim=128, gate=Gate.bounded)
        assert found is not KdaBackend.triton
    x, weight = torch.randn(1, 9, 4), torch.randn(4, 4)
    found, _ = short_conv(x, weight, backend=KdaBackend.triton)
    assert torch.equal(found, short_conv(x, weight)[0])


@pytest.fixture
def another_fla(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """A package `fla` that has all functions, with the arguments that we give."""
    modules: dict[str, ModuleType] = {}
    for name, (module, arguments) in own.FLA.items():
        made = modules.setdefault(module, ModuleType(module))
        scope: dict[str, object] = {}
        exec(f"def {name}({', '.join(arguments.split())}): pass", scope)
        setattr(made, name, scope[name])
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
        while "." in name:
            name = name.rpartition(".")[0]
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(own.importlib.util, "find_spec", lambda name: name)
    own.missing.cache_clear()
    yield modules
    own.missing.cache_clear()


def test_what_another_release_of_fla_lacks_is_named(another_fla) -> None:
    cuda = torch.device("cuda")
    assert own.misfits(cuda, head_dim=128, gate=Gate.bounded) == []
    del another_fla["fla.ops.kda.wy_fast"].recompute_w_u_fwd
    another_fla["fla.ops.kda.gate"].kda_gate_chunk_cumsum = lambda g, A_log: g  # noqa: N803
    own.missing.cache_clear()
    (reason,) = own.misfits(cuda, head_dim=128, gate=Gate.bounded)
    assert reason.startswith("needs fla-core 0.6; the one installed lacks ")
    assert "fla.ops.kda.wy_fast.recompute_w_u_fwd" in reason
    assert "fla.ops.kda.gate.kda_gate_chunk_cumsum(lower_bound)" in reason


def test_inputs_that_its_kernels_cannot_take_are_refused(monkeypatch) -> None:
    monkeypatch.setattr(own, "misfits", lambda device, **options: [])

    def refused(case: Case, **options: object) -> None:
        inputs = {n: x.bfloat16() for n, x in make(case).items() if n != "initial_state"}
        arguments = {"gate": case.gate, "lower_bound": -5.0, "backend": KdaBackend.triton}
        kda(*inputs.values(), **arguments | options)

    with pytest.raises(ValueError, match=r"given torch\.float32.*run\.precision=bf16"):
        run(CASE, make(CASE), backend=KdaBackend.triton, dtype=torch.float32)
    with pytest.raises(ValueError, match="value_dim: given 64, allowed 128"):
        refused(Case(8, key_dim=128, value_dim=64))
    with pytest.raises(ValueError, match=r"lower_bound: given -6, allowed \[-5, 0\)"):
        refused(CASE, lower_bound=-6.0)
    with pytest.raises(ValueError, match="flatten"):
        refused(Case(8, batch=2, key_dim=128, value_dim=128), cu_seqlens=torch.tensor([0, 8]))


def test_no_tokens_leave_the_state(monkeypatch) -> None:
    monkeypatch.setattr(own, "misfits", lambda device, **options: [])
    inputs = {n: x.bfloat16() for n, x in make(Case(0, key_dim=128, value_dim=128)).items()}
    state = inputs.pop("initial_state")
    options = {"gate": Gate.bounded, "lower_bound": -5.0, "backend": KdaBackend.triton}
    for before, after in ((state, state.float()), (None, torch.zeros(1, 2, 128, 128))):
        more = {"initial_state": before, "output_final_state": True}
        o, final = kda(*inputs.values(), **options, **more)
        assert o.shape == (1, 0, 2, 128)
        assert torch.equal(final, after)


def test_a_plan_counts_what_it_allocates() -> None:
    tokens, heads, kept = 256, 2, []

    def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=META, requires_grad=True)

    row = (1, tokens, heads, 128)
    inputs = [*(tensor(*row) for _ in range(4)), tensor(*row[:3])]
    bias = tensor(heads, 128, dtype=torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        o, final = kda(
            *inputs,
            None,
            bias,
            gate=Gate.bounded_plain,
            lower_bound=-5.0,
            cu_seqlens=torch.empty(4, dtype=torch.int32, device=META),
            output_final_state=True,
            backend=KdaBackend.triton,
        )
    assert o.shape == row
    assert final is not None
    assert final.shape == (3, heads, 128, 128)
    # Normed queries and keys, values, raw gates; two products of 64 numbers a token.
    assert len([x for x in kept if x.shape == row]) == 4
    assert len([x for x in kept if x.shape == (*row[:3], 64)]) == 2
    torch.autograd.grad([o, final], inputs, [torch.empty_like(o), torch.empty_like(final)])


def test_it_is_judged_as_fla_is() -> None:
    half = torch.bfloat16
    found = [bound(b, half, tf32=True) for b in (KdaBackend.triton, KdaBackend.fla)]
    assert found[0] == found[1]
