"""Whether a backend of KDA computes what the formula says, on this device and on one same input.

The kernels run at the shape of training, so that what is judged, and what they choose or compile at
their first call, is what training will use. KDA is causal and its heads are independent: the
formula needs only the first tokens of the first and the last head, in float64 on the CPU.

Shapes: B batch, T tokens, H heads, K width of a key and value head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_ext.config.schema import Gate, KdaBackend
from megatron_ext.ops.kda import kda

TOKENS = 144  # of the formula: three chunks of 64, the last one cut
DOCUMENT = 70  # where the second document begins, in no chunk's place
NAMES = ("q", "k", "v", "z", "beta_logits", "A_log", "dt_bias")


@dataclass(frozen=True)
class Problem:
    """A call of KDA on one rank, and how its inputs are drawn.

    Attributes:
        documents: packed in one row, as ``cu_seqlens`` gives them; then ``batch`` is 1.
        gate_shift: is added to the raw gate; -6 is a slow decay, 0 mostly a fast one.
        gate_spread: standard deviation of the raw gate.
        same_keys: keys that differ by 1e-3, written at full strength: the hardest case.
        recompute: as ``kda`` takes it; the formula has no such choice.
    """

    heads: int
    tokens: int
    width: int
    batch: int = 1
    gate: Gate = Gate.bounded
    lower_bound: float = -5.0
    documents: bool = False
    gate_shift: float = 0.0
    gate_spread: float = 2.0
    same_keys: bool = False
    recompute: bool = True


@dataclass(frozen=True)
class Bound:
    """Largest relative L2 error that a backend is known to need.

    Attributes:
        of_gate: of the gradient of the gate's input.
        of_sums: of the gradients of A_log and dt_bias, sums of that over tokens which may cancel.
    """

    values: float
    of_gate: float
    of_sums: float

    def limit(self, name: str) -> float:
        """Of the result `o`, or `d_` and the name of an input."""
        special = {"d_z": self.of_gate, "d_A_log": self.of_sums, "d_dt_bias": self.of_sums}
        return special.get(name, self.values)


def bound(backend: KdaBackend, dtype: torch.dtype, *, tf32: bool) -> Bound:
    """What is allowed: 1.7 to 4 times what was measured on H200 (docs/kda.md).

    Args:
        backend: that runs; not ``auto``.
        dtype: of the tensors.
        tf32: float32 matrix products have the 11 bits of TensorFloat-32: always in fla's kernels.
    """
    if backend is KdaBackend.cudnn:
        return Bound(1e-2, 6e-2, 2e-1)
    half = dtype in (torch.bfloat16, torch.float16)
    kernels = backend in (KdaBackend.fla, KdaBackend.triton)
    if kernels or half or (tf32 and dtype is torch.float32):
        return Bound(1e-2, 1e-2, 5e-2)
    return Bound(1e-5, 1e-5, 1e-5)


def rejection(
    problem: Problem, *, backend: KdaBackend, device: torch.device, dtype: torch.dtype
) -> str | None:
    """Why a backend must not be used, with every error over its bound; None where it is sound.

    Draws from no generator that training uses. What a kernel raises is a reason too; memory that
    runs out is raised.
    """
    tf32 = device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
    allowed = bound(backend, dtype, tf32=tf32)
    try:
        found = errors(problem, backend=backend, device=device, dtype=dtype)
    except torch.OutOfMemoryError:
        raise
    # Compilers and drivers raise what they like. The run stops in any case, with what they said.
    except Exception as failure:
        return f"it fails with {type(failure).__name__}: {' '.join(str(failure).split())[:600]}"
    wrong = [
        f"{name} {error:.1e}, allowed {allowed.limit(name):.0e}"
        for name, error in found.items()
        if not error <= allowed.limit(name)
    ]
    return f"relative error against float64: {'; '.join(wrong)}" if wrong else None


def errors(
    problem: Problem, *, backend: KdaBackend, device: torch.device, dtype: torch.dtype
) -> dict[str, float]:
    """Relative L2 error of the output and of each input's gradient; NaN where a result is NaN.

    The gradient of the gate is a difference of terms of the size of the other gradients, whose
    rounding stays where it vanishes (a saturated gate): its norm is taken as at least a tenth of
    the key gradient's, that of A_log, a sum of it times the log-decay, as at least all of it.
    """
    with torch.inference_mode(False), torch.enable_grad():
        inputs = draw(problem, dtype=dtype)
        shown = min(problem.tokens, TOKENS)
        heads = torch.tensor(sorted({0, problem.heads - 1}))
        generator = torch.Generator().manual_seed(1)
        part = torch.randn(1, shown, len(heads), problem.width, generator=generator).to(dtype)
        filled = {n: _fill(n, x.to(device), problem) for n, x in inputs.items()}
        upstream = torch.zeros_like(filled["v"])
        upstream[:1, :shown, heads.to(device)] = part.to(device)
        found = _run(problem, filled, upstream, backend=backend)
        exact = _run(
            replace(problem, recompute=True),
            {name: _shown(name, x, shown, heads).double() for name, x in inputs.items()},
            part.double(),
            backend=KdaBackend.reference,
        )
    floors = {"d_z": 0.1, "d_dt_bias": 0.1, "d_A_log": 1.0}
    keys, result = exact["d_k"].norm().item(), {}
    for name, want in exact.items():
        size = max(want.norm().item(), floors.get(name, 0.0) * keys, 1e-30)
        got = _shown(name.removeprefix("d_"), found[name], shown, heads.to(device)).cpu()
        result[name] = (got.double() - want).norm().item() / size
    return result


def draw(problem: Problem, *, dtype: torch.dtype) -> dict[str, Tensor]:
    """Inputs of ``kda`` by name, of one row, on the CPU; those of tokens in ``dtype``, A_log and
    dt_bias in float32 (float64 for float64). More tokens than the formula is asked for repeat them.
    """
    generator = torch.Generator().manual_seed(0)
    heads, width = problem.heads, problem.width
    wide = torch.promote_types(dtype, torch.float32)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(wide)

    row = (1, min(problem.tokens, 2 * TOKENS), heads, width)
    key = normal(*row)
    if problem.same_keys:
        key = normal(1, 1, heads, width) + 1e-3 * key
    inputs = {
        "q": normal(*row).to(dtype),
        "k": key.to(dtype),
        "v": normal(*row).to(dtype),
        "z": (problem.gate_spread * normal(*row) + problem.gate_shift).to(dtype),
        "beta_logits": (normal(*row[:3]) + (4.0 if problem.same_keys else 0.0)).to(dtype),
        "A_log": 0.3 * normal(heads),
        "dt_bias": 0.3 * normal(heads, width),
    }
    if problem.gate is Gate.bounded_plain:
        del inputs["A_log"]
    return inputs


def _fill(name: str, x: Tensor, problem: Problem) -> Tensor:
    """A row of `draw` in the shape of the problem, again and again."""
    if name in ("A_log", "dt_bias"):
        return x
    turns = -(-problem.tokens // x.shape[1])
    return x.repeat(problem.batch, turns, *(1,) * (x.ndim - 2))[:, : problem.tokens].contiguous()


def _shown(name: str, x: Tensor, tokens: int, heads: Tensor) -> Tensor:
    """The part of a tensor that the formula is asked for."""
    if name in ("A_log", "dt_bias"):
        return x[heads]
    return x[:1, :tokens, heads]


def _run(
    problem: Problem,
    inputs: dict[str, Tensor],
    upstream: Tensor,
    *,
    backend: KdaBackend,
) -> dict[str, Tensor]:
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    tokens = inputs["q"].shape[1]
    offsets = None
    if problem.documents:
        bounds = [0, tokens] if tokens <= DOCUMENT else [0, DOCUMENT, tokens]
        offsets = torch.tensor(bounds, dtype=torch.int32, device=upstream.device)
    q, k, v, z, beta_logits, dt_bias = (leaves[n] for n in NAMES if n != "A_log")
    out, _ = kda(
        *(q, k, v, z, beta_logits, leaves.get("A_log"), dt_bias),
        gate=problem.gate,
        lower_bound=problem.lower_bound,
        cu_seqlens=offsets,
        backend=backend,
        recompute=problem.recompute,
    )
    gradients = torch.autograd.grad(out, list(leaves.values()), upstream)
    found = {f"d_{name}": x for name, x in zip(leaves, gradients, strict=True)}
    return {"o": out.detach(), **found}
