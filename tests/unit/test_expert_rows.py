"""Rows of tokens in the order of experts, and their sums."""

from __future__ import annotations

import torch

from megatron_ext.ops.expert_rows import (
    expert_rows,
    order_by_expert,
    reorder,
    sum_rows,
    take_rows,
)


def test_rows_are_sorted_by_expert_and_found_by_token():
    chosen = torch.tensor([[1, 0, 1], [0, 0, 0], [1, 0, 0], [1, 0, 1]]).bool()
    rows = expert_rows(chosen, rows=5)
    assert rows.expert.tolist() == [0, 0, 0, 2, 2]
    assert rows.token.tolist() == [0, 2, 3, 0, 3]
    assert rows.order.tolist() == [0, 3, 1, 2, 4]
    assert rows.starts.tolist() == [0, 2, 2, 3, 5]


def test_values_and_gradients():
    torch.manual_seed(0)
    chosen = torch.rand(12, 5) < 0.4
    rows = expert_rows(chosen, rows=int(chosen.sum()))
    x = torch.randn(12, 3, dtype=torch.float64, requires_grad=True)
    back = sum_rows(take_rows(x, rows), rows)
    torch.testing.assert_close(back, x * chosen.sum(1, keepdim=True))
    assert torch.autograd.gradcheck(lambda x: sum_rows(take_rows(x, rows).square(), rows), (x,))


def test_sums_of_16_bit_rows_are_rounded_once():
    chosen = torch.ones(1, 300, dtype=torch.bool)
    rows = expert_rows(chosen, rows=300)
    x = torch.full((300, 1), 1.0, dtype=torch.bfloat16, requires_grad=True)
    # Added one by one in bfloat16, the sum would stay at 256.
    out = sum_rows(x, rows)
    assert out.dtype == torch.bfloat16
    assert out.item() == 300
    token = torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True)
    (grad,) = torch.autograd.grad(take_rows(token, rows).sum(), token)
    assert grad.item() == 300


def test_rows_of_ranks_come_into_the_order_of_experts_and_back():
    # Rank 0 has 2 rows for expert 0 and 1 for expert 2; rank 1 has 1, 3 and none.
    counts = torch.tensor([[2, 0, 1], [1, 3, 0]])
    order, back = order_by_expert(counts, rows=7)
    assert order.tolist() == [0, 1, 3, 4, 5, 6, 2]
    x = torch.randn(7, 2, dtype=torch.float64, requires_grad=True)
    assert torch.equal(reorder(reorder(x, order, back), back, order), x)
    assert torch.autograd.gradcheck(lambda x: reorder(x, order, back).square(), (x,))
    assert torch.autograd.gradgradcheck(lambda x: reorder(x, order, back).square(), (x,))
