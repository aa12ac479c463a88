"""The mix over depth: python bench/attention_residuals.py [--json FILE] [--quick]

Every backend at 8192 tokens of width 7168 in bfloat16, with the norm that follows: time and GPU
kernels, what it keeps for the backward pass beside the sources, peak memory, and the worst error of
outputs and gradients against float64. The floor is what an H200 needs to move every source once
forward and twice backward. Then both mixes of a layer, each by itself and in two phases, with
finished sources that other layers of the block read too, at this width and at that of `mini`.
Without a GPU, and with --quick, a small size.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
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
from megatron_ext.ops.attn_res.gradients import with_gradient_sum
from megatron_ext.ops.attn_res.two_phase import first_phase, second_phase

EPS = 1e-5
LAYERS = 4  # of a block, which read the same finished sources
Tensors = list[Tensor]
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


def two_mixes(read: Tensors, running: Tensor, vectors: Tensors, backend: Backend) -> Tensors:
    """The inputs of both sublayers of a layer, a mix each."""
    one, two = vectors[:3], vectors[3:]
    later = [*read[:-1], running]
    return [mix(read, one, backend=backend), mix(later, two, backend=backend)]


def two_phases(read: Tensors, running: Tensor, vectors: Tensors, backend: Backend) -> Tensors:
    """The same with every finished source read once."""
    query, key, norm, bank_query, bank_key, later_norm = vectors
    once, bank = first_phase(
        read,
        query,
        key,
        bank_query=bank_query,
        bank_key_weight=bank_key,
        bank_sources=len(read) - 1,
        eps=EPS,
        norm_weight=norm,
        backend=backend,
    )
    again = second_phase(
        bank, running, bank_query, bank_key, eps=EPS, norm_weight=later_norm, backend=backend
    )
    return [once, again]


def layer_row(
    name: str,
    mixes: Callable[[Tensors, Tensor, Tensors, Backend], Tensors],
    count: int,
    *,
    backend: Backend,
    tokens: int,
    width: int,
    device: torch.device,
) -> Row:
    """Both mixes of a layer: a block's layers one after the other, divided by their number."""

    def draw(tokens: int, number: int) -> tuple[Tensors, Tensors, Tensors]:
        """Finished sources, running sums, and the vectors of both mixes of a layer."""
        size = {"tokens": tokens, "width": width, "device": device, "dtype": torch.bfloat16}
        finished, one = inputs(count - 1, **size)
        running, two = inputs(2 * number, **size)
        return finished, running, [*one, *two]

    def run(finished: Tensors, running: Tensors, vectors: Tensors, used: Backend) -> Tensors:
        bank = [with_gradient_sum(v) for v in finished]
        pairs = zip(running[::2], running[1::2], strict=True)
        return [x for r, later in pairs for x in mixes([*bank, r], later, vectors, used)]

    def both(parts: tuple[Tensors, Tensors, Tensors], used: Backend, ups: Tensors) -> Tensors:
        out = run(*parts, used)
        leaves = [x for part in parts for x in part]
        return [*out, *torch.autograd.grad(out, leaves, [up.to(out[0]) for up in ups])]

    parts = draw(256, 1)
    ups = [torch.randn_like(parts[0][0]) for _ in range(2)]
    wide = tuple([x.detach().double().requires_grad_() for x in part] for part in parts)
    exact = two_mixes([*wide[0], wide[1][0]], wide[1][1], wide[2], Backend.reference)
    leaves = [x for part in wide for x in part]
    exact += torch.autograd.grad(exact, leaves, [up.double() for up in ups])
    error = max(map(relative_error, both(parts, backend, ups), exact))
    parts = draw(tokens, LAYERS)
    ups = [torch.randn_like(parts[0][0])] * (2 * LAYERS)
    forward, timed = partial(run, *parts, backend), partial(both, parts, backend, ups)
    with torch.no_grad():
        forward_ms = milliseconds(forward, device=device)
    known = [x for part in parts for x in part]
    found: Row = {
        "width": width,
        "sources": count,
        "backend": f"{backend.value}, {name}",
        "fwd ms": forward_ms / LAYERS,
        "fwd+bwd ms": milliseconds(timed, device=device) / LAYERS,
        "kept MB": saved_bytes(forward, known=known) / LAYERS / 1e6,
        "peak GiB": extra_gib(timed, device=device),
        "error": error,
    }
    if device.type == "cuda":
        kernels = gpu_kernels(timed)
        found |= {"GPU ms": kernels.milliseconds / LAYERS, "kernels": kernels.launches / LAYERS}
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
    ours = Backend.triton if device.type == "cuda" else Backend.reference
    layer_rows = [
        layer_row(name, mixes, count, backend=ours, tokens=tokens, width=size, device=device)
        for size in ((width, 1536) if large else (width,))
        for count in (3, 4, 8, 9)
        for name, mixes in (("a mix each", two_mixes), ("two phases", two_phases))
    ]
    failures = [
        f"{found['backend']}, {found['sources']} sources: error {found['error']:.1e}, allowed "
        f"{ALLOWED_ERROR:.0e}"
        for found in [*rows, *layer_rows]
        if found["error"] > ALLOWED_ERROR
    ]
    title = f"mix with norm: {tokens} tokens of width {width}, {dtype}"
    layers = f"both mixes of a layer of {LAYERS}: {tokens} tokens, {dtype}"
    finish({title: rows, layers: layer_rows}, failures=failures, json_file=options.json)


if __name__ == "__main__":
    main()
