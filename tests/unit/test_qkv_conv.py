"""The convolution of q, k and v without a kernel of our own: `short_conv` of each part."""

from __future__ import annotations

import pytest
import torch

from megatron_ext.config.schema import KdaBackend
from megatron_ext.ops.kda import short_conv
from megatron_ext.ops.qkv_conv import qkv_conv


@pytest.mark.parametrize("backend", [KdaBackend.auto, KdaBackend.reference, KdaBackend.dense])
@pytest.mark.parametrize(("batch", "bounds"), [(2, None), (1, [0, 3, 4, 9])])
def test_each_part_has_its_own_filters_and_heads(backend, batch, bounds):
    torch.manual_seed(0)
    qkv = torch.randn(9, batch, 3 * 2 * 5, dtype=torch.float64)
    weight = torch.randn(3, 10, 4, dtype=torch.float64)
    cu_seqlens = None if bounds is None else torch.tensor(bounds)
    found = qkv_conv(qkv, weight, heads=2, cu_seqlens=cu_seqlens, backend=backend)
    for part, x in enumerate(found):
        alone = qkv[..., 10 * part : 10 * part + 10].transpose(0, 1)
        want, _ = short_conv(alone, weight[part], cu_seqlens=cu_seqlens)
        torch.testing.assert_close(x, want.unflatten(-1, (2, 5)), rtol=1e-12, atol=1e-12)
        assert x.is_contiguous()


def test_a_halo_is_looked_at_and_gives_nothing():
    qkv, weight = torch.randn(12, 1, 6).double(), torch.randn(3, 2, 4).double()
    whole = qkv_conv(qkv, weight, heads=1)
    rest = qkv_conv(qkv[4:], weight, heads=1, halo=3)
    for a, b in zip(whole, rest, strict=True):
        torch.testing.assert_close(a[:, 7:], b, rtol=1e-12, atol=1e-12)
