"""The check of KDA's backend at the start of a run: what is wrong is rejected, no more.

The dense backend is broken on purpose: its real code, and one fault after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from megatron_ext.config.compose import compose
from megatron_ext.config.schema import Gate, KdaBackend
from megatron_ext.errors import ConfigError
from megatron_ext.ops import kda as package
from megatron_ext.ops.kda.check import Problem, bound, errors, rejection
from megatron_ext.train.accuracy import check_kda, problem_of

CPU = torch.device("cpu")
# Longer than what the formula is asked for, so that most tokens and heads are only carried along.
LONG = Problem(heads=3, tokens=700, width=16, batch=2)


def judge(problem: Problem, dtype: torch.dtype = torch.float32) -> str | None:
    return rejection(problem, backend=KdaBackend.dense, device=CPU, dtype=dtype)


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Tensor], Tensor]], None]:
    """Puts a function after the output of the dense backend."""
    sound = package.chunk_kda

    def put(function: Callable[[Tensor], Tensor]) -> None:
        def broken(*args: object, **options: object) -> tuple[Tensor, Tensor | None]:
            o, state = sound(*args, **options)
            return function(o), state

        monkeypatch.setattr(package, "chunk_kda", broken)

    return put


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "problem",
    [
        LONG,
        Problem(heads=2, tokens=300, width=16, documents=True),
        Problem(heads=1, tokens=40, width=16, documents=True),
        Problem(heads=2, tokens=200, width=16, gate=Gate.softplus),
        Problem(heads=2, tokens=200, width=16, gate=Gate.bounded_plain, gate_shift=-6.0),
    ],
)
def test_a_sound_backend_passes(problem: Problem, dtype: torch.dtype) -> None:
    assert judge(problem, dtype) is None


def test_an_error_over_the_bound_is_told_with_its_tensor(fault) -> None:
    fault(lambda o: 1.02 * o)
    reason = judge(LONG, torch.bfloat16)
    assert reason is not None
    assert "o 2.0e-02, allowed 1e-02" in reason
    assert "d_z" in reason


def test_the_last_head_and_the_third_chunk_are_looked_at(fault) -> None:
    def damage(*place: slice | int) -> Callable[[Tensor], Tensor]:
        def function(o: Tensor) -> Tensor:
            factor = torch.ones_like(o)
            factor[place] = 1.5
            return o * factor

        return function

    fault(damage(slice(None), slice(None), -1))
    assert judge(LONG) is not None
    fault(damage(slice(None), slice(128, 144), 0))
    assert judge(LONG) is not None


def test_a_wrong_gradient_alone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = package.log_decay

    def broken(*args: object, **options: object) -> Tensor:
        g = sound(*args, **options)
        return g.detach() + 0.9 * (g - g.detach())

    monkeypatch.setattr(package, "log_decay", broken)
    found = errors(LONG, backend=KdaBackend.dense, device=CPU, dtype=torch.float32)
    # The formula goes through the same function: what is judged is the fault in one of them alone.
    assert found["d_z"] < 1e-5
    monkeypatch.undo()
    fault_in = package.chunk_kda

    def only_dense(q: Tensor, k: Tensor, v: Tensor, g: Tensor, *rest: Tensor, **options: object):
        return fault_in(q, k, v, g.detach() + 0.9 * (g - g.detach()), *rest, **options)

    monkeypatch.setattr(package, "chunk_kda", only_dense)
    reason = judge(LONG)
    assert reason is not None
    assert reason.startswith("relative error against float64: d_z 1.0e-01, allowed 1e-05; d_A_log")


def test_nan_and_failures_are_reasons_and_memory_is_not(fault) -> None:
    fault(lambda o: o * torch.nan)
    assert "o nan, allowed 1e-05" in str(judge(LONG))

    def fail(o: Tensor) -> Tensor:
        raise RuntimeError("no kernel image\nis available")

    fault(fail)
    assert judge(LONG) == "it fails with RuntimeError: no kernel image is available"

    def exhaust(o: Tensor) -> Tensor:
        raise torch.OutOfMemoryError

    fault(exhaust)
    with pytest.raises(torch.OutOfMemoryError):
        judge(LONG)


def test_it_leaves_the_generators_of_training_alone() -> None:
    before = torch.random.get_rng_state()
    judge(LONG)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_cudnn_is_given_more_room_for_the_gate_and_fla_is_not() -> None:
    half = torch.bfloat16
    cudnn, fla = (bound(b, half, tf32=True) for b in (KdaBackend.cudnn, KdaBackend.fla))
    assert [cudnn.limit(n) for n in ("o", "d_k", "d_z", "d_A_log")] == [1e-2, 1e-2, 6e-2, 2e-1]
    assert [fla.limit(n) for n in ("o", "d_k", "d_z", "d_A_log")] == [1e-2, 1e-2, 1e-2, 5e-2]
    assert bound(KdaBackend.dense, torch.float32, tf32=False).values == 1e-5


def nano(*words: str):
    return compose(["model=nano", "data=demo", "run.device=cpu", *words])


def test_a_run_is_refused_where_the_check_says_so(fault) -> None:
    fault(lambda o: 1.02 * o)
    check_kda(nano(), CPU)  # auto does not judge plain torch
    check_kda(nano("model.kda.check=never"), CPU)
    with pytest.raises(ConfigError) as caught:
        check_kda(nano("model.kda.check=always"), CPU)
    text = str(caught.value)
    for part in ("dense is rejected on the CPU", "o 2.0e-02, allowed 1e-05", "check=never"):
        assert part in text
    check_kda(nano("model.kda.check=always", "model.attention=mla"), CPU)


@pytest.mark.parametrize(
    ("words", "shape"),
    [
        (["train.micro_batch_size=4"], (4, 256, 4, False)),
        (["train.micro_batch_size=4", "data.isolate_documents=true"], (1, 1024, 4, True)),
        (
            ["train.micro_batch_size=2", "parallel.context=2", "parallel.tensor=2"],
            (2, 128, 2, False),
        ),
    ],
)
def test_the_check_has_the_shape_of_a_rank(words: Sequence[str], shape: tuple[object, ...]) -> None:
    problem = problem_of(nano(*words))
    found = (problem.batch, problem.tokens, problem.heads, problem.documents)
    assert found == shape
