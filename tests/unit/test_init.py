"""Initial weights depend on (seed, name, index) alone."""

from __future__ import annotations

import math
import time

import pytest
import torch

from megatron_ext.layers.initializers import (
    Constant,
    LogOfUniform,
    LogUniformSoftplusInverse,
    Normal,
    Uniform,
)
from megatron_ext.model.init import fill
from megatron_ext.ops.counter_random import symmetric_uniform


def whole(shape, *, initializer=Normal(1.0), seed=7, name="w", dtype=torch.float32):  # noqa: B008
    out = torch.empty(shape, dtype=dtype)
    fill(out, initializer, seed=seed, name=name, global_shape=shape, offset=[0] * len(shape))
    return out


def splitmix_reference(key: int, index: int) -> float:
    mask = 2**64 - 1
    x = (key + index * 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    x ^= x >> 31
    top = x >> 40
    return (2 * (top - 2**24 if top >= 2**23 else top) + 1) / 2**24


def test_hash_is_splitmix64_of_python_integers():
    key = 0x0123456789ABCDEF
    step = 0x9E3779B97F4A7C15 - 2**64
    counter = torch.arange(1000, dtype=torch.int64) * step + key
    expected = torch.tensor([splitmix_reference(key, i) for i in range(1000)])
    assert torch.equal(symmetric_uniform(counter), expected)


@pytest.mark.parametrize(
    ("shape", "axis"), [((12, 40), 0), ((6, 40), 1), ((3, 8, 6), 1), ((3, 8, 6), 2), ((24,), 0)]
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_shards_are_slices_of_the_whole(shape, axis, ranks):
    full = whole(shape)
    size = shape[axis] // ranks
    for rank in range(ranks):
        local = list(shape)
        local[axis] = size
        offset = [0] * len(shape)
        offset[axis] = rank * size
        shard = torch.empty(local)
        fill(shard, Normal(1.0), seed=7, name="w", global_shape=shape, offset=offset)
        assert torch.equal(shard, full.narrow(axis, rank * size, size))


def test_shards_split_on_two_axes_and_views_are_slices_too():
    full = whole((12, 10, 7))
    # A view into a larger buffer, as the parts of a fused weight are.
    shard = torch.zeros(6, 5, 14)[..., ::2]
    fill(shard, Normal(1.0), seed=7, name="w", global_shape=(12, 10, 7), offset=(6, 5, 0))
    assert torch.equal(shard, full[6:, 5:])


def test_slicing_of_the_work_does_not_show():
    # Longer than a slice in a row, and several rows a slice.
    shape = (3, 70_001)
    full = whole(shape)
    shard = torch.empty(2, 40_000)
    fill(shard, Normal(1.0), seed=7, name="w", global_shape=shape, offset=(1, 30_001))
    assert torch.equal(shard, full[1:, 30_001:])
    assert torch.equal(whole((210_003,)).view(3, -1), full)


def test_position_far_beyond_32_bits_is_used():
    ends = []
    for start in (0, 2**32, 2**40):
        out = torch.empty(4)
        fill(out, Normal(1.0), seed=7, name="w", global_shape=(2**41,), offset=(start,))
        ends.append(out)
    assert not torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[1], ends[2])


def test_seed_and_name_matter_and_repetition_does_not():
    assert torch.equal(whole((50,)), whole((50,)))
    assert not torch.equal(whole((50,)), whole((50,), seed=8))
    assert not torch.equal(whole((50,)), whole((50,), name="v"))


def test_bfloat16_is_the_rounded_float32():
    assert torch.equal(whole((500,), dtype=torch.bfloat16), whole((500,)).bfloat16())


def test_normal_has_the_moments_of_a_normal():
    n = 1_000_000
    x = whole((n,), initializer=Normal(0.02)).double() / 0.02
    # Six standard errors of each estimate: sqrt(1/n), sqrt(2/n), sqrt(15/n), sqrt(96/n).
    assert abs(x.mean()) < 6 * math.sqrt(1 / n)
    assert abs(x.var() - 1) < 6 * math.sqrt(2 / n)
    assert abs((x**3).mean()) < 6 * math.sqrt(15 / n)
    assert abs((x**4).mean() - 3) < 6 * math.sqrt(96 / n)
    assert x.isfinite().all()
    # Neighbours, rows and other names are uncorrelated.
    y = whole((n,), initializer=Normal(1.0), name="v").double()
    for other in (x.roll(1), x.roll(1024), y):
        assert abs((x * other).mean()) < 6 * math.sqrt(1 / n)


def test_the_largest_symmetric_values_stay_inside_the_open_interval():
    s = torch.tensor([2 * 2**23 - 1, -(2 * 2**23 - 1)]).float() * 2.0**-24
    assert Normal(1.0).from_symmetric(s).isfinite().all()


def test_initializers_have_their_distributions():
    n = 100_000
    u = whole((n,), initializer=Uniform(-0.5, 0.25))
    assert -0.5 <= u.min() < -0.499
    assert 0.249 < u.max() <= 0.25
    assert torch.equal(whole((5,), initializer=Constant(3.0)), torch.full((5,), 3.0))
    step = torch.nn.functional.softplus(
        whole((n,), initializer=LogUniformSoftplusInverse(1e-3, 0.1))
    )
    # Half of a log-uniform law lies below the geometric mean; 6 standard errors of a share.
    assert abs((step < 1e-2).double().mean() - 0.5) < 3 / math.sqrt(n)
    # float32 softplus of the stored float32 is right to some units in its last place.
    assert step.min() > 1e-3 * (1 - 1e-5)
    assert step.max() < 0.1 * (1 + 1e-5)
    rate = whole((n,), initializer=LogOfUniform(1.0, 16.0)).exp()
    assert abs(rate.mean() - 8.5) < 6 * 15 / math.sqrt(12 * n)


def test_drawing_is_fast_enough_for_large_models():
    out = torch.empty(4_000_000)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        best = math.inf
        for _ in range(3):
            start = time.process_time()
            fill(out, Normal(0.02), seed=0, name="w", global_shape=out.shape, offset=[0])
            best = min(best, time.process_time() - start)
    finally:
        torch.set_num_threads(threads)
    # 60-90 M/s on one free core; a quarter of the goal of 20 M/s leaves room for a busy machine.
    assert out.numel() / best > 5e6
