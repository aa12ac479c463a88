"""Speed and accuracy of KDA on this machine: python bench/kda.py [--json FILE].

On a GPU with fla: the bounded and the unbounded gate at 96 heads x 8192 tokens and 12 x 65536, in
bfloat16, with the floor of the arithmetic. Elsewhere: the dense path at the size of the nano model.
Medians of repeated runs after warm-ups (fla tries kernel variants at first use of a shape).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from common import H200_BANDWIDTH, H200_FLOPS, machine, milliseconds, relative_error, start
from torch import Tensor

from megatron_ext.config.schema import Gate, KdaBackend
from megatron_ext.ops.kda import kda, resolve_backend

# Cost of a token and head at width 128, chunk 64, bfloat16 in and out (backward recomputes).
FORWARD_FLOP, FORWARD_BYTES = 184_320, 1_282
BACKWARD_FLOP, BACKWARD_BYTES = 475_136, 2_308

GPU_SIZES = ((96, 8192, 128), (12, 65536, 128))
CPU_SIZES = ((4, 8192, 32),)


def inputs(
    heads: int, tokens: int, width: int, *, device: torch.device, dtype: torch.dtype
) -> list[Tensor]:
    """q, k, v, z, beta logits, A_log, dt_bias of one row of tokens, needing gradients."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=dtype)

    row = (1, tokens, heads, width)
    tensors = [draw(*row), draw(*row), draw(*row), draw(*row), draw(1, tokens, heads)]
    tensors += [torch.zeros(heads, device=device), torch.zeros(heads, width, device=device)]
    return [x.requires_grad_() for x in tensors]


def call(tensors: list[Tensor], *, gate: Gate, backend: KdaBackend) -> Tensor:
    """Output of one layer's operator."""
    o, _ = kda(*tensors, gate=gate, lower_bound=-5.0, backend=backend)
    return o


def floor(heads: int, tokens: int, *, backward: bool) -> float:
    """Milliseconds that an H200 needs at least."""
    flop, size = FORWARD_FLOP, FORWARD_BYTES
    forward = max(flop / H200_FLOPS, size / H200_BANDWIDTH)
    extra = max(BACKWARD_FLOP / H200_FLOPS, BACKWARD_BYTES / H200_BANDWIDTH) if backward else 0.0
    return 1e3 * heads * tokens * (forward + extra)


def accuracy(
    *, gate: Gate, backend: KdaBackend, device: torch.device, dtype: torch.dtype, width: int
) -> dict[str, float]:
    """Relative L2 error of the output and of the gradients of q, k, v, z, beta (256 tokens)."""

    def run(tensors: list[Tensor], used: KdaBackend) -> list[Tensor]:
        o = call(tensors, gate=gate, backend=used)
        weight = torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).to(o)
        return [o, *torch.autograd.grad(o, tensors[:5], weight)]

    tensors = inputs(2, 256, width, device=device, dtype=dtype)
    exact = run([x.detach().cpu().double().requires_grad_() for x in tensors], KdaBackend.reference)
    found = run(tensors, backend)
    names = ("o", "dq", "dk", "dv", "dz", "dbeta")
    return {
        name: relative_error(a.cpu(), b) for name, a, b in zip(names, found, exact, strict=True)
    }


def main() -> None:
    """Measures and prints, the table last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the numbers there")
    parser.add_argument("--repeats", type=int, default=10, help="timed runs a row")
    parser.add_argument("--only", default="", help="one row, as 96x8192:bounded")
    options = parser.parse_args()
    device = start()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    sizes = GPU_SIZES if device.type == "cuda" else CPU_SIZES
    rows: list[dict[str, object]] = []
    for gate in (Gate.bounded, Gate.softplus):
        if not (options.only or gate.value).endswith(gate.value):
            continue
        width = sizes[0][2]
        backend = resolve_backend(KdaBackend.auto, device, head_dim=width, gate=gate)
        error = accuracy(gate=gate, backend=backend, device=device, dtype=dtype, width=width)
        shown = "  ".join(f"{name} {value:.1e}" for name, value in error.items())
        print(f"error against float64, {backend.value} {gate.value}: {shown}", flush=True)
        for heads, tokens, width in sizes:
            if options.only not in ("", f"{heads}x{tokens}:{gate.value}"):
                continue
            tensors = inputs(heads, tokens, width, device=device, dtype=dtype)
            upstream = torch.randn(1, tokens, heads, width, device=device, dtype=dtype)

            def forward(gate: Gate = gate, x: list[Tensor] = tensors) -> Tensor:
                return call(x, gate=gate, backend=KdaBackend.auto)

            def both(x: list[Tensor] = tensors, grad: Tensor = upstream) -> object:
                return torch.autograd.grad(forward(), x, grad)

            with torch.no_grad():
                forward_ms = milliseconds(forward, device=device, repeats=options.repeats)
            both_ms = milliseconds(both, device=device, repeats=options.repeats)
            rows.append(
                {
                    "backend": backend.value,
                    "gate": gate.value,
                    "heads": heads,
                    "tokens": tokens,
                    "width": width,
                    "forward_ms": forward_ms,
                    "forward_backward_ms": both_ms,
                    "tokens_per_second": 1e3 * tokens / both_ms,
                    "floor_ms": floor(heads, tokens, backward=True) if width == 128 else None,
                    "error": error,
                }
            )
    print(f"\n{machine()}, {dtype}")
    print(
        f"{'backend':8} {'gate':9} {'heads x tokens':>15} {'fwd ms':>8} {'fwd+bwd ms':>11} "
        f"{'tokens/s':>10} {'H200 floor ms':>14}"
    )
    for row in rows:
        least = f"{row['floor_ms']:.2f}" if row["floor_ms"] is not None else "-"
        print(
            f"{row['backend']:8} {row['gate']:9} {row['heads']:>6} x {row['tokens']:<6} "
            f"{row['forward_ms']:8.2f} {row['forward_backward_ms']:11.2f} "
            f"{row['tokens_per_second']:10.0f} {least:>14}"
        )
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
