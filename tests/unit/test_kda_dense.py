"""The chunked path against the token recurrence: values, gradients, documents, causality."""

from __future__ import annotations

import itertools

import pytest
import torch

from megatron_ext.config.schema import Gate, KdaBackend
from megatron_ext.ops.kda import chunk_kda, kda, recurrent_kda
from tests.support.kda_inputs import Case, errors, make, run, worst

# The recurrence itself in float32 differs from float64 by up to 1e-6, and the tiles add the
# rounding of exponents up to 80 nats (4e-6 in the worst element).
FLOAT32 = 1e-5
# Float64 has 29 more bits; conditioning is the same.
FLOAT64 = 1e-12

LENGTHS = (1, 2, 3, 15, 16, 17, 31, 33, 48, 63, 64, 65, 79, 100, 127, 128, 129, 143, 191, 200)


@pytest.mark.parametrize("tokens", LENGTHS)
def test_dense_equals_recurrence_at_any_length(tokens: int) -> None:
    assert worst(Case(tokens, heads=1, key_dim=8, value_dim=8, seed=tokens)) < FLOAT32


@pytest.mark.parametrize("shift", [-30.0, -3.0, 0.0, 3.0, 30.0])
@pytest.mark.parametrize("gate", list(Gate))
def test_dense_equals_recurrence_under_any_gate(gate: Gate, shift: float) -> None:
    assert worst(Case(150, gate=gate, gate_shift=shift)) < FLOAT32


def test_dense_equals_recurrence_when_gates_jump_between_the_extremes() -> None:
    assert worst(Case(150, gate_spread=60.0)) < FLOAT32


@pytest.mark.parametrize("shift", [-30.0, 0.0])
def test_dense_equals_recurrence_with_nearly_identical_keys(shift: float) -> None:
    assert worst(Case(200, same_keys=True, gate_shift=shift)) < FLOAT32


@pytest.mark.parametrize(("key_dim", "value_dim", "heads"), [(12, 20, 3), (20, 12, 1), (3, 5, 2)])
def test_head_dims_may_differ_and_need_not_be_powers_of_two(
    key_dim: int, value_dim: int, heads: int
) -> None:
    assert worst(Case(90, batch=2, heads=heads, key_dim=key_dim, value_dim=value_dim)) < FLOAT32


@pytest.mark.parametrize(
    "offsets",
    [
        (0, 1, 3, 64, 64, 128, 193, 200),
        (0, 0, 5, 5, 70, 71),
        (0, 130),
        tuple(range(61)),
        (0, 16, 32, 48, 64),
    ],
)
def test_documents_equal_the_recurrence_of_each(offsets: tuple[int, ...]) -> None:
    assert worst(Case(offsets[-1], offsets=offsets)) < FLOAT32


def test_random_documents_equal_the_recurrence() -> None:
    generator = torch.Generator().manual_seed(5)
    for seed in range(4):
        lengths = torch.randint(0, 80, (5,), generator=generator).tolist()
        offsets = (0, *itertools.accumulate(lengths))
        case = Case(offsets[-1], heads=1, key_dim=8, value_dim=8, offsets=offsets, seed=seed)
        assert worst(case) < FLOAT32


def test_three_thousand_tiny_documents() -> None:
    lengths = [1 + i % 3 for i in range(3000)]
    offsets = (0, *itertools.accumulate(lengths))
    case = Case(offsets[-1], heads=1, key_dim=4, value_dim=4, offsets=offsets)
    inputs = {n: x.float() for n, x in make(case).items()}
    got = run(case, inputs, backend=KdaBackend.dense, dtype=torch.float32)
    # The recurrence on 3000 documents takes long; documents are independent, so 60 tell.
    few = Case(offsets[60], heads=1, key_dim=4, value_dim=4, offsets=offsets[:61])
    part = {
        n: x[:60] if n == "initial_state" else x[:, : offsets[60]] if x.ndim > 2 else x
        for n, x in inputs.items()
    }
    want = run(few, part, backend=KdaBackend.reference, dtype=torch.float64)
    assert (got["o"][:, : offsets[60]] - want["o"]).norm() < FLOAT32 * want["o"].norm()
    assert (got["final"][:60] - want["final"]).norm() < FLOAT32 * want["final"].norm()
    assert all(x.isfinite().all() for x in got.values())


@pytest.mark.parametrize("gate", list(Gate))
def test_float64_agrees_to_float64_rounding(gate: Gate) -> None:
    case = Case(100, gate=gate, offsets=(0, 70, 83, 100))
    inputs = make(case)
    want = run(case, inputs, backend=KdaBackend.reference, dtype=torch.float64)
    got = run(case, inputs, backend=KdaBackend.dense, dtype=torch.float64)
    assert max(errors(got, want).values()) < FLOAT64


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_gradcheck(lower_bound: float | None) -> None:
    generator = torch.Generator().manual_seed(1)

    def leaf(*shape: int) -> torch.Tensor:
        x = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return x.requires_grad_()

    def function(*x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v, z, beta, state = x
        o, final = chunk_kda(
            q,
            k,
            v,
            -4.5 * torch.sigmoid(z),
            torch.sigmoid(beta),
            lower_bound=lower_bound,
            cu_seqlens=torch.tensor([0, 18, 20]),
            initial_state=state,
            output_final_state=True,
            check=False,
        )
        assert final is not None
        return o, final

    sizes = ((1, 20, 1, 2),) * 2 + ((1, 20, 1, 3), (1, 20, 1, 2), (1, 20, 1), (2, 1, 2, 3))
    assert torch.autograd.gradcheck(function, tuple(leaf(*s) for s in sizes))


@pytest.mark.parametrize("backend", [KdaBackend.dense, KdaBackend.reference])
def test_continuing_with_the_carried_state_equals_one_shot(backend: KdaBackend) -> None:
    case = Case(150, batch=2)
    x = {n: t.double() for n, t in make(case).items()}

    def part(start: int, stop: int, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        o, final = kda(
            *(x[n][:, start:stop] for n in ("q", "k", "v", "z", "beta")),
            x["A_log"],
            x["dt_bias"],
            gate=Gate.bounded,
            lower_bound=-5.0,
            initial_state=state,
            output_final_state=True,
            backend=backend,
        )
        assert final is not None
        return o, final

    whole, end = part(0, 150, x["initial_state"])
    state = x["initial_state"]
    pieces = []
    for start, stop in itertools.pairwise((0, 1, 50, 114, 150)):
        piece, state = part(start, stop, state)
        pieces.append(piece)
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=FLOAT64, atol=FLOAT64)
    torch.testing.assert_close(state, end, rtol=FLOAT64, atol=FLOAT64)


@pytest.mark.parametrize("gate", list(Gate))
@pytest.mark.parametrize("name", ["q", "k", "v", "z", "beta"])
def test_no_output_depends_on_a_later_input_not_even_by_rounding(gate: Gate, name: str) -> None:
    # Bitwise: fixed reference points make the arithmetic of a token independent of later values.
    case = Case(100, gate=gate)
    inputs = {n: x.float() for n, x in make(case).items()}
    before = run(case, inputs, backend=KdaBackend.dense, dtype=torch.float32)["o"]
    for cut in (1, 7, 16, 40, 64, 99):
        changed = dict(inputs)
        changed[name] = inputs[name].clone()
        changed[name][:, cut:] = 7.0 * changed[name][:, cut:].flip(1) - 20.0
        after = run(case, changed, backend=KdaBackend.dense, dtype=torch.float32)["o"]
        assert torch.equal(before[:, :cut], after[:, :cut])
        assert not torch.equal(before[:, cut:], after[:, cut:])


def test_documents_do_not_see_each_other() -> None:
    case = Case(100, offsets=(0, 30, 100))
    inputs = {n: x.float() for n, x in make(case).items()}
    before = run(case, inputs, backend=KdaBackend.dense, dtype=torch.float32)
    for name in ("q", "k", "v", "z", "beta"):
        changed = dict(inputs)
        changed[name] = inputs[name].clone()
        changed[name][:, :30] += 3.0
        after = run(case, changed, backend=KdaBackend.dense, dtype=torch.float32)
        assert torch.equal(before["o"][:, 30:], after["o"][:, 30:])
        assert torch.equal(before["final"][1], after["final"][1])


def test_bfloat16_is_promoted_and_the_state_stays_float32() -> None:
    case = Case(70)
    inputs = {n: x.bfloat16().double() for n, x in make(case).items()}
    want = run(case, inputs, backend=KdaBackend.reference, dtype=torch.float64)
    got = run(case, inputs, backend=KdaBackend.dense, dtype=torch.bfloat16)
    assert got["o"].dtype == torch.bfloat16
    assert got["final"].dtype == torch.float32
    # Only the output is rounded, to 8 bits: 2^-9 = 2e-3 for each element.
    assert (got["o"].double() - want["o"]).norm() < 3e-3 * want["o"].norm()
    assert (got["final"].double() - want["final"]).norm() < FLOAT32 * want["final"].norm()


def test_no_tokens_leave_the_state_as_it_was() -> None:
    x = {n: t.float() for n, t in make(Case(4)).items()}
    empty = [x[n][:, :0] for n in ("q", "k", "v", "z", "beta")]
    for function in (chunk_kda, recurrent_kda):
        o, final = function(*empty, initial_state=x["initial_state"], output_final_state=True)
        assert o.shape == (1, 0, 2, 16)
        assert torch.equal(final, x["initial_state"])
        o, final = function(*empty, output_final_state=True)
        assert torch.equal(final, torch.zeros(1, 2, 16, 16))


@pytest.mark.parametrize(
    ("batch", "offsets", "message"),
    [
        (2, (0, 8), "flatten"),
        (1, (0, 7), "end at 8"),
        (1, (1, 8), "start at 0"),
        (1, (0, 5, 3, 8), "never decrease"),
    ],
)
def test_wrong_offsets_are_errors(batch: int, offsets: tuple[int, ...], message: str) -> None:
    case = Case(8, batch=batch, offsets=offsets)
    for backend in (KdaBackend.dense, KdaBackend.reference):
        with pytest.raises(ValueError, match=message):
            run(case, make(case), backend=backend, dtype=torch.float32)
