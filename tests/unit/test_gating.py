"""The output gate against its formula, in values and gradients, and what it keeps."""

from __future__ import annotations

import pytest
import torch

from megatron_ext.ops.gating import head_gate, head_gate_reference


def inputs(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """o [2, 5, 3, 4], gate [5, 2, 12], weight [4]."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 5, 3, 4), (5, 2, 12), (4,))
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [x.to(dtype).requires_grad_() for x in drawn]


@pytest.mark.parametrize("norm", [False, True])
def test_values_and_gradients_are_those_of_the_formula(norm):
    o, gate, weight = inputs()
    leaves = [o, gate, weight] if norm else [o, gate]
    results = []
    for values in (
        head_gate(o, gate, weight=weight if norm else None, eps=1e-2),
        head_gate_reference(o, gate, weight if norm else None, 1e-2),
    ):
        results.append([values, *torch.autograd.grad(values.sin().sum(), leaves)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert results[0][0].is_contiguous()


def test_one_number_by_hand():
    o = torch.tensor([3.0, 4.0], dtype=torch.float64).view(1, 1, 1, 2)
    gate, weight = torch.zeros(1, 1, 2, dtype=torch.float64), torch.tensor([2.0, 1.0]).double()
    # The root of the mean square of 3 and 4 is sqrt(12.5); the gate is a half.
    out = head_gate(o, gate, weight=weight)
    torch.testing.assert_close(out.flatten(), torch.tensor([3.0, 2.0]).double() / 12.5**0.5)


def test_only_16_bit_inputs_are_kept():
    o, gate, weight = inputs(torch.bfloat16)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.dtype), lambda x: x):
        head_gate(o, gate)
        head_gate(o, gate, weight=weight, eps=1e-2)
    assert set(kept) == {torch.bfloat16}


def test_shapes_that_do_not_fit_are_errors():
    o, gate, weight = inputs()
    with pytest.raises(ValueError, match="allowed"):
        head_gate(o, gate.transpose(0, 1))
    with pytest.raises(ValueError, match="allowed"):
        head_gate(o, gate, weight=weight[:3])
