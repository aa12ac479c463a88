"""The Triton kernels of load and margins: the same integers as plain torch, and the same bias."""

from __future__ import annotations

from dataclasses import fields
from functools import partial

import pytest
import torch

from megatron_ext.config.schema import BinPlacement, KernelBackend, KernelOptions
from megatron_ext.ops.quantile import Bins, add_load, level, select_top_k
from megatron_ext.ops.quantile import triton as statistics
from megatron_ext.ops.quantile.triton import add_statistics_triton
from megatron_ext.ops.quantile.triton_update import level_triton
from tests.kernels.common import DEVICE, draw, far_apart

DENSE = KernelOptions(backend=KernelBackend.dense)
BINS = [
    Bins(128, BinPlacement.centred),
    Bins(1000, BinPlacement.uniform),
    Bins(2, BinPlacement.centred),
    Bins(4096, BinPlacement.centred, span=3.0),
    Bins(7, BinPlacement.uniform, span=0.2),
]


def both(bins, scores, bias, k, *, valid=None, times=1):
    """Counts and histograms by the kernel and by torch."""
    chosen, cutoff = select_top_k(scores + bias, k)
    experts = len(bias)
    made = []
    for fast in (True, False):
        counts = torch.zeros(experts + 1, dtype=torch.int64, device=DEVICE)
        histogram = bins.zeros(experts, device=DEVICE)
        for _ in range(times):
            if fast:
                add_statistics_triton(
                    counts,
                    histogram,
                    scores,
                    bins=bins,
                    map=chosen,
                    cutoff=cutoff,
                    bias=bias,
                    valid=valid,
                )
            else:
                add_load(counts, chosen, valid=valid)
                bins.add(histogram, scores, bias=bias, cutoff=cutoff, valid=valid)
        made.append((counts, histogram))
    return made


def assert_same(made):
    (counts, histogram), (slow_counts, slow_histogram) = made
    assert torch.equal(counts, slow_counts)
    assert torch.equal(histogram, slow_histogram)


# Several programs each way, without many tokens.
SMALL = {"TOKENS": 16, "AHEAD": 4, "EXPERTS": 32, "WINDOW": 16, "num_warps": 1}


@pytest.mark.parametrize("bins", BINS, ids=lambda bins: f"{bins.placement.name}-{bins.number}")
@pytest.mark.parametrize(("tokens", "experts", "k"), [(50, 40, 4), (5, 3, 3), (1, 1, 1)])
def test_every_margin_is_in_its_bin(bins, tokens, experts, k, monkeypatch):
    monkeypatch.setattr(statistics, "launch_settings", lambda kernel, size: SMALL)
    # Experts that differ, so that windows lie elsewhere; some of a token's scores tie.
    logits = draw(tokens, experts) + draw(experts, seed=1)
    scores = torch.sigmoid(logits)
    scores[: tokens // 4] = scores[: tokens // 4].round(decimals=1)
    made = both(bins, scores, 0.2 * draw(experts, seed=2), k, times=2)
    assert_same(made)
    assert made[0][1].sum() == 2 * tokens * experts


@pytest.mark.parametrize("bins", BINS[:2], ids=lambda bins: bins.placement.name)
def test_equal_margins_and_padding(bins):
    """All in one bin: as many as a window's counter of eight bits must hold."""
    scores, bias = torch.full((300, 4), 0.5, device=DEVICE), torch.zeros(4, device=DEVICE)
    valid = torch.arange(300, device=DEVICE) % 30 != 0
    made = both(bins, scores, bias, 3, valid=valid)
    assert_same(made)
    assert made[0][0][-1] == valid.sum()
    assert made[0][1].max() == valid.sum()


def test_rows_beyond_32_bit_offsets():
    scores, bias = far_apart(3, 8, torch.float32).sigmoid_(), torch.zeros(8, device=DEVICE)
    assert_same(both(BINS[0], scores, bias, 2))


def test_no_tokens():
    made = both(BINS[0], draw(0, 8), torch.zeros(8, device=DEVICE), 2)
    assert not made[0][0].any()
    assert not made[0][1].any()


def ended(counts, histogram, bias, **options):
    """State and record after the end of a step, by the kernels and by torch."""
    made = []
    for run in (level_triton, partial(level, kernels=DENSE)):
        state = [x.clone() for x in (counts, histogram, bias)]
        load = run(*state, **options, layer=3)
        found = {field.name: getattr(load, field.name) for field in fields(load)}
        made.append(dict(zip(("counts now", "histogram", "bias now"), state, strict=True)) | found)
    return made


def assert_ended_alike(made):
    for name, ours in made[0].items():
        theirs = made[1][name]
        if isinstance(ours, int):
            assert ours == theirs
            continue
        assert ours.dtype == theirs.dtype, name
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7, msg=name)
    assert not made[0]["counts now"].any()
    assert not made[0]["histogram"].any()


@pytest.mark.parametrize("bins", BINS, ids=lambda bins: f"{bins.placement.name}-{bins.number}")
@pytest.mark.parametrize(("tokens", "experts", "k"), [(80, 20, 4), (0, 6, 2), (1, 5, 5), (2, 3, 1)])
def test_a_step_ends_as_in_torch(bins, tokens, experts, k):
    scores, bias = torch.sigmoid(draw(tokens, experts)), 0.2 * draw(experts, seed=2)
    (counts, histogram), _ = both(bins, scores, bias, k)
    assert_ended_alike(made := ended(counts, histogram, bias, bins=bins, top_k=k))
    assert made[0]["tokens"] == tokens
    assert torch.equal(made[0]["bias"], bias)
    assert torch.equal(made[0]["bias now"], made[0]["new_bias"])


def test_counts_near_the_end_of_int32():
    histogram = torch.zeros(3, 130, dtype=torch.int32, device=DEVICE)
    histogram[:, 40], histogram[:, 70], histogram[:, 0] = 2**30, 2**30 - 7, 5
    counts = torch.tensor([2**31 - 3, 2**31 - 4, 0, 2**31 - 2], device=DEVICE)
    bias = torch.zeros(3, device=DEVICE)
    assert_ended_alike(made := ended(counts, histogram, bias, bins=BINS[0], top_k=2))
    assert made[0]["out_of_range"] == 15
    assert made[0]["dropped"] == 2 * (2**31 - 2) - (2**32 - 7)
