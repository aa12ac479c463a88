"""The backward kernel of KDA inside chunks, against autograd through the formulas in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatron_ext.ops.kda.own_backward import CHUNK, chunk_backward
from tests.kernels.common import DEVICE, draw, interpret_half_products

# In float32 products are exact in the interpreter only. Of bfloat16, an H200 showed 3e-3; the
# interpreter cuts digits off where a GPU rounds.
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
TOLERANCE = 1e-2 if DEVICE == "cuda" else 1e-5
HALF_TOLERANCE = 6e-3 if DEVICE == "cuda" else 8e-3

NAMES = ("d_q", "d_k", "d_v", "d_g", "d_beta")


def chunk(q, k, v, g, beta, state, scale):
    """One chunk and head: inverse, writes, output and next state from tokens [t, width]."""
    passed = g.cumsum(0)
    decay = passed[:, None] - passed[None]
    lower = torch.ones(len(q), len(q), dtype=torch.bool).tril().to(q.device)
    decay = torch.where(lower[..., None], decay, -math.inf).exp()
    qk = torch.einsum("ic,jc,ijc->ij", q, k, decay) * scale
    kk = torch.einsum("ic,jc,ijc->ij", k, k, decay).tril(-1)
    inverse = torch.linalg.inv(torch.eye(len(q), dtype=q.dtype, device=q.device) + beta * kk)
    new = inverse @ (beta * (v - (k * passed.exp()) @ state))
    out = scale * (q * passed.exp()) @ state + qk @ new
    after = passed[-1].exp()[:, None] * state + (k * (passed[-1] - passed).exp()).T @ new
    return passed / math.log(2), inverse, new, out, after


def problem(
    lengths,
    heads,
    width,
    *,
    dtype=torch.float32,
    gate=1.0,
    shift=0.0,
    same=False,
    size=1,
    flow=0.25,
):
    """Inputs of the kernel and the gradients wanted."""
    tokens = sum(lengths)
    q, k, v, z, d_out = (draw(tokens, heads, width, seed=i).to(dtype).double() for i in range(5))
    if same:
        k = (k[:1] + 0.05 * k).to(dtype).double()
    q, k = (torch.nn.functional.normalize(x, dim=-1).to(dtype).double() for x in (q, k))
    g = -5 * torch.sigmoid(gate * z + shift)
    beta = torch.sigmoid(draw(tokens, heads, seed=5).double())
    chunks = sum(-(-n // CHUNK) for n in lengths)
    states, d_states = (
        flow * draw(chunks, heads, width, width, seed=6 + i).to(dtype).double() for i in range(2)
    )
    d_out, d_states = d_out * size, d_states * size
    shape = (tokens, heads)
    passed, new, d_new = (g.new_empty(*shape, width) for _ in range(3))
    inverse = g.new_zeros(*shape, CHUNK)
    leaves = [x.requires_grad_() for x in (q, k, v, g, beta)]
    wanted = [torch.empty_like(x) for x in leaves]
    number, begin = 0, 0
    for length in lengths:
        for start in range(begin, begin + length, CHUNK):
            rows = slice(start, min(start + CHUNK, begin + length))
            for head in range(heads):
                part = [x[rows, head] for x in leaves]
                made = chunk(*part[:4], part[4][:, None], states[number, head], width**-0.5)
                loss = (made[3] * d_out[rows, head]).sum()
                loss = loss + (made[4] * d_states[number, head]).sum()
                grads = torch.autograd.grad(loss, [*part, made[2]])
                for x, grad in zip(wanted, grads, strict=False):
                    x[rows, head] = grad
                d_new[rows, head] = grads[-1]
                passed[rows, head], new[rows, head] = made[0].detach(), made[2].detach()
                count = len(part[0])
                inverse[rows, head, :count] = made[1].detach()
            number += 1
        begin += length
    given = [q, k, passed, beta, inverse, states, new, d_out, d_states, d_new]
    kinds = [dtype, dtype, torch.float32, torch.float32, *[dtype] * 6]
    return [x.detach().to(kind)[None] for x, kind in zip(given, kinds, strict=True)], wanted


def documents(lengths) -> dict[str, Tensor]:
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(DEVICE)
    indices = [(i, j) for i, n in enumerate(lengths) for j in range(-(-n // CHUNK))]
    return {"cu_seqlens": offsets, "chunk_indices": torch.tensor(indices).to(DEVICE)}


def errors(given, wanted, **more) -> dict[str, float]:
    found = chunk_backward(*given, scale=given[0].shape[-1] ** -0.5, **more)
    assert [x.shape for x in found] == [x[None].shape for x in wanted]
    sizes = [x.norm() for x in wanted]
    # a difference of larger terms: where decay is strong, less than a tenth of the keys' gradient
    sizes[3] = torch.maximum(sizes[3], sizes[1] / 10)
    return {
        name: ((a[0].double() - b).norm() / size).item()
        for name, a, b, size in zip(NAMES, found, wanted, sizes, strict=True)
    }


@pytest.mark.parametrize("length", [64, 130, 20, 33])
def test_chunks_whole_and_ragged(length):
    found = errors(*problem([length], 2, 128, dtype=DTYPE))
    assert max(found.values()) < TOLERANCE, found


@pytest.mark.parametrize(
    "options",
    [
        {"gate": 8.0},
        {"gate": 0.5, "shift": -6.0},
        {"shift": 30.0},
        {"same": True},
        {"gate": 8.0, "size": 1e-12},
        {"gate": 8.0, "size": 1e8},
        {"shift": 30.0, "size": 1e-12},
    ],
    ids=["mixed", "slow", "at the bound", "same keys", "tiny", "huge", "tiny at the bound"],
)
def test_gates_keys_and_scales_of_a_loss(options):
    found = errors(*problem([64], 1, 128, dtype=DTYPE, **options))
    assert max(found.values()) < TOLERANCE, found


def test_documents_of_a_row():
    lengths = [3, 64, 1, 70]
    given, wanted = problem(lengths, 1, 128, dtype=DTYPE)
    found = errors(given, wanted, **documents(lengths))
    assert max(found.values()) < TOLERANCE, found


def test_rows_of_a_batch():
    given, wanted = problem([30, 30], 2, 128, dtype=DTYPE)
    rows = [x.unflatten(1, (2, -1))[0] for x in given]
    found = chunk_backward(*rows, scale=128**-0.5)
    for a, b in zip(found, wanted, strict=True):
        assert (a.flatten(0, 1).double() - b).norm() < TOLERANCE * b.norm()


def test_bfloat16_is_enough_since_factors_are_rounded_once():
    interpret_half_products()
    # Without states all of the decay's gradient is a difference of sums over pairs; of unrounded
    # factors it would be 1e-2 off.
    given, wanted = problem([64], 1, 128, dtype=torch.bfloat16, gate=8.0, flow=0.0)
    found = errors(given, wanted)
    assert max(found.values()) < HALF_TOLERANCE, found


def test_other_widths_and_dtypes_are_refused():
    given, _ = problem([5], 1, 16)
    with pytest.raises(ValueError, match="allowed 128"):
        chunk_backward(*given, scale=1.0)


def test_nothing():
    given, _ = problem([5], 1, 128, dtype=DTYPE)
    given = [x[:, :0] for x in given]
    assert [x.shape[1] for x in chunk_backward(*given, scale=1.0)] == [0] * 5
