"""The Triton kernels of routing: the same experts as `select_top_k`, weights as in float64."""

from __future__ import annotations

import pytest
import torch

from megatron_ext.ops.quantile import select_top_k
from megatron_ext.ops.router.routing import weights_of
from megatron_ext.ops.router.triton import route_tokens_triton
from tests.kernels.common import DEVICE, TOLERANCE, draw, errors, far_apart

DTYPE = torch.float32
SIZES = [(5, 896, 16), (6, 10, 4), (3, 33, 33), (4, 130, 2), (2, 1000, 40)]


def route(logits, bias, k, *, valid=None, positions=None, scaling=2.5):
    return route_tokens_triton(
        logits, bias, top_k=k, scaling=scaling, valid=valid, positions=positions
    )


def assert_chosen(found, bias, k, *, positions=None):
    """The choice is that of `select_top_k`, bit for bit, for the scores that are returned."""
    chosen, cutoff = select_top_k(found.scores + bias, k, positions=positions)
    assert torch.equal(found.map, chosen)
    assert torch.equal(found.cutoff, cutoff)


@pytest.mark.parametrize(("tokens", "experts", "k"), SIZES)
def test_weights_and_their_gradient_are_the_formula(tokens, experts, k):
    logits, bias = 2 * draw(tokens, experts), 0.3 * draw(experts, seed=1)
    found = route(logits, bias, k)
    assert_chosen(found, bias, k)
    assert (found.scores - torch.sigmoid(logits)).abs().max() < 3e-7

    def slow(wide):
        return weights_of(torch.sigmoid(wide), found.map, scaling=2.5)

    assert max(errors(lambda x: route(x, bias, k).weights, slow, [logits])) < TOLERANCE[DTYPE]


@pytest.mark.parametrize("positions", [None, [7, 7, 1000003, 2**40 + 5, 0, 1, 2, 3]])
@pytest.mark.parametrize(("experts", "k"), [(12, 4), (12, 12), (70, 1), (40, 17)])
def test_ties_are_dealt_out_by_position(experts, k, positions):
    if positions is not None:
        positions = torch.tensor(positions, device=DEVICE)
    for levels in (1, 2, 5):
        logits = torch.randint(levels, (8, experts), generator=torch.Generator().manual_seed(k))
        bias = torch.zeros(experts, device=DEVICE)
        found = route(logits.float().to(DEVICE), bias, k, positions=positions)
        assert_chosen(found, bias, k, positions=positions)
        assert (found.map.sum(1) == k).all()


def test_scores_of_any_size_and_none():
    logits = draw(7, 20)
    logits[0], logits[1], logits[2, 3:], logits[3, 5] = -200.0, 100.0, -90.0, torch.nan
    logits[4], logits[5, :15] = torch.nan, torch.nan
    # Biased scores below zero, of both zeros, and far apart.
    bias = torch.linspace(-1e-30, 3, 20).roll(7).to(DEVICE)
    bias[2:5] = torch.tensor([-0.0, -torch.inf, torch.inf])
    for k in (1, 4, 19, 20):
        found = route(logits.requires_grad_(), bias, k)
        assert_chosen(found, bias, k)
        assert (found.map.sum(1) == k).all()
        want = weights_of(torch.sigmoid(logits.detach()), found.map, scaling=2.5)
        torch.testing.assert_close(found.weights, want, equal_nan=True)
        # A step with a number that is none must end, whoever was chosen.
        assert found.weights[3:6].isnan().all()
        (grad,) = torch.autograd.grad(found.weights[:3].sum(), logits)
        assert grad[:3].isfinite().all()


def test_padding_takes_nobody_and_has_no_gradient():
    logits, bias = draw(6, 12).requires_grad_(), torch.zeros(12, device=DEVICE)
    valid = torch.tensor([True, False, True, True, False, False], device=DEVICE)
    found, whole = route(logits, bias, 3, valid=valid), route(logits, bias, 3)
    upstream = draw(6, 12, seed=4)
    (grad,) = torch.autograd.grad(found.weights, logits, upstream)
    (all_of_it,) = torch.autograd.grad(whole.weights, logits, upstream)
    for got, want in ((found.map, whole.map), (found.weights, whole.weights), (grad, all_of_it)):
        assert torch.equal(got[valid], want[valid])
        assert not got[~valid].any()
    assert torch.equal(found.cutoff, whole.cutoff)


def test_odd_strides_of_logits_and_gradients():
    wide = draw(5, 24)
    bias = torch.zeros(12, device=DEVICE)
    for logits in (wide[:, 12:], draw(12, 5).t()):
        logits = logits.detach().requires_grad_()
        found = route(logits, bias, 3)
        same = route(logits.detach().clone().requires_grad_(), bias, 3)
        assert torch.equal(found.weights, same.weights)
        upstream = draw(5, 24, seed=2)[:, :12]
        (grad,) = torch.autograd.grad(found.weights, logits, upstream, retain_graph=True)
        (copied,) = torch.autograd.grad(found.weights, logits, upstream.clone(), retain_graph=True)
        (summed,) = torch.autograd.grad(found.weights.sum(), logits)
        assert torch.equal(grad, copied)
        assert summed.abs().max() < 1e-6  # weights have a constant sum


def test_nothing_is_kept_without_gradients():
    logits, bias = draw(4, 12).requires_grad_(), torch.zeros(12, device=DEVICE)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda x: x):
        route(logits, bias, 3)
        assert sum(x.numel() * x.element_size() for x in kept if x is not None) == 4 * 3 * 6
        kept.clear()
        with torch.no_grad():
            assert route(logits, bias, 3).map.sum() == 12
    assert not kept


def test_rows_beyond_32_bit_offsets():
    logits, bias = far_apart(3, 8, DTYPE), torch.zeros(8, device=DEVICE)
    assert torch.equal(route(logits, bias, 2).weights, route(logits.clone(), bias, 2).weights)


def test_no_tokens():
    logits = draw(0, 8).requires_grad_()
    found = route(logits, torch.zeros(8, device=DEVICE), 2)
    assert found.map.shape == (0, 8)
    (grad,) = torch.autograd.grad(found.weights.sum(), logits)
    assert grad.shape == (0, 8)
