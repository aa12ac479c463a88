"""The rules that the quantile rule is compared with: formulas, and what each one promises."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.config.schema import BalanceOptions, BalanceRule
from megatron_ext.layers.balance import Balancer, TokenGroup, build_balancer, start_reduce
from megatron_ext.layers.balance.reject import RejectRule
from tests.support.threads import run_ranks

EXPERTS, TOP_K = 10, 3
ALONE = TokenGroup()


def build(rule: BalanceRule, **options: float) -> Balancer:
    values = BalanceOptions(rule=rule, **options)
    return build_balancer(values, num_experts=EXPERTS, top_k=TOP_K, device="cpu")


def batch(seed: int, tokens: int = 60) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.linspace(-2, 2, EXPERTS)
    return torch.sigmoid(torch.randn(tokens, EXPERTS, generator=generator) + offsets)


def feed(balancer: Balancer, scores: Tensor) -> Tensor:
    selection = balancer.select(scores, valid=None, tokens=ALONE)
    balancer.observe(scores, selection, valid=None, tokens=ALONE)
    return selection.map


# -- megatron-core's mean of micro-batches ---------------------------------------------------------


def test_the_mean_of_micro_batches_is_its_formula() -> None:
    balancer = build(BalanceRule.microbatch_mean)
    bias = torch.zeros(EXPERTS, dtype=torch.float64)
    for step in range(3):
        values = []
        for part in range(2):
            scores = batch(10 * step + part)
            feed(balancer, scores)
            logits = torch.logit(scores.double())
            cutoff = (logits + bias).sort(1, descending=True).values[:, TOP_K]
            margins = cutoff.unsqueeze(1) - logits
            values.append(torch.quantile(margins, TOP_K / EXPERTS, dim=0))
        mean = torch.stack(values).mean(0)
        bias = mean - mean.mean()
        balancer.update(layer=0)
        torch.testing.assert_close(balancer.bias.double(), bias, rtol=0, atol=1e-5)


def test_saturated_scores_keep_the_bias_finite() -> None:
    balancer = build(BalanceRule.microbatch_mean)
    feed(balancer, torch.cat([torch.ones(30, EXPERTS), torch.zeros(30, EXPERTS)]))
    balancer.update(layer=0)
    assert balancer.bias.isfinite().all()


# -- Switch's loss ---------------------------------------------------------------------------------


def loss_of(scores: Tensor, map: Tensor, *, coefficient: float) -> Tensor:
    """The formula, a mean over tokens, in the precision of the scores."""
    share = map.to(scores.dtype).mean(0)
    probability = (scores / scores.sum(1, keepdim=True)).mean(0)
    return coefficient * EXPERTS / TOP_K * (share * probability).sum()


def test_the_auxiliary_loss_and_its_gradient_are_the_formulas() -> None:
    balancer = build(BalanceRule.aux_loss, aux_coefficient=0.3)
    scores = batch(0).double().requires_grad_()
    padded = torch.cat([scores, torch.rand(9, EXPERTS, dtype=torch.float64)])
    valid = torch.arange(69) < 60
    map = balancer.select(padded.detach(), valid=valid, tokens=ALONE).map
    loss = balancer.auxiliary_loss(padded, map, valid=valid, tokens=ALONE)
    assert loss is not None
    expected = loss_of(scores, map[:60], coefficient=0.3)
    torch.testing.assert_close(loss / 60, expected)
    (gradient,) = torch.autograd.grad(loss / 60, scores)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, scores)[0])


def test_an_even_load_costs_the_coefficient() -> None:
    balancer = build(BalanceRule.aux_loss, aux_coefficient=0.3)
    scores = torch.full((40, EXPERTS), 0.5)
    map = balancer.select(scores, valid=None, tokens=ALONE).map
    loss = balancer.auxiliary_loss(scores, map, valid=None, tokens=ALONE)
    assert loss is not None
    assert float(loss) / 40 == pytest.approx(0.3)


def test_scores_of_zero_cost_nothing_and_give_no_nan() -> None:
    balancer = build(BalanceRule.aux_loss)
    scores = torch.zeros(4, EXPERTS).requires_grad_()
    map = balancer.select(scores.detach(), valid=None, tokens=ALONE).map
    loss = balancer.auxiliary_loss(scores, map, valid=None, tokens=ALONE)
    assert loss is not None
    assert float(loss) == 0
    assert torch.autograd.grad(loss, scores)[0].isfinite().all()


@pytest.mark.parametrize("rule", [r for r in BalanceRule if r is not BalanceRule.aux_loss])
def test_no_other_rule_has_a_loss(rule: BalanceRule) -> None:
    balancer = build(rule)
    scores = batch(0)
    map = balancer.select(scores, valid=None, tokens=ALONE).map
    assert balancer.auxiliary_loss(scores, map, valid=None, tokens=ALONE) is None


# -- thresholds ------------------------------------------------------------------------------------


def test_an_expert_takes_the_tokens_that_score_highest_with_it() -> None:
    balancer = build(BalanceRule.threshold)
    scores = batch(0, tokens=60)
    map = feed(balancer, scores)
    assert (map.sum(0) == 60 * TOP_K // EXPERTS).all()
    for e in range(EXPERTS):
        assert scores[map[:, e], e].min() > scores[~map[:, e], e].max()
    assert map.sum(1).unique().numel() > 2  # the number of experts differs between tokens


def test_the_cap_binds_where_tokens_tie_and_earlier_ones_go_first() -> None:
    balancer = build(BalanceRule.threshold, capacity_factor=1.2)
    scores = torch.full((50, EXPERTS), 0.5)
    scores[:2] = 0.9
    map = feed(balancer, scores.flip(0))
    capacity = 18  # 1.2 * 50 * 3 / 10
    assert (map.sum(0) == capacity).all()
    assert map[-2:].all()
    assert map[: capacity - 2].all()


def test_in_training_it_sees_the_future_and_in_evaluation_it_does_not() -> None:
    balancer = build(BalanceRule.threshold)
    for seed in range(3):
        feed(balancer, batch(seed))
        balancer.update(layer=0)
    scores = batch(5)
    other = scores.clone()
    other[30:] = torch.rand(30, EXPERTS)
    for training in (True, False):
        balancer.train(training)
        first, second = (
            balancer.select(x, valid=None, tokens=ALONE).map[:30] for x in (scores, other)
        )
        assert torch.equal(first, second) is not training
    # The causal rule: the k experts whose scores exceed their thresholds most.
    expected = torch.zeros_like(scores, dtype=torch.bool)
    expected.scatter_(1, (scores + balancer.bias).topk(TOP_K).indices, True)
    assert torch.equal(balancer.select(scores, valid=None, tokens=ALONE).map, expected)


def test_the_bias_of_thresholds_is_their_negative_mean() -> None:
    balancer = build(BalanceRule.threshold)
    thresholds = []
    for seed in range(2):
        scores = batch(seed)
        feed(balancer, scores)
        thresholds.append(torch.quantile(scores.double(), 1 - TOP_K / EXPERTS, dim=0))
    balancer.update(layer=0)
    mean = torch.stack(thresholds).mean(0)
    torch.testing.assert_close(balancer.bias.double(), mean.mean() - mean, rtol=0, atol=1e-6)


# -- rejection -------------------------------------------------------------------------------------


def rejecting(**options: float) -> RejectRule:
    balancer = build(BalanceRule.reject, **options)
    assert isinstance(balancer, RejectRule)
    for seed in range(8):
        feed(balancer, batch(seed))
        balancer.update(layer=0)
    return balancer


def plain(scores: Tensor) -> Tensor:
    map = torch.zeros_like(scores, dtype=torch.bool)
    return map.scatter_(1, scores.topk(TOP_K).indices, True)


def test_thresholds_are_running_quantiles() -> None:
    balancer = build(BalanceRule.reject, running_decay=0.75, bins=1000)
    assert isinstance(balancer, RejectRule)
    expected = None
    for seed in range(4):
        scores = batch(seed)
        feed(balancer, scores)
        balancer.update(layer=0)
        now = torch.quantile(scores.double(), 1 - TOP_K / EXPERTS, dim=0)
        expected = now if expected is None else 0.75 * expected + 0.25 * now
        torch.testing.assert_close(balancer.threshold.double(), expected, rtol=0, atol=0.02)


def test_only_overloaded_experts_reject_and_only_below_their_threshold() -> None:
    balancer = rejecting(refill=False)
    overloaded = balancer.demand > 1.05
    assert overloaded.any()
    assert not overloaded.all()
    scores = batch(20, tokens=500)
    map = balancer.select(scores, valid=None, tokens=ALONE).map
    rejected = plain(scores) & ~map
    assert rejected.any()
    assert not rejected[:, ~overloaded].any()
    assert torch.equal(rejected, plain(scores) & overloaded & (scores < balancer.threshold))


def test_a_freed_slot_goes_to_the_next_best_expert() -> None:
    balancer = rejecting()
    assert balancer.exactly_top_k
    scores = batch(20, tokens=500)
    map = balancer.select(scores, valid=None, tokens=ALONE).map
    assert (map.sum(1) == TOP_K).all()
    willing = ~((balancer.demand > 1.05) & (scores < balancer.threshold))
    for t in range(500):
        ranked = sorted(range(EXPERTS), key=lambda e: -float(scores[t, e]))
        expected = [e for e in ranked if willing[t, e]][:TOP_K]
        assert set(expected) <= set(map[t].nonzero().flatten().tolist())


def test_rejection_is_by_chance_and_the_chance_is_the_tokens_own() -> None:
    balancer = rejecting(refill=False, rejection_probability=0.4)
    scores = batch(20, tokens=4000)
    places = torch.arange(4000)
    map = balancer.select(scores, valid=None, tokens=TokenGroup(positions=places)).map
    candidates = plain(scores) & (balancer.demand > 1.05) & (scores < balancer.threshold)
    share = float((candidates & ~map).sum() / candidates.sum())
    # Standard error below 0.02 for more than 1000 candidates.
    assert candidates.sum() > 1000
    assert share == pytest.approx(0.4, abs=0.06)
    part = TokenGroup(positions=places[1000:2000])
    assert torch.equal(
        balancer.select(scores[1000:2000], valid=None, tokens=part).map, map[1000:2000]
    )
    # Another step draws anew.
    balancer.steps += 1
    again = balancer.select(scores, valid=None, tokens=TokenGroup(positions=places)).map
    assert not torch.equal(again, map)


def test_dropped_slots_are_reported() -> None:
    balancer = rejecting(refill=False)
    scores = batch(20)
    taken = int(feed(balancer, scores).sum())
    load = balancer.update(layer=0)
    assert int(load.dropped) == 60 * TOP_K - taken > 0


# -- sums over ranks -------------------------------------------------------------------------------


def test_all_layers_go_in_one_collective_a_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[tuple[torch.dtype, int]] = []
    real = dist.all_reduce

    def counting(tensor: Tensor, **keywords: object) -> object:
        sizes.append((tensor.dtype, tensor.numel()))
        return real(tensor, **keywords)

    monkeypatch.setattr(dist, "all_reduce", counting)

    def work(group: ProcessGroup) -> list[Tensor]:
        layers = [build(BalanceRule.quantile) for _ in range(3)]
        for number, layer in enumerate(layers):
            feed(layer, batch(number + 10 * group.rank()))
        pending = start_reduce(layers, group)
        pending.finish()
        return [layer.counts for layer in layers]

    first, second = run_ranks(2, work)
    assert [int(c[-1]) for c in first] == [120] * 3
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    each = {(torch.int64, 3 * (EXPERTS + 1)), (torch.int32, 3 * EXPERTS * 130)}
    assert sorted(sizes, key=str) == sorted([*each, *each], key=str)
