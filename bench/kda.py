"""Speed and accuracy of KDA on this machine: python bench/kda.py [--json FILE].

Every backend that runs here, on the same inputs: errors against the float64 recurrence, then times
with norm, gate and write strength. On a GPU bfloat16 at 96 heads x 8192 tokens and 12 x 65536, 128
wide, with the floor of the arithmetic, under a fast and a slow decay: cudnn's forward pass cuts a
sequence in pieces only where a state is soon forgotten. Elsewhere: the dense path at the size of
the nano model. Medians after warm-ups (fla tries kernel variants at the first use of a shape).
"""

from __future__ import annotations

import argparse
import time
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from common import (
    H200_BANDWIDTH,
    H200_FLOPS,
    Row,
    extra_gib,
    finish,
    free_memory,
    gpu_kernels,
    milliseconds,
    start,
)
from torch import Tensor

from megatron_ext.config.schema import Gate, KdaBackend
from megatron_ext.config.validate_kda import KEEPING
from megatron_ext.ops.kda import cudnn, fla, kda, own_fit
from megatron_ext.ops.kda.check import Problem, errors, rejection

# Cost of a token and head at width 128, chunk 64, bfloat16 in and out (backward recomputes).
FORWARD_FLOP, FORWARD_BYTES = 184_320, 1_282
BACKWARD_FLOP, BACKWARD_BYTES = 475_136, 2_308

GPU_SIZES = ((96, 8192, 128), (12, 65536, 128))
CPU_SIZES = ((4, 8192, 32),)
# Added to the gate's input: a decay of 2.5 nats a token on average, or of 0.01.
DECAYS = {"fast": 0.0, "slow": -6.0}
INPUTS = {
    "normal": {"gate_spread": 1.0},
    "mixed gates": {"gate_spread": 8.0},
    "slow decay": {"gate_spread": 0.5, "gate_shift": -6.0},
    "near-identical keys, slow": {"gate_spread": 0.5, "gate_shift": -6.0, "same_keys": True},
    "two documents": {"documents": True},
}


def inputs(
    heads: int,
    tokens: int,
    width: int,
    *,
    device: torch.device,
    dtype: torch.dtype,
    gate_shift: float = 0.0,
) -> list[Tensor]:
    """q, k, v, z, beta logits, A_log, dt_bias of one row of tokens, needing gradients."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=dtype)

    row = (1, tokens, heads, width)
    tensors = [draw(*row), draw(*row), draw(*row), draw(*row) + gate_shift, draw(1, tokens, heads)]
    tensors += [torch.zeros(heads, device=device), torch.zeros(heads, width, device=device)]
    return [x.requires_grad_() for x in tensors]


def call(
    tensors: list[Tensor], *, gate: Gate, backend: KdaBackend, recompute: bool = True
) -> Tensor:
    """Output of one layer's operator."""
    o, _ = kda(*tensors, gate=gate, lower_bound=-5.0, backend=backend, recompute=recompute)
    return o


def floor(heads: int, tokens: int, *, backward: bool) -> float:
    """Milliseconds that an H200 needs at least."""
    flop, size = FORWARD_FLOP, FORWARD_BYTES
    forward = max(flop / H200_FLOPS, size / H200_BANDWIDTH)
    extra = max(BACKWARD_FLOP / H200_FLOPS, BACKWARD_BYTES / H200_BANDWIDTH) if backward else 0.0
    return 1e3 * heads * tokens * (forward + extra)


def candidates(device: torch.device, *, width: int, wanted: Sequence[str]) -> list[KdaBackend]:
    """What runs here, the slowest first; says why others do not."""
    missing = {
        KdaBackend.fla: [] if fla.available(device) else ["needs a GPU and the package fla-core"],
        KdaBackend.triton: own_fit.misfits(
            device,
            torch.bfloat16,
            head_dim=width,
            value_dim=width,
            gate=Gate.bounded,
            lower_bound=own_fit.LOWEST_BOUND,
        ),
        KdaBackend.cudnn: cudnn.misfits(device, head_dim=width, gate=Gate.bounded),
    }
    for backend, reasons in missing.items():
        if reasons:
            print(f"left out: {backend.value} {'; '.join(reasons)}")
    found = [backend for backend, reasons in missing.items() if not reasons]
    if device.type == "cpu":
        found.append(KdaBackend.dense)
    return [backend for backend in found if not wanted or backend.value in wanted]


def accuracy(
    backends: Sequence[KdaBackend], *, device: torch.device, dtype: torch.dtype, width: int
) -> list[Row]:
    """Relative L2 errors of the output and the gradients of the raw inputs, 512 tokens, 4 heads."""
    rows: list[Row] = []
    for name, options in INPUTS.items():
        problem = Problem(heads=4, tokens=512, width=width, **options)
        for backend in backends:
            row: Row = {"input": name, "backend": backend.value}
            rows.append(row | errors(problem, backend=backend, device=device, dtype=dtype))
    return rows


def checks(
    backends: Sequence[KdaBackend], sizes: Sequence[tuple[int, int, int]], device: torch.device
) -> list[Row]:
    """Seconds that the check at the start of a run takes, first and later, and its verdict."""
    rows: list[Row] = []
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for heads, tokens, width in sizes:
        for backend in backends:
            problem, seconds = Problem(heads=heads, tokens=tokens, width=width), []
            for _ in range(2):
                begin = time.perf_counter()
                reason = rejection(problem, backend=backend, device=device, dtype=dtype)
                seconds.append(time.perf_counter() - begin)
            row: Row = {"backend": backend.value, "heads x tokens": f"{heads} x {tokens}"}
            rows.append(
                row | {"first s": seconds[0], "later s": seconds[1], "found": reason or "sound"}
            )
            free_memory()
    return rows


def times(
    backend: KdaBackend,
    gate: Gate,
    decay: str,
    size: tuple[int, int, int],
    *,
    device: torch.device,
    dtype: torch.dtype,
    repeats: int,
    recompute: bool = True,
) -> Row:
    """One row of the table of times."""
    heads, tokens, width = size
    row: Row = {
        "backend": backend.value,
        "gate": gate.value,
        "decay": decay,
        "heads x tokens": f"{heads} x {tokens}",
        "factors": "again" if recompute else "kept",
    }
    tensors = inputs(heads, tokens, width, device=device, dtype=dtype, gate_shift=DECAYS[decay])
    upstream = torch.randn(1, tokens, heads, width, device=device, dtype=dtype)
    forward = partial(call, tensors, gate=gate, backend=backend, recompute=recompute)

    def both() -> object:
        return torch.autograd.grad(forward(), tensors, upstream)

    with torch.no_grad():
        row["forward ms"] = milliseconds(forward, device=device, repeats=repeats)
    row["both ms"] = milliseconds(both, device=device, repeats=repeats)
    row["tokens/s"] = 1e3 * tokens / row["both ms"]
    if width == 128:
        row["H200 floor ms"] = floor(heads, tokens, backward=True)
        row["x floor"] = row["both ms"] / row["H200 floor ms"]
    if device.type == "cuda":
        found = gpu_kernels(both)
        row |= {"GPU ms": found.milliseconds, "kernels": found.launches}
        row["extra GiB"] = extra_gib(both, device=device)
        print(f"\nkernels of {backend.value} {gate.value} {decay} {heads} x {tokens}, ms:")
        for event in found.events[:14]:
            print(f"  {event.self_device_time_total / 1e3:7.3f} {event.count:3} {event.key[:90]}")
    return row


def main() -> None:
    """Measures and prints; what fails is told at the end, with the rest."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the numbers there")
    parser.add_argument("--repeats", type=int, default=10, help="timed runs a row")
    parser.add_argument("--backends", default="", help="of these only, as fla,cudnn")
    parser.add_argument("--only", default="", help="rows whose words hold this, as 96x8192:bounded")
    parser.add_argument(
        "--kept",
        action="store_true",
        help="fla and triton also as with train.kda_recompute=false, two rows each",
    )
    options = parser.parse_args()
    device = start()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    sizes = GPU_SIZES if device.type == "cuda" else CPU_SIZES
    width = sizes[0][2]
    wanted = [x for x in options.backends.split(",") if x]
    tables: dict[str, list[Row]] = {"errors": [], "checks": [], "times": []}
    failures: list[str] = []
    for backend in candidates(device, width=width, wanted=wanted):

        def attempt(
            what: str, table: str, function: partial[object], name: str = backend.value
        ) -> None:
            try:
                found = function()
                tables[table] += found if isinstance(found, list) else [found]
            # One backend that fails must not cost the numbers of the others; the exit code says it.
            except Exception as failure:
                traceback.print_exc()
                failures.append(f"{name} {what}: {type(failure).__name__}: {failure}")
            free_memory()

        attempt(
            "errors",
            "errors",
            partial(accuracy, [backend], device=device, dtype=dtype, width=width),
        )
        attempt("check", "checks", partial(checks, [backend], sizes, device))
        gates = [Gate.bounded]
        if backend not in (KdaBackend.cudnn, KdaBackend.triton):
            gates.append(Gate.softplus)
        for gate in gates:
            for decay in DECAYS:
                for size in sizes:
                    label = f"{size[0]}x{size[1]}:{gate.value}:{decay}"
                    if options.only not in label or (gate is Gate.softplus and decay == "slow"):
                        continue
                    work = partial(times, backend, gate, decay, size, device=device, dtype=dtype)
                    work = partial(work, repeats=options.repeats)
                    attempt(label, "times", work)
                    if options.kept and backend in KEEPING:
                        attempt(f"{label}:kept", "times", partial(work, recompute=False))
    tables["errors"].sort(key=lambda row: list(INPUTS).index(row["input"]))
    tables["times"].sort(key=lambda row: (row["heads x tokens"], row["gate"], row["decay"]))
    finish(tables, failures=failures, json_file=options.json)


if __name__ == "__main__":
    main()
