"""Our Triton kernels beside the best of others: python bench/operators.py [--json FILE] [--quick]

Each operator at sizes of K3, bfloat16, forward and backward: our kernel, what runs without it
(`dense`), the formula through torch.compile, and fla where it has the operator. The floor is what
an H200 needs to move the tensors once each way. Errors are the worst of outputs and gradients
against float64, on a small part. Without a GPU, and with --quick, small sizes and no kernels.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from common import (
    H200_BANDWIDTH,
    Row,
    both_ways,
    finish,
    free_memory,
    gpu_kernels,
    milliseconds,
    relative_error,
    start,
)
from torch import Tensor

from megatron_ext.config.schema import KdaBackend, KernelBackend, KernelOptions
from megatron_ext.ops.backend import triton_misfit
from megatron_ext.ops.cross_entropy import (
    chunk_for,
    cross_entropy_reference,
    linear_cross_entropy,
)
from megatron_ext.ops.expert_rows import ExpertRows, expert_rows, sum_rows
from megatron_ext.ops.gating import head_gate, head_gate_reference
from megatron_ext.ops.kda import fla
from megatron_ext.ops.qkv_conv import by_short_conv, qkv_conv
from megatron_ext.ops.rms_norm import rms_norm_reference, rms_norm_residual
from megatron_ext.ops.situ import situ_glu, situ_glu_reference

Function = Callable[..., Tensor]
TRITON, DENSE = (KernelOptions(backend=KernelBackend[name]) for name in ("triton", "dense"))
SITU = {"beta": 4.0, "linear_beta": 25.0}
WIDTH, TOP_K = 128, 16
NORMS = ((7168, 1), (1536, 2), (128, 48))  # width, rows a token
# One rounding to bfloat16's 8 bits is 2e-3; sums over tokens stay in float32.
ALLOWED_ERROR = 1e-2


@dataclass(frozen=True)
class Work:
    """One operator.

    Attributes:
        draw: inputs for a number of tokens.
        ways: implementations by name, all of the same inputs.
        exact: the formula, for inputs in float64.
        moved: bytes that forward and backward must move, for these inputs.
    """

    name: str
    draw: Callable[[int], list[Tensor]]
    ways: dict[str, Function]
    exact: Function
    moved: Callable[[list[Tensor]], int]


def normal(
    *shape: int, device: torch.device, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0
) -> Tensor:
    """Normal leaves."""
    return (scale * torch.randn(*shape, device=device)).to(dtype).requires_grad_()


def size(*tensors: Tensor) -> int:
    """Bytes."""
    return sum(x.numel() * x.element_size() for x in tensors)


def works(device: torch.device, *, heads: int, latent: int, inner: int, vocab: int) -> list[Work]:
    """The operators at one set of sizes."""
    draw = partial(normal, device=device)
    channels = 3 * heads * WIDTH

    def convolved(way: Callable[..., tuple[Tensor, ...]], **options: object) -> Function:
        return lambda qkv, weight: torch.stack(way(qkv, weight, heads=heads, **options))

    def rows_of(x: Tensor) -> ExpertRows:
        tokens = len(x) // TOP_K
        generator = torch.Generator().manual_seed(0)
        ranks = torch.rand(tokens, 8 * TOP_K, generator=generator).argsort(1).argsort(1)
        return expert_rows((ranks < TOP_K).to(x.device), rows=len(x))

    known: dict[int, ExpertRows] = {}

    def summed(x: Tensor, kernels: KernelOptions) -> Tensor:
        if len(x) not in known:
            known[len(x)] = rows_of(x)
        return sum_rows(x, known[len(x)], kernels=kernels)

    def gated(o: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        return head_gate_reference(o, gate, weight, 1e-5)

    def normed(x: Tensor, weight: Tensor, kernels: KernelOptions) -> Tensor:
        return torch.stack(rms_norm_residual(x, weight, eps=1e-5, kernels=kernels))

    def normed_exactly(x: Tensor, weight: Tensor) -> Tensor:
        return torch.stack([rms_norm_reference(x, weight, 1e-5), x])

    def norm(width: int, rows: int) -> Work:
        return Work(
            f"RMS norm and residual, {rows} rows a token, width {width}",
            lambda tokens: [draw(tokens * rows, width), draw(width)],
            {
                "triton": partial(normed, kernels=TRITON),
                "dense": partial(normed, kernels=DENSE),
                "compiled": torch.compile(normed_exactly),
            },
            normed_exactly,
            # x and y, then x, both gradients and the result. Four more are this benchmark's own: a
            # copy of both results to one tensor.
            lambda given: 10 * size(given[0]),
        )

    def labels(hidden: Tensor) -> Tensor:
        return torch.arange(len(hidden), device=device) % vocab

    def lost(hidden: Tensor, weight: Tensor, kernels: KernelOptions) -> Tensor:
        return linear_cross_entropy(
            hidden, weight, labels(hidden), chunk_tokens=chunk_for(vocab), kernels=kernels
        )

    def lost_exactly(hidden: Tensor, weight: Tensor) -> Tensor:
        return cross_entropy_reference(hidden, weight, labels(hidden))

    conv_ways = {
        "triton": convolved(qkv_conv, kernels=TRITON),
        "dense": convolved(by_short_conv, backend=KdaBackend.dense),
    }
    if fla.available(device):
        conv_ways["fla"] = convolved(by_short_conv, backend=KdaBackend.fla)
    return [
        Work(
            f"SiTU-GLU, {TOP_K} rows a token, width {inner}",
            lambda tokens: [draw(tokens * TOP_K, 2 * inner)],
            {
                "triton": partial(situ_glu, backend=KernelBackend.triton, **SITU),
                "dense": partial(situ_glu, backend=KernelBackend.dense, **SITU),
                "compiled": torch.compile(partial(situ_glu_reference, **SITU)),
            },
            partial(situ_glu_reference, **SITU),
            lambda given: 4 * size(*given),  # x, half of it, half of it and x again, x
        ),
        Work(
            f"norm and output gate, {heads} heads",
            lambda tokens: [
                draw(1, tokens, heads, WIDTH),
                draw(tokens, 1, heads * WIDTH),
                draw(WIDTH),
            ],
            {
                "triton": lambda o, g, w: head_gate(o, g, weight=w, eps=1e-5, kernels=TRITON),
                "dense": lambda o, g, w: head_gate(o, g, weight=w, eps=1e-5, kernels=DENSE),
                "compiled": torch.compile(gated),
            },
            gated,
            lambda given: 4 * size(*given),
        ),
        *(norm(width, rows) for width, rows in NORMS),
        Work(
            f"convolution of q, k and v, {heads} heads",
            lambda tokens: [
                draw(tokens, 1, channels),
                draw(3, heads * WIDTH, 4, dtype=torch.float32),
            ],
            conv_ways,
            convolved(by_short_conv, backend=KdaBackend.dense),
            # One more copy, of three parts to one tensor and back, is this benchmark's own.
            lambda given: 5 * size(given[0]),
        ),
        Work(
            f"sums over {TOP_K} experts, width {latent}",
            lambda tokens: [draw(tokens * TOP_K, latent)],
            {"triton": partial(summed, kernels=TRITON), "dense": partial(summed, kernels=DENSE)},
            partial(summed, kernels=DENSE),
            lambda given: 2 * size(*given),
        ),
        Work(
            f"losses, width {2 * latent}, vocabulary {vocab}",
            # Logits of some size 1: of larger ones bfloat16 keeps too little to compare.
            lambda tokens: [draw(n, 2 * latent, scale=latent**-0.25) for n in (tokens, vocab)],
            {
                "triton": partial(lost, kernels=TRITON),
                "dense": partial(lost, kernels=DENSE),
                "compiled": torch.compile(lost_exactly),
            },
            lost_exactly,
            # Logits: written and read, again in the backward pass, there overwritten and read
            # twice. The floor is beside that of the products.
            lambda given: 7 * 2 * len(given[0]) * len(given[1]),
        ),
    ]


def error(work: Work, way: Function) -> float:
    """Worst relative L2 error of the result and the gradients, on 64 tokens."""
    torch.manual_seed(1)
    narrow = work.draw(64)
    wide = [x.detach().double().requires_grad_() for x in narrow]
    found, exact = way(*narrow), work.exact(*wide)
    upstream = torch.randn(found.shape, generator=torch.Generator().manual_seed(2)).bfloat16()
    pairs = [(found, exact)]
    pairs += zip(
        torch.autograd.grad(found, narrow, upstream.to(found)),
        torch.autograd.grad(exact, wide, upstream.to(exact)),
        strict=True,
    )
    return max(relative_error(a, b) for a, b in pairs)


def table(work: Work, *, tokens: int, device: torch.device) -> list[Row]:
    """Every implementation that can run here."""
    rows: list[Row] = []
    for name, way in work.ways.items():
        if name == "triton" and triton_misfit(device, torch.bfloat16):
            continue
        inputs = work.draw(tokens)
        both = both_ways(partial(way, *inputs), inputs)
        took = milliseconds(both, device=device)
        floor = 1e3 * work.moved(inputs) / H200_BANDWIDTH
        row: Row = {"way": name, "fwd+bwd ms": took, "floor ms": floor, "error": error(work, way)}
        if device.type == "cuda":
            kernels = gpu_kernels(both)
            row |= {
                "GPU ms": kernels.milliseconds,
                "times floor": kernels.milliseconds / floor,
                "kernels": kernels.launches,
            }
        rows.append(row)
        free_memory()
    return rows


def main() -> None:
    """Measures and prints, the tables last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the numbers there")
    parser.add_argument("--only", default="", help="operators whose name begins like this")
    parser.add_argument("--quick", action="store_true", help="small sizes")
    options = parser.parse_args()
    device = start()
    large = device.type == "cuda" and not options.quick
    sizes = (96, 3584, 3072, 20480) if large else (2, 32, 48, 96)
    tokens = 8192 if large else 64
    named = dict(zip(("heads", "latent", "inner", "vocab"), sizes, strict=True))
    tables, failures = {}, []
    chosen = [work for work in works(device, **named) if work.name.startswith(options.only)]
    if not chosen:
        parser.error(f"--only {options.only!r}: no operator's name begins so")
    for work in chosen:
        rows = table(work, tokens=tokens, device=device)
        tables[f"{work.name}: {tokens} tokens"] = rows
        failures += [
            f"{work.name}, {row['way']}: error {row['error']:.1e}, allowed {ALLOWED_ERROR:.0e}"
            for row in rows
            if row["error"] > ALLOWED_ERROR
        ]
    finish(tables, failures=failures, json_file=options.json)


if __name__ == "__main__":
    main()
