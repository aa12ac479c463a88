"""Router and latent mixture of experts on one rank, against their formulas in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from megatron.core import tensor_parallel

from megatron_ext.config.schema import (
    BalanceOptions,
    BalanceRule,
    Dispatcher,
    ExpertOptions,
    RouterMatmul,
)
from megatron_ext.layers.balance.build import RULES
from megatron_ext.layers.latent_moe import LatentMoE
from megatron_ext.layers.replay import RoutingTape
from megatron_ext.layers.router import BalancedRouter
from megatron_ext.ops.router import router_logits, router_logits_reference
from megatron_ext.ops.situ import situ_glu_reference
from tests.support.one_rank import draw, one_rank, small_config

OPTIONS = ExpertOptions(
    num_experts=6,
    top_k=2,
    latent_size=10,
    feed_forward_size=7,
    shared_feed_forward_size=9,
    scaling=1.5,
)
NONE = BalanceOptions(rule=BalanceRule.none)
BOUNDS = {"beta": 4.0, "linear_beta": 25.0}


@pytest.fixture(scope="module")
def groups():
    with one_rank() as collection:
        yield collection


def layer(groups, options=OPTIONS, balance=NONE, **changes):
    experts = {"num_moe_experts": options.num_experts, "moe_router_topk": options.top_k}
    config = small_config(**experts, moe_router_load_balancing_type="none", **changes)
    made = LatentMoE(config, options=options, balance=balance, **BOUNDS, pg_collection=groups)
    made.set_layer_number(3)
    draw(made)
    return made


def formula(moe, x, *, options=OPTIONS):
    """Token by token, as the equations read."""
    scores = torch.sigmoid(x @ moe.router.weight.T)
    biased = scores + moe.router.balancer.bias.to(x.dtype)
    out = torch.zeros_like(x)
    for place in torch.cartesian_prod(*map(torch.arange, x.shape[:2])).tolist():
        s, token = scores[tuple(place)], x[tuple(place)]
        taken = biased[tuple(place)].topk(options.top_k).indices
        weights = s[taken] / s[taken].sum() * options.scaling
        latent = token if moe.down is None else moe.down.weight @ token
        total = torch.zeros_like(latent)
        for expert, weight in zip(taken.tolist(), weights, strict=True):
            gate, up = moe.experts.fc1[expert] @ latent
            total = total + weight * (
                moe.experts.fc2[expert] @ situ_glu_reference(gate, up, **BOUNDS)
            )
        if moe.norm is not None:
            total = total / (total.square().mean() + 1e-5).sqrt() * moe.norm.weight
        total = total if moe.up is None else moe.up.weight @ total
        if moe.shared is not None:
            gate, up = moe.shared.fc1.weight @ token
            total = total + moe.shared.fc2.weight @ situ_glu_reference(gate, up, **BOUNDS)
        out[tuple(place)] = total
    return out


@pytest.mark.parametrize(
    "changes",
    [
        {"dispatcher": Dispatcher.alltoall},
        {"dispatcher": Dispatcher.allgather},
        {"latent_norm": False},
        {"latent_size": None, "shared_feed_forward_size": 0},
    ],
)
def test_the_layer_is_its_formula(groups, changes):
    moe = layer(groups, replace(OPTIONS, **changes))
    moe.router.balancer.bias.copy_(torch.linspace(-0.3, 0.3, 6))
    x = torch.randn(5, 2, 24, dtype=torch.float64, requires_grad=True)
    ours, bias = moe(x)
    truth = formula(moe, x)
    assert bias is None
    torch.testing.assert_close(ours, truth, rtol=1e-10, atol=1e-12)  # order of sums in float64
    direction = torch.randn_like(truth)
    leaves = [x, *moe.parameters()]
    for got, expected in zip(
        torch.autograd.grad(ours, leaves, direction),
        torch.autograd.grad(truth, leaves, direction),
        strict=True,
    ):
        torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-11)


def test_the_bias_moves_the_choice_and_never_the_weights(groups):
    router = layer(groups).router
    x = torch.randn(7, 1, 24, dtype=torch.float64)
    weights, chosen = router(x)
    torch.testing.assert_close(weights.sum(-1), torch.full((7,), 1.5, dtype=torch.float64))
    router.balancer.bias[4] = 5.0
    moved, taken = router(x)
    assert taken[:, 4].all()
    assert (taken.sum(-1) == 2).all()
    both = chosen & taken
    scores = torch.sigmoid(x.squeeze(1) @ router.weight.T)
    expected = scores * taken
    torch.testing.assert_close(moved, 1.5 * expected / expected.sum(-1, keepdim=True))
    assert both.any()


def test_the_size_of_the_weights_does_not_matter_and_the_shared_expert_is_apart(groups):
    small, large = (layer(groups, replace(OPTIONS, scaling=s)) for s in (1.0, 1e4))
    x = torch.randn(4, 1, 24, dtype=torch.float64)
    large.load_state_dict(small.state_dict())
    small.norm.eps = large.norm.eps = 0.0
    torch.testing.assert_close(small(x)[0], large(x)[0], rtol=1e-10, atol=1e-12)


def test_padding_goes_to_no_expert_and_is_counted_nowhere(groups):
    moe = layer(groups, balance=BalanceOptions(bins=64))
    balancer = moe.router.balancer
    x = torch.randn(6, 2, 24, dtype=torch.float64)
    padding = torch.zeros(2, 9, dtype=torch.bool)
    padding[:, 6:] = True
    longer = torch.cat([x, torch.randn(3, 2, 24, dtype=torch.float64)])
    alone, _ = moe(x)
    counts = [tensor.clone() for tensor in balancer.statistics()]
    balancer.update(0)
    balancer.bias.zero_()
    padded, _ = moe(longer, padding)
    torch.testing.assert_close(padded[:6], alone, rtol=1e-12, atol=1e-12)
    for before, after in zip(counts, balancer.statistics(), strict=True):
        assert torch.equal(before, after)
    weights, chosen = moe.router(longer, padding.T)
    assert not chosen.view(9, 2, 6)[6:].any()
    assert not weights.view(9, 2, 6)[6:].any()
    assert torch.isfinite(padded).all()


def test_statistics_are_taken_once_a_token_of_training(groups):
    moe = layer(groups)
    balancer = moe.router.balancer
    x = torch.randn(6, 2, 24, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        moe(x)
    moe.eval()
    moe(x)
    assert not balancer.counts.any()
    moe.train()
    out = tensor_parallel.checkpoint(lambda x: moe(x)[0], False, x)
    assert not balancer.counts.any()
    out.sum().backward()
    assert balancer.counts.tolist()[-1] == 12
    assert balancer.counts[:-1].sum() == 12 * 2
    load = balancer.update(2)
    assert int(load.tokens) == 12
    assert not balancer.counts.any()


def test_a_layer_whose_tokens_are_all_padding_has_zero_gradients(groups):
    moe = layer(groups)
    x = torch.randn(3, 1, 24, dtype=torch.float64)
    moe(x, torch.ones(1, 3, dtype=torch.bool))[0].sum().backward()
    for name, parameter in moe.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
    assert not moe.experts.fc1.grad.any()


def test_zero_router_weights_load_all_experts_alike(groups):
    moe = layer(groups, replace(OPTIONS, num_experts=8))
    with torch.no_grad():
        moe.router.weight.zero_()
    moe(torch.randn(64, 1, 24, dtype=torch.float64))
    counts = moe.router.balancer.counts[:-1]
    assert counts.tolist() == [16] * 8


@pytest.mark.parametrize("precision", RouterMatmul)
def test_router_logits_are_float32_in_every_precision(precision):
    torch.manual_seed(0)
    x, weight = torch.randn(40, 96), torch.randn(12, 96)
    ours = router_logits(x.bfloat16(), weight, precision=precision)
    assert ours.dtype is torch.float32
    exact = router_logits_reference(x.bfloat16(), weight).double()
    # bf16 cuts the weights to 8 bits, and errors of 96 products add up like a random walk
    error = float((ours - exact).abs().max() / exact.abs().max())
    assert error < (0.01 if precision is RouterMatmul.bf16 else 1e-6)
    if precision is RouterMatmul.bf16:
        cut = router_logits_reference(x.bfloat16(), weight.bfloat16())
        torch.testing.assert_close(ours, cut, rtol=1e-6, atol=1e-5)
    if precision is RouterMatmul.auto:  # nothing is cut of a bf16 model
        given = (x.bfloat16(), weight.bfloat16())
        ours = router_logits(*given, precision=precision)
        torch.testing.assert_close(ours, router_logits_reference(*given), rtol=1e-6, atol=1e-5)
    wide = (x.double().requires_grad_(), weight.double().requires_grad_())
    assert torch.autograd.gradcheck(lambda *a: router_logits(*a, precision=precision), wide)


def test_a_tape_records_and_replays_also_under_recomputation(groups):
    router: BalancedRouter = layer(groups).router
    x = torch.randn(2, 3, 1, 24, dtype=torch.float64, requires_grad=True)
    maps = {2: torch.zeros(6, 6, dtype=torch.bool)}
    record = RoutingTape(maps, places=lambda n: torch.arange(3) + 3 * n, replay=False)
    record.attach([router])
    for number in range(2):
        router(x[number])
    truth = maps[2].clone()
    assert (truth.sum(-1) == 2).all()
    router.balancer.bias[5] = 9.0  # left alone the router would now choose otherwise
    replay = RoutingTape(maps, places=lambda n: torch.arange(3) + 3 * n, replay=True)
    replay.attach([router])
    seen = []

    def route(x):
        weights, chosen = router(x)
        seen.append(chosen)
        return weights

    outs = []
    for number in range(2):
        outs.append(tensor_parallel.checkpoint(route, False, x[number]))
    for out in outs:
        out.sum().backward()
    order = [truth[:3], truth[3:], truth[:3], truth[3:]]
    assert all(torch.equal(a, b) for a, b in zip(seen, order, strict=True))
    assert replay.rerouted[2] == int((~truth[:, 5]).sum())
    RoutingTape.detach([router])
    assert router(x[0])[1][:, 5].all()


@pytest.mark.parametrize("rule", [r for r in BalanceRule if RULES[r].exactly_top_k])
def test_a_token_without_a_number_gets_its_experts_too(groups, rule):
    """The layer counts on top-k rows a token where the rule gives as many."""
    moe = layer(groups, balance=BalanceOptions(rule=rule))
    assert moe.router.exactly_top_k
    x = torch.randn(5, 2, 24, dtype=torch.float64)
    x[1, 0] = float("nan")
    _, chosen = moe.router(x)
    assert (chosen.sum(1) == OPTIONS.top_k).all()
    out, _ = moe(x)
    assert torch.equal(out.isnan().any(-1).nonzero(), torch.tensor([[1, 0]]))
