"""What is around our own backend of KDA, which needs a GPU and fla: refusals, memory."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from torch import Tensor

from megatron_ext.config.compose import compose
from megatron_ext.config.schema import Gate, KdaBackend
from megatron_ext.errors import ConfigError
from megatron_ext.ops.kda import fla, kda, own, own_fit, resolve_backend, short_conv
from megatron_ext.ops.kda.check import bound
from megatron_ext.train.accuracy import kda_backend
from tests.support.kda_inputs import Case, make, run

CPU, META, CUDA = (torch.device(kind) for kind in ("cpu", "meta", "cuda"))
HALF = torch.bfloat16
CASE = Case(8, key_dim=128, value_dim=128)
SHAPE = {"head_dim": 128, "value_dim": 128, "gate": Gate.bounded, "lower_bound": -5.0}
# What its kernels cannot take, and what is said of it.
UNFIT = [
    (torch.float32, {}, "needs bfloat16 (run.precision=bf16), got float32"),
    (HALF, {"head_dim": 64}, "needs model.kda.head_dim=128, got 64"),
    (HALF, {"value_dim": 64}, "needs model.kda.value_dim=128, got 64"),
    (HALF, {"gate": Gate.softplus}, "needs a bounded gate (model.kda.gate=bounded or bounded_plai"),
    (HALF, {"lower_bound": -6.0}, "needs model.kda.lower_bound in [-5, 0), got -6"),
    (HALF, {"lower_bound": 0.0}, "needs model.kda.lower_bound in [-5, 0), got 0"),
]


def test_where_it_cannot_run_it_is_refused_with_all_reasons_and_not_replaced() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_backend(
            KdaBackend.triton,
            CPU,
            torch.float32,
            head_dim=64,
            value_dim=32,
            gate=Gate.bounded,
            lower_bound=-6.0,
        )
    text = str(caught.value)
    assert "model.kda.backend=triton: needs a GPU, the tensors are on cpu; " in text
    assert text.endswith("(allowed model.kda.backend=auto, fla or dense)")
    assert text.count("; needs ") == 4
    with pytest.raises(ConfigError, match="needs a GPU"):
        run(CASE, make(CASE), backend=KdaBackend.triton, dtype=HALF)


@pytest.mark.parametrize(("dtype", "other", "said"), UNFIT)
def test_what_it_cannot_take_is_refused_by_name_and_goes_to_fla_unasked(
    another_fla, dtype, other, said
) -> None:
    for device in (CUDA, META):
        shape = SHAPE | other
        (reason,) = own_fit.misfits(device, dtype, **shape)
        assert reason.startswith(said)
        with pytest.raises(ConfigError, match=re.escape(said)):
            resolve_backend(KdaBackend.triton, device, dtype, **shape)
        assert resolve_backend(KdaBackend.auto, device, dtype, **shape) is KdaBackend.fla


def test_auto_takes_it_where_it_fits_and_was_measured(another_fla, monkeypatch) -> None:
    def auto(device: torch.device = CUDA, **other: object) -> KdaBackend:
        return resolve_backend(KdaBackend.auto, device, HALF, **SHAPE | other)

    for gate in (Gate.bounded, Gate.bounded_plain):
        assert auto(gate=gate) is KdaBackend.triton
    assert auto(META) is KdaBackend.triton
    assert auto(CPU) is KdaBackend.dense
    assert auto(head_dim=512) is KdaBackend.dense  # too wide for fla, too
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert auto() is KdaBackend.fla
    assert resolve_backend(KdaBackend.triton, CUDA, HALF, **SHAPE) is KdaBackend.triton


def test_auto_takes_fla_of_another_release_and_dense_without_fla(another_fla, monkeypatch) -> None:
    del another_fla["fla.ops.kda.wy_fast"].recompute_w_u_fwd
    assert resolve_backend(KdaBackend.auto, CUDA, HALF, **SHAPE) is KdaBackend.fla
    monkeypatch.setattr(own_fit.importlib.util, "find_spec", lambda name: None)
    assert resolve_backend(KdaBackend.auto, CUDA, HALF, **SHAPE) is KdaBackend.dense
    with pytest.raises(ConfigError, match="needs the package fla-core, which is missing"):
        resolve_backend(KdaBackend.triton, CUDA, HALF, **SHAPE)


def test_an_operator_takes_what_fits_its_tensors() -> None:
    """On the meta device, where the operator itself can be called."""
    inputs = {n: x.to(META, HALF) for n, x in make(CASE).items() if n != "initial_state"}
    taken: list[str] = []

    def call(**other: Tensor) -> str:
        with pytest.MonkeyPatch.context() as patch:
            for kind in (own, fla):
                name = f"{kind.__name__.split('.')[-1]}_kda"
                patch.setattr(kind, name, lambda *x, name=name, **y: (taken.append(name), None))
            kda(*(inputs | other).values(), gate=Gate.bounded, lower_bound=-5.0, require=True)
        return taken[-1]

    assert call() == "own_kda"
    wide = {name: inputs[name].float() for name in ("q", "k", "v")}
    assert call(**wide) == "fla_kda"
    for name, x in wide.items():
        assert call(**{name: x}) == "fla_kda"
    assert call(v=inputs["v"][..., :64]) == "fla_kda"


def test_a_run_names_the_backend_that_its_configuration_takes(another_fla) -> None:
    words = ["model.kda.head_dim=128", "model.kda.value_dim=128", "run.precision=bf16"]
    for given, taken in (
        (words, KdaBackend.triton),
        (words[:2], KdaBackend.fla),
        (words[2:], KdaBackend.fla),
        ([*words, "model.kda.gate=softplus"], KdaBackend.fla),
        ([*words, "model.kda.backend=fla"], KdaBackend.fla),
        ([*words, "run.deterministic=true"], KdaBackend.dense),
    ):
        config = compose(["model=nano", "data=demo", *given])
        assert kda_backend(config, CUDA) is taken


def test_its_convolution_is_that_of_auto() -> None:
    x, weight = torch.randn(1, 9, 4), torch.randn(4, 4)
    found, _ = short_conv(x, weight, backend=KdaBackend.triton)
    assert torch.equal(found, short_conv(x, weight)[0])


@pytest.fixture
def another_fla(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """A package `fla` that has all functions, with the arguments that we give."""
    modules: dict[str, ModuleType] = {}
    for name, (module, arguments) in own_fit.FLA.items():
        made = modules.setdefault(module, ModuleType(module))
        scope: dict[str, object] = {}
        exec(f"def {name}({', '.join(arguments.split())}): pass", scope)
        setattr(made, name, scope[name])
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
        while "." in name:
            name = name.rpartition(".")[0]
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(own_fit.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    own_fit.missing.cache_clear()
    yield modules
    own_fit.missing.cache_clear()


def test_what_another_release_of_fla_lacks_is_named(another_fla) -> None:
    assert own_fit.misfits(CUDA, HALF, **SHAPE) == []
    del another_fla["fla.ops.kda.wy_fast"].recompute_w_u_fwd
    another_fla["fla.ops.kda.gate"].kda_gate_chunk_cumsum = lambda g, A_log: g  # noqa: N803
    own_fit.missing.cache_clear()
    (reason,) = own_fit.misfits(CUDA, HALF, **SHAPE)
    assert reason.startswith("needs fla-core 0.6; the one installed lacks ")
    assert "fla.ops.kda.wy_fast.recompute_w_u_fwd" in reason
    assert "fla.ops.kda.gate.kda_gate_chunk_cumsum(lower_bound)" in reason


def test_offsets_with_a_batch_are_refused() -> None:
    made = make(Case(8, batch=2, key_dim=128, value_dim=128))
    inputs = [x.to(META, HALF) for n, x in made.items() if n != "initial_state"]
    options = {"gate": Gate.bounded, "lower_bound": -5.0, "backend": KdaBackend.triton}
    with pytest.raises(ValueError, match="flatten"):
        kda(*inputs, cu_seqlens=torch.tensor([0, 8]), **options)


def test_no_tokens_leave_the_state(monkeypatch) -> None:
    monkeypatch.setattr(own_fit, "misfits", lambda device, dtype, **options: [])
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
