"""The mix over depth: python bench/attention_residuals.py [--json FILE] [--quick]

Every backend at 8192 tokens of width 7168 in bfloat16, with the norm that follows: time and GPU
kernels, what it keeps for the backward pass beside the sources, peak memory, and the worst error of
outputs and gradients against float64. The floor is what an H200 needs to move every source once
forward and twice backward. Without a GPU, and with --quick, a small size.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import torch
from common import (
    H200_BANDWIDTH,
    Row,
    both_ways,
    extra_gib,
    finish,
    free_memory,
    gpu_kernels,
    milliseconds,
    relative_error,
    saved_bytes,
    start,
)
from torch import Tensor

from megatron_ext.config.schema import AttentionResidualBackend as Backend
from megatron_ext.ops.attn_res import depth_mix, resolve_backend

EPS = 1e-5
BACKENDS = (Backend.reference, Backend.dense, Backend.fla, Backend.triton)
# One rounding to bfloat16's 8 bits is 2e-3; sums over tokens stay in float32.
ALLOWED_ERROR = 1e-2


def inputs(
    count: int, *, tokens: int, width: int, device: torch.device, dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor]]:
    """Sources [tokens, 1, width] whose size grows with depth; query, key weight, norm weight."""
    torch.manual_seed(count)
    sources = [
        (1.3**j * torch.randn(tokens, 1, width, device=device)).to(dtype).requires_grad_()
        for j in range(count)
    ]
    vectors = [
        0.05 * torch.randn(width, device=device),
        1 + 0.1 * torch.randn(width, device=device),
        (1 + 0.1 * torch.randn(width, device=device)).to(dtype),  # a norm's, as in a model
    ]
    return sources, [vector.requires_grad_() for vector in vectors]


def mix(sources: list[Tensor], vectors: list[Tensor], *, backend: Backend) -> Tensor:
    """One sublayer's input."""
    query, key_weight, norm_weight = vectors
    return depth_mix(sources, query, key_weight, eps=EPS, norm_weight=norm_weight, backend=backend)


def error(
    backend: Backend, count: int, *, width: int, device: torch.device, dtype: torch.dtype
) -> float:
    """Worst relative L2 error against the formula in float64."""
    sources, vectors = inputs(count, tokens=256, width=width, device=device, dtype=dtype)

    def run(sources: list[Tensor], vectors: list[Tensor], used: Backend) -> list[Tensor]:
        out = mix(sources, vectors, backend=used)
        upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
        return [out, *torch.autograd.grad(out, [*sources, *vectors], upstream.to(out))]

    wide = [[x.detach().double().requires_grad_() for x in part] for part in (sources, vectors)]
    pairs = zip(run(sources, vectors, backend), run(*wide, Backend.reference), strict=True)
    return max(relative_error(found, exact) for found, exact in pairs)


def row(
    backend: Backend,
    count: int,
    *,
    tokens: int,
    width: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Row:
    """Everything about one backend and one number of sources."""
    sources, vectors = inputs(count, tokens=tokens, width=width, device=device, dtype=dtype)
    leaves = [*sources, *vectors]
    forward = partial(mix, sources, vectors, backend=backend)
    both = both_ways(forward, leaves)
    with torch.no_grad():
        forward_ms = milliseconds(forward, device=device)
    both_ms = milliseconds(both, device=device)
    size = tokens * width * sources[0].element_size()
    floor = 1e3 * (count + 1) * size / H200_BANDWIDTH
    found: Row = {
        "sources": count,
        "backend": backend.value,
        "fwd ms": forward_ms,
        "fwd+bwd ms": both_ms,
        "times floor": both_ms / (3 * floor) if device.type == "cuda" else None,
        "kept MB": saved_bytes(forward, known=leaves) / 1e6,
        "peak GiB": extra_gib(both, device=device),
        "error": error(backend, count, width=width, device=device, dtype=dtype),
    }
    if device.type == "cuda":
        kernels = gpu_kernels(both)
        found |= {"GPU ms": kernels.milliseconds, "kernels": kernels.launches}
    free_memory()
    return found


def main() -> None:
    """Measures and prints, the table last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the numbers there")
    parser.add_argument("--quick", action="store_true", help="a small size")
    options = parser.parse_args()
    device = start()
    large = device.type == "cuda" and not options.quick
    tokens, width = (8192, 7168) if large else (64, 256)
    dtype = torch.bfloat16
    rows = [
        row(backend, count, tokens=tokens, width=width, device=device, dtype=dtype)
        for count in (2, 4, 8, 9)
        for backend in BACKENDS
        if resolve_backend(backend, device, dtype=dtype, width=width) is backend
    ]
    failures = [
        f"{found['backend']}, {found['sources']} sources: error {found['error']:.1e}, allowed "
        f"{ALLOWED_ERROR:.0e}"
        for found in rows
        if found["error"] > ALLOWED_ERROR
    ]
    title = f"mix with norm: {tokens} tokens of width {width}, {dtype}"
    finish({title: rows}, failures=failures, json_file=options.json)


if __name__ == "__main__":
    main()
