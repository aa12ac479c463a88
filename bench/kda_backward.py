"""KDA's backward pass inside chunks: ours beside fla's. python bench/kda_backward.py [--json FILE].

Needs a GPU. Times of our two kernels and of the three of fla whose place they take (fused WY,
products between tokens, running sum), on the same random flow along the recurrence: 96 heads x 8192
tokens and 12 x 65536, 128 wide. How exact they are: `tests/kernels/kda_backward.py`; the whole
operator: `bench/kda.py`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from common import Row, finish, free_memory, measured, start
from torch import Tensor

from megatron_ext.ops.kda import fla
from megatron_ext.ops.kda.own_backward import CHUNK, chunk_backward

SIZES = ((96, 8192), (12, 65536))
WIDTH = 128
SCALE = WIDTH**-0.5


@dataclass(frozen=True)
class Flow:
    """What the kernels are given; of the right shapes, sizes and ranges, but of no forward pass."""

    q: Tensor
    k: Tensor
    G: Tensor
    beta: Tensor
    inverse: Tensor
    states: Tensor
    v_new: Tensor
    d_out: Tensor
    d_states: Tensor
    d_new: Tensor


def flow(heads: int, tokens: int, device: torch.device) -> Flow:
    """Gates of a decay of 2.5 nats a token on average."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int, size: float = 1.0) -> Tensor:
        drawn = torch.randn(*shape, generator=generator, device=device, dtype=torch.bfloat16)
        return drawn.mul_(size)

    row, chunks = (1, tokens, heads, WIDTH), tokens // CHUNK
    q, k = (torch.nn.functional.normalize(draw(*row), dim=-1) for _ in range(2))
    g = torch.sigmoid(draw(*row).float()).mul_(-5 / math.log(2))
    lower = draw(1, chunks, CHUNK, heads, CHUNK, size=0.1).transpose(2, 3).tril_(-1)
    lower.diagonal(dim1=-2, dim2=-1).fill_(1)
    return Flow(
        q=q,
        k=k,
        G=g.view(1, chunks, CHUNK, heads, WIDTH).cumsum(2).view(row),
        beta=torch.sigmoid(draw(1, tokens, heads).float()),
        inverse=lower.transpose(2, 3).reshape(1, tokens, heads, CHUNK),
        states=draw(1, chunks, heads, WIDTH, WIDTH, size=0.3),
        v_new=draw(*row),
        d_out=draw(*row),
        d_states=draw(1, chunks, heads, WIDTH, WIDTH, size=0.3),
        d_new=draw(*row),
    )


def ours(given: Flow) -> Callable[[], object]:
    """Our two kernels."""
    return lambda: chunk_backward(**vars(given), scale=SCALE)


def fla_kernels(given: Flow) -> Callable[[], object]:
    """The three of fla; it has one of our gradients (of the query-key products) from before."""
    from fla.ops.kda.chunk_bwd import chunk_kda_bwd_wy_dqkg_fused
    from fla.ops.kda.chunk_intra import chunk_kda_bwd_intra
    from fla.ops.utils import chunk_local_cumsum

    f = given
    v, of_qk = torch.randn_like(f.v_new), f.inverse.float()

    def run() -> object:
        d_q, d_k, d_v, d_beta, d_g, of_kk = chunk_kda_bwd_wy_dqkg_fused(
            q=f.q,
            k=f.k,
            v=v,
            v_new=f.v_new,
            g=f.G,
            beta=f.beta,
            A=f.inverse,
            h=f.states,
            do=f.d_out,
            dh=f.d_states,
            dv=f.d_new,
            scale=SCALE,
        )
        d_q, d_k, d_beta, d_g = chunk_kda_bwd_intra(
            f.q, f.k, f.G, f.beta, of_qk, of_kk, d_q, d_k, d_beta, d_g, safe_gate=True
        )
        return d_q, d_k, d_v, d_beta, chunk_local_cumsum(d_g, chunk_size=CHUNK, reverse=True)

    return run


def main() -> None:
    """Measures and prints, the table last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the numbers there")
    options = parser.parse_args()
    device = start()
    if device.type != "cuda":
        parser.exit(2, "backward pass of KDA inside chunks: no GPU here, which its kernels need\n")
    rows: list[Row] = []
    for heads, tokens in SIZES:
        given = flow(heads, tokens, device)
        ways = {"ours": ours(given)}
        if fla.available(device):
            ways["fla"] = fla_kernels(given)
        for name, call in ways.items():
            rows.append(measured(f"{name} {heads} x {tokens}", call, device=device))
        del given, ways, call
        free_memory()
    finish({"backward pass inside chunks": rows}, failures=[], json_file=options.json)


if __name__ == "__main__":
    main()
