"""KDA over ranks with consecutive parts equals KDA of the whole sequence, values and gradients.

Ranks are threads, in float64.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.config.schema import Gate, KdaBackend
from megatron_ext.ops.kda import context_kda, exchange
from tests.support.kda_inputs import Case, errors, make, run
from tests.support.threads import run_ranks

# Under a decay of some 0.1 nats a token states matter over a whole part; at -2.5, the middle of
# the bounded gate, nothing but the last few tokens would.
SLOW = -4.0
# Two heads; the second one decays ten times as fast.
CASES = {
    "plain": Case(tokens=96, gate_shift=SLOW),
    "rows": Case(tokens=48, batch=3, gate_shift=SLOW),
    "no decay": Case(tokens=96, gate_shift=-60.0, gate_spread=0.0),
    "strongest decay": Case(tokens=96, gate_shift=30.0),
    "odd widths": Case(tokens=60, key_dim=12, value_dim=20, gate_shift=SLOW),
    "unbounded": Case(tokens=48, gate=Gate.softplus),
    "no slope": Case(tokens=48, gate=Gate.bounded_plain),
    "awkward documents": Case(tokens=32, offsets=(0, 5, 16, 17, 32), gate_shift=SLOW),
    "a document over all ranks": Case(tokens=96, offsets=(0, 3, 95, 96), gate_shift=SLOW),
    "bounds at the edges": Case(tokens=48, offsets=(0, 12, 24, 36, 48), gate_shift=SLOW),
    "one at an edge": Case(tokens=48, offsets=(0, 24, 48), gate_shift=SLOW),
}
SHARDED = ("q", "k", "v", "z", "beta")
# float64; the same sums in another order, the worst case being products of 96 transitions
EXACT = 1e-11


def local(case: Case, rank: int, ranks: int) -> tuple[int, int, tuple[int, ...] | None, bool]:
    """Start and end of a rank's part, bounds within it, whether its first document began before."""
    size = case.tokens // ranks
    start, end = rank * size, (rank + 1) * size
    if case.offsets is None:
        return start, end, None, rank > 0
    inside = [x - start for x in case.offsets if start < x < end]
    return start, end, (0, *inside, size), start not in case.offsets


def over_ranks(
    case: Case, inputs: dict[str, Tensor], *, ranks: int, backend: KdaBackend
) -> dict[str, Tensor]:
    """As `kda_inputs.run`, without states: output and gradients, put together from all ranks."""
    upstream = torch.randn(
        inputs["v"].shape, generator=torch.Generator().manual_seed(99), dtype=torch.float64
    )

    def part(group: dist.ProcessGroup) -> dict[str, Tensor]:
        start, end, bounds, continued = local(case, group.rank(), ranks)
        leaves = {
            name: (x[:, start:end] if name in SHARDED else x).clone().requires_grad_()
            for name, x in inputs.items()
        }
        o, final = context_kda(
            *(leaves[name] for name in SHARDED),
            leaves.get("A_log"),
            leaves["dt_bias"],
            gate=case.gate,
            lower_bound=-5.0,
            group=group,
            continued=continued,
            cu_seqlens=None if bounds is None else torch.tensor(bounds),
            backend=backend,
        )
        grads = torch.autograd.grad(o, list(leaves.values()), upstream[:, start:end])
        states = {"final": final} if group.rank() == ranks - 1 else {}
        assert not final.requires_grad
        return (
            {"o": o.detach()} | {f"d_{n}": g for n, g in zip(leaves, grads, strict=True)} | states
        )

    parts = run_ranks(ranks, part)
    whole = {"o", *(f"d_{name}" for name in SHARDED)}
    # The last document ends on the last rank.
    last = {"final": parts[-1]["final"][-1:] if case.offsets else parts[-1]["final"]}
    return last | {
        name: torch.cat([p[name] for p in parts], 1)
        if name in whole
        else torch.stack([p[name] for p in parts]).sum(0)
        for name in parts[0]
    }


def on_one_rank(case: Case, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The token recurrence, from states of zero."""
    documents = case.batch if case.offsets is None else len(case.offsets) - 1
    state = inputs["q"].new_zeros(documents, case.heads, case.key_dim, case.value_dim)
    got = run(
        case,
        inputs | {"initial_state": state},
        backend=KdaBackend.reference,
        dtype=torch.float64,
        state_matters=False,
    )
    got["final"] = got["final"][-1:] if case.offsets else got["final"]
    return {k: v for k, v in got.items() if k != "d_initial_state"}


def problem(case: Case) -> dict[str, Tensor]:
    inputs = make(case)
    del inputs["initial_state"]
    if "A_log" in inputs:
        inputs["A_log"][1] += 1.0
    return inputs


@pytest.mark.parametrize("backend", [KdaBackend.dense, KdaBackend.reference])
@pytest.mark.parametrize("name", CASES)
def test_ranks_equal_the_whole_sequence(name: str, backend: KdaBackend) -> None:
    case, inputs = CASES[name], problem(CASES[name])
    truth = on_one_rank(case, inputs)
    for ranks in (2, 4) if backend is KdaBackend.dense else (4,):
        found = errors(over_ranks(case, inputs, ranks=ranks, backend=backend), truth)
        assert max(found.values()) < EXACT, (ranks, found)


def test_a_dropped_transition_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control, and why M is never left out: under strong decay nobody would notice."""
    real = exchange._gather
    monkeypatch.setattr(exchange, "_gather", lambda x, transition, group: real(x, None, group))
    for name, visible in (("no decay", True), ("plain", True), ("strongest decay", False)):
        case, inputs = CASES[name], problem(CASES[name])
        found = over_ranks(case, inputs, ranks=4, backend=KdaBackend.dense)
        worst = max(errors(found, on_one_rank(case, inputs)).values())
        assert (worst > 1e-3) is visible, (name, worst)


@pytest.mark.parametrize("wrong", [lambda x: x.roll(1, 0), torch.zeros_like])
def test_a_wrong_or_lost_state_is_seen(wrong: object, monkeypatch: pytest.MonkeyPatch) -> None:
    real = exchange._gather
    monkeypatch.setattr(exchange, "_gather", lambda *args: wrong(real(*args)))
    case, inputs = CASES["plain"], problem(CASES["plain"])
    found = errors(
        over_ranks(case, inputs, ranks=2, backend=KdaBackend.dense), on_one_rank(case, inputs)
    )
    assert found["o"] > 1e-2
    assert found["d_k"] > 1e-2


def test_many_ranks_with_16_bit_inputs_are_no_worse_than_one() -> None:
    """States and transitions are composed in float32: over 16 ranks the error does not grow."""
    case = replace(CASES["no decay"], tokens=256, key_dim=8, value_dim=8, gate_shift=SLOW)
    inputs = {n: x.bfloat16() if n in SHARDED else x.float() for n, x in problem(case).items()}
    truth = on_one_rank(case, {n: x.double() for n, x in inputs.items()})["o"]
    wrong = [
        float((over_ranks(case, inputs, ranks=ranks, backend=KdaBackend.dense)["o"] - truth).norm())
        for ranks in (1, 16)
    ]
    assert wrong[1] < 1.1 * wrong[0]  # the rounding of the output to bfloat16 is all there is


def test_what_is_sent_does_not_depend_on_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    real = dist.all_gather_into_tensor

    def counted(out: Tensor, x: Tensor, group: object = None) -> object:
        sent.append(x.numel())
        return real(out, x, group=group)

    monkeypatch.setattr(dist, "all_gather_into_tensor", counted)
    for tokens in (64, 256):
        case = replace(CASES["plain"], tokens=tokens)
        over_ranks(case, problem(case), ranks=2, backend=KdaBackend.dense)
    # two ranks, forward and backward, two lengths: [state | transition] of two heads
    assert sent == [2 * 16 * (16 + 16)] * 8
