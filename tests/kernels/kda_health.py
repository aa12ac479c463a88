"""The Triton kernel of decay statistics: the numbers that plain torch counts."""

from __future__ import annotations

import pytest
import torch

from megatron_ext.config.schema import Gate
from megatron_ext.ops.kda.health import AttentionHealth, Maximum, Sum
from tests.kernels.common import DEVICE


def both(gate, dtype, *, tokens=301, heads=3, width=24, valid=None, bias=-2.0):
    """Statistics of two rows, cut out of wider ones as a layer does: by the kernel and by torch."""
    generator = torch.Generator().manual_seed(0)
    z = 3 * torch.randn(tokens, 2, heads * width + 8, generator=generator)
    z = z.to(dtype)[..., : heads * width].view(tokens, 2, heads, width).transpose(0, 1)
    slope = torch.randn(heads, generator=generator)
    shift = torch.randn(heads, width, generator=generator) + bias
    by_torch = AttentionHealth("cpu", valid_tokens=valid)
    given = None if gate is Gate.bounded_plain else slope
    by_torch.add_decay(z.double(), given, shift, gate=gate, lower_bound=-5.0)
    by_kernel = AttentionHealth(DEVICE, valid_tokens=valid)
    part = z[:, : valid if valid is not None else tokens].to(DEVICE)
    if part.numel():
        by_kernel._add_fused(
            part,
            None if given is None else given.to(DEVICE),
            shift.to(DEVICE),
            softplus=gate is Gate.softplus,
            bound=-5.0,
        )
    return by_kernel, by_torch


def compare(found, wanted):
    sums, right = found.sums.cpu(), wanted.sums
    exact = [Sum.GATES]
    assert torch.equal(sums[exact], right[exact])
    assert sums[Sum.DECAY] == pytest.approx(float(right[Sum.DECAY]), rel=1e-5)
    most = float(wanted.maxima[Maximum.TILE_DECAY])
    assert float(found.maxima[Maximum.TILE_DECAY]) == pytest.approx(most, rel=1e-5)
    # A gate next to an edge may fall on its other side.
    off = max(2, float(right[Sum.GATES]) * 1e-4)
    for place in (Sum.LOW, Sum.HIGH):
        assert abs(float(sums[place] - right[place])) <= off
    assert sums[Sum.HISTOGRAM :].sum() == right[Sum.HISTOGRAM :].sum()
    edges = (sums - right)[Sum.HISTOGRAM :].cumsum(0).abs()
    assert float(edges.max()) <= off


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("gate", list(Gate))
def test_statistics_of_decay_are_those_of_plain_torch(gate, dtype):
    compare(*both(gate, dtype))


def test_whole_tiles_and_heads_of_full_width():
    compare(*both(Gate.bounded, torch.bfloat16, tokens=256, heads=1, width=128))


def test_padding_is_left_out():
    found, wanted = both(Gate.bounded, torch.float32, valid=100)
    assert wanted.sums[Sum.GATES] == 2 * 100 * 3 * 24
    compare(found, wanted)


def test_rates_of_nothing_are_in_the_first_bin():
    found, wanted = both(Gate.softplus, torch.float32, bias=-200.0)
    assert wanted.sums[Sum.HISTOGRAM] == wanted.sums[Sum.GATES]
    compare(found, wanted)


def test_a_gate_that_is_not_a_number_shows():
    z = torch.zeros(1, 20, 1, 8, device=DEVICE)
    z[0, 3, 0, 2] = float("nan")
    health = AttentionHealth(DEVICE)
    bias = torch.zeros(1, 8, device=DEVICE)
    health._add_fused(z, bias[:, 0], bias, softplus=False, bound=-5.0)
    assert health.sums[Sum.DECAY].isnan()
    assert health.maxima[Maximum.TILE_DECAY].isnan()
    assert health.sums[Sum.HISTOGRAM :].sum() == z.numel()
