"""The Triton kernel that sums the rows of each token, against a product with the map in float64."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from megatron_ext.ops.expert_rows import expert_rows, sum_rows, take_rows
from megatron_ext.ops.expert_rows.triton import sum_rows_triton
from tests.kernels.common import DEVICE, TOLERANCE, draw, errors, far_apart


def some_map(tokens: int, experts: int):
    """Tokens with none, some and all experts, and an expert without tokens."""
    chosen = draw(tokens, experts, seed=3) > 0
    chosen[0], chosen[1], chosen[:, 2] = False, True, False
    return expert_rows(chosen, rows=int(chosen.sum()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [8, 70, 1100])
def test_sums_and_their_gradients(dtype, width, monkeypatch):
    rows = some_map(9, 5)
    # Which backend can run is another question: the interpreter is no GPU.
    monkeypatch.setattr("megatron_ext.ops.expert_rows._fast", lambda x, kernels: True)
    slots = torch.zeros(9, len(rows.token), dtype=torch.float64, device=DEVICE)
    slots[rows.token, torch.arange(len(rows.token), device=DEVICE)] = 1
    x = draw(len(rows.token), width, dtype=dtype)
    assert max(errors(partial(sum_rows, rows=rows), lambda x: slots @ x, [x])) < TOLERANCE[dtype]
    tokens = draw(9, width, dtype=dtype)
    found = errors(partial(take_rows, rows=rows), lambda x: slots.T @ x, [tokens])
    assert max(found) < TOLERANCE[dtype]


def test_rows_beyond_32_bit_offsets():
    x = far_apart(3, 8, torch.bfloat16)
    order, starts = (torch.tensor(v, device=DEVICE) for v in ([2, 0, 1], [0, 2, 2, 3]))
    out = sum_rows_triton(x, order, starts).double()
    want = torch.stack([x[2].double() + x[0].double(), x[0].double() * 0, x[1].double()])
    assert (out - want).norm() <= TOLERANCE[torch.bfloat16] * want.norm()


def test_no_rows_and_no_tokens():
    none = torch.zeros(4, 3, dtype=torch.bool, device=DEVICE)
    rows = expert_rows(none, rows=0)
    assert not sum_rows_triton(draw(0, 8), rows.order, rows.starts).any()
    rows = expert_rows(none[:0], rows=0)
    assert sum_rows_triton(draw(0, 8), rows.order, rows.starts).shape == (0, 8)
