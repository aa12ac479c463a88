"""Cutting the sweep over states into segments changes nothing. The formula takes fla's place."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from megatron_ext.ops.kda import own_sweep
from megatron_ext.ops.kda.own_sweep import segments, starts
from megatron_ext.ops.kda.tiles import CHUNK

CPU = torch.device("cpu")
TOKENS, HEADS, WIDTH = 1000, 3, 8


def sweep(
    *,
    k: Tensor,
    w: Tensor,
    u: Tensor,
    gk: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor,
    **options: object,
) -> tuple[None, Tensor, Tensor]:
    """New values and last states of `chunk_gated_delta_rule_fwd_h`, in float64."""
    new, last = torch.empty_like(u), []
    for number, (begin, end) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
        state = k.new_zeros(k.shape[2], k.shape[3], u.shape[3])
        if initial_state is not None:
            state = initial_state[number].double()
        for first in range(begin, end, CHUNK):
            part = (0, slice(first, min(first + CHUNK, end)))
            new[part] = u[part] - torch.einsum("thk,hkv->thv", w[part], state)
            kept = torch.exp2(gk[part][-1])[..., None] * state
            state = kept + torch.einsum("thk,thv->hkv", k[part], new[part])
        last.append(state)
    return None, new, torch.stack(last)


@pytest.fixture
def drawn() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    row = (1, TOKENS, HEADS, WIDTH)
    decay = -0.1 * torch.rand(row, generator=generator, dtype=torch.float64)  # far from forgotten
    return {"k": 0.05 * normal(*row), "w": 0.05 * normal(*row), "u": normal(*row), "gk": decay}


@pytest.mark.parametrize("given", [False, True])
def test_segments_start_from_the_states_of_the_whole_sweep(drawn, given, monkeypatch) -> None:
    monkeypatch.setattr(own_sweep, "SHORTEST", 100)
    cut = segments(batch=1, tokens=TOKENS, heads=HEADS, device=CPU)
    assert cut is not None
    assert cut.cu_seqlens.tolist() == [*range(0, TOKENS, 128), TOKENS]
    state = torch.randn(1, HEADS, WIDTH, WIDTH, dtype=torch.float64) if given else None
    whole = {"cu_seqlens": torch.tensor([0, TOKENS])}
    _, want, last = sweep(**drawn, initial_state=state, **whole)
    k, w, u, decay = drawn.values()
    found = starts(sweep, cut, k, w, u, decay, state)
    assert found[1].norm() > 0.1 * last.norm()
    _, new, parts = sweep(**drawn, initial_state=found, cu_seqlens=cut.cu_seqlens)
    torch.testing.assert_close(new, want)
    torch.testing.assert_close(parts[-1:], last)


def test_chunks_are_those_of_the_whole_row(monkeypatch) -> None:
    cut = segments(batch=1, tokens=65_536 - 10, heads=12, device=CPU)
    assert cut is not None
    bounds = cut.cu_seqlens
    place, chunk = cut.chunk_indices.T
    assert (bounds[place] + CHUNK * chunk).tolist() == list(range(0, 65_526, CHUNK))
    counts = (bounds[1:] - bounds[:-1] + CHUNK - 1) // CHUNK
    assert cut.chunk_offsets.tolist() == [0, *counts.cumsum(0).tolist()]
    assert len(bounds) - 1 == 8


def test_what_is_not_cut() -> None:
    for batch, tokens, heads in ((2, 65_536, 12), (1, 65_536, 96), (1, 65_536, 25), (1, 4000, 1)):
        assert segments(batch=batch, tokens=tokens, heads=heads, device=CPU) is None
