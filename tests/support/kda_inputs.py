"""Inputs, runs and comparisons shared by the tests of KDA."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ext.config.schema import Gate, KdaBackend
from megatron_ext.ops.kda import kda

NAMES = ("q", "k", "v", "z", "beta", "A_log", "dt_bias", "initial_state")


@dataclass(frozen=True)
class Case:
    """One problem; `gate_shift` moves the raw gate: +30 is the bound, -30 is no decay."""

    tokens: int
    batch: int = 1
    heads: int = 2
    key_dim: int = 16
    value_dim: int = 16
    gate: Gate = Gate.bounded
    gate_shift: float = 0.0
    gate_spread: float = 2.0
    offsets: tuple[int, ...] | None = None
    same_keys: bool = False
    seed: int = 0


def make(case: Case) -> dict[str, Tensor]:
    """Float64 leaf tensors of a case."""
    generator = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    b, t, h, key, value = case.batch, case.tokens, case.heads, case.key_dim, case.value_dim
    keys = normal(b, t, h, key)
    if case.same_keys:
        keys = normal(b, 1, h, key) + 1e-3 * keys
    documents = b if case.offsets is None else len(case.offsets) - 1
    inputs = {
        "q": normal(b, t, h, key),
        "k": keys,
        "v": normal(b, t, h, value),
        "z": case.gate_spread * normal(b, t, h, key) + case.gate_shift,
        "beta": normal(b, t, h) + (4.0 if case.same_keys else 0.0),
        "A_log": 0.3 * normal(h),
        "dt_bias": 0.3 * normal(h, key),
        "initial_state": normal(documents, h, key, value),
    }
    if case.gate is Gate.bounded_plain:
        del inputs["A_log"]
    return inputs


def run(
    case: Case,
    inputs: dict[str, Tensor],
    *,
    backend: KdaBackend,
    dtype: torch.dtype,
    device: str = "cpu",
    state_matters: bool = True,
) -> dict[str, Tensor]:
    """Output, final state and the gradient of every input, under fixed upstream gradients (zero for
    the final state unless it matters)."""
    leaves = {n: x.to(device, dtype).detach().requires_grad_() for n, x in inputs.items()}
    offsets = None if case.offsets is None else torch.tensor(case.offsets, device=device)
    o, final = kda(
        leaves["q"],
        leaves["k"],
        leaves["v"],
        leaves["z"],
        leaves["beta"],
        leaves.get("A_log"),
        leaves["dt_bias"],
        gate=case.gate,
        lower_bound=-5.0,
        cu_seqlens=offsets,
        initial_state=leaves["initial_state"],
        output_final_state=True,
        backend=backend,
    )
    assert final is not None
    generator = torch.Generator().manual_seed(99)
    upstream = [
        torch.randn(x.shape, generator=generator, dtype=torch.float64).to(device, x.dtype)
        for x in (o, final)
    ]
    if not state_matters:
        upstream[1].zero_()
    grads = torch.autograd.grad([o, final], list(leaves.values()), upstream)
    result = {"o": o.detach(), "final": final.detach()}
    return result | {f"d_{n}": g for n, g in zip(leaves, grads, strict=True)}


def errors(got: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, float]:
    """Relative L2 error of each tensor.

    The gate's gradient vanishes where the gate saturates or decays at once; it is a difference of
    terms of the size of the other gradients, whose rounding stays. So its norm is taken as at least
    a tenth of the key gradient's; that of A_log, a sum over tokens and channels of that difference
    times up to the log-decay itself, as at least the key gradient's. The gradient of beta is a
    product of two vectors a token, which cancels by chance where tokens are few: as at least a
    tenth of the value gradient's.
    """
    floors = {"d_z": 0.1, "d_dt_bias": 0.1, "d_A_log": 1.0}
    result: dict[str, float] = {}
    for name, exact in want.items():
        floor = floors.get(name, 0.0) * want["d_k"].norm().item()
        if name == "d_beta":
            floor = 0.1 * want["d_v"].norm().item()
        size = max(exact.norm().item(), floor, 1e-30)
        result[name] = (got[name].to(exact) - exact).norm().item() / size
    return result


def worst(case: Case) -> float:
    """Largest error of the dense path in float32 against the float64 recurrence."""
    inputs = {n: x.float().double() for n, x in make(case).items()}
    want = run(case, inputs, backend=KdaBackend.reference, dtype=torch.float64)
    got = run(case, inputs, backend=KdaBackend.dense, dtype=torch.float32)
    assert all(x.isfinite().all() for x in got.values())
    found = errors(got, want)
    return max(found.values())
