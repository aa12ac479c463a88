"""What holds for every balancing rule: splits, ranks, padding, evaluation, resume, types."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.config.schema import BalanceOptions, BalanceRule, BinPlacement
from megatron_ext.layers.balance import Balancer, TokenGroup, build_balancer, reduce
from megatron_ext.layers.balance.build import RULES
from megatron_ext.ops.quantile import LayerLoad, to_host
from tests.support.threads import run_ranks

EXPERTS, TOP_K = 12, 3
ALONE = TokenGroup()
every_rule = pytest.mark.parametrize("rule", list(RULES), ids=lambda rule: rule.name)

# Rules whose counts and state are the same bits however a batch is split.
SPLIT_FREE = {
    "quantile": BalanceOptions(rule=BalanceRule.quantile),
    "quantile_k3": BalanceOptions(
        rule=BalanceRule.quantile, bins=1000, placement=BinPlacement.uniform
    ),
    "quantile_exact": BalanceOptions(rule=BalanceRule.quantile_exact),
    "sign": BalanceOptions(rule=BalanceRule.sign),
    "reject": BalanceOptions(rule=BalanceRule.reject, rejection_probability=0.7),
    "reject_drop": BalanceOptions(rule=BalanceRule.reject, refill=False),
    "none": BalanceOptions(rule=BalanceRule.none),
}
# Those of one micro-batch: the same to rounding when it is shared by ranks.
SHARED = [BalanceRule.microbatch_mean, BalanceRule.threshold, BalanceRule.aux_loss]


def build(options: BalanceOptions | BalanceRule) -> Balancer:
    if isinstance(options, BalanceRule):
        options = BalanceOptions(rule=options)
    return build_balancer(options, num_experts=EXPERTS, top_k=TOP_K, device="cpu")


def batch(seed: int, tokens: int) -> Tensor:
    """Scores of experts that differ, with repeated tokens, hence ties."""
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.randn(EXPERTS, generator=torch.Generator().manual_seed(99))
    scores = torch.sigmoid(torch.randn(tokens, EXPERTS, generator=generator) + offsets)
    scores[: tokens // 4] = 0.5
    return scores


def feed(
    balancer: Balancer,
    scores: Tensor,
    *,
    valid: Tensor | None = None,
    tokens: TokenGroup = ALONE,
) -> Tensor:
    """Route and count a micro-batch; its map."""
    selection = balancer.select(scores, valid=valid, tokens=tokens)
    balancer.observe(scores, selection, valid=valid, tokens=tokens)
    return selection.map


def step(balancer: Balancer, scores: Tensor) -> LayerLoad:
    feed(balancer, scores)
    return balancer.update(layer=0)


def state(balancer: Balancer) -> dict[str, Tensor]:
    """Everything that it holds, also what is not saved."""
    return {name: value.clone() for name, value in balancer.named_buffers()}


def assert_same(one: dict[str, Tensor], two: dict[str, Tensor]) -> None:
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert value.dtype is two[name].dtype
        assert torch.equal(value, two[name]), name


@pytest.mark.parametrize("name", list(SPLIT_FREE))
@given(data=st.data())
@settings(max_examples=8, deadline=None)
def test_no_split_and_no_padding_changes_a_bit(name: str, data: st.DataObject) -> None:
    whole, parts = build(SPLIT_FREE[name]), build(SPLIT_FREE[name])
    for seed in range(3):
        tokens = data.draw(st.integers(0, 60))
        scores, places = batch(seed, tokens), torch.arange(tokens)
        expected = step(whole, scores)
        cuts = sorted(data.draw(st.lists(st.integers(0, tokens), max_size=3)))
        order = torch.tensor(data.draw(st.permutations(range(tokens))), dtype=torch.int64)
        for part in order.tensor_split(cuts):
            padding = data.draw(st.integers(0, 3))
            feed(
                parts,
                torch.cat([scores[part], torch.rand(padding, EXPERTS)]),
                valid=torch.arange(len(part) + padding) < len(part),
                tokens=TokenGroup(positions=torch.cat([places[part], torch.arange(padding)])),
            )
        load = parts.update(layer=0)
        assert torch.equal(load.counts, expected.counts)
        assert load.tokens == expected.tokens == tokens
        assert_same(state(parts), state(whole))


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_hold_parts_of_the_batch_agree_with_one_rank(size: int) -> None:
    """All layers of a rank in one collective a dtype; one rank has no valid token in step 1."""
    alone = {name: build(options) for name, options in SPLIT_FREE.items()}
    batches = [batch(seed, 48) for seed in range(3)]
    expected = {
        name: [step(balancer, scores) for scores in batches] for name, balancer in alone.items()
    }

    def work(group: ProcessGroup) -> tuple[dict[str, Balancer], dict[str, list[LayerLoad]]]:
        balancers = {name: build(options) for name, options in SPLIT_FREE.items()}
        loads: dict[str, list[LayerLoad]] = {name: [] for name in balancers}
        for number, scores in enumerate(batches):
            pieces = list(torch.arange(48).tensor_split(size))
            valid = None
            if number == 1:
                # The last rank has padding alone, the others everything.
                pieces = [*torch.arange(48).tensor_split(size - 1), torch.arange(7)]
                valid = torch.ones(len(pieces[group.rank()]), dtype=torch.bool)
                valid &= group.rank() < size - 1
            mine = pieces[group.rank()]
            for balancer in balancers.values():
                feed(balancer, scores[mine], valid=valid, tokens=TokenGroup(positions=mine))
            reduce(balancers.values(), group)
            for name, balancer in balancers.items():
                loads[name].append(balancer.update(layer=0))
        return balancers, loads

    for balancers, loads in run_ranks(size, work):
        for name, balancer in balancers.items():
            assert_same(state(balancer), state(alone[name]))
            for one, other in zip(loads[name], expected[name], strict=True):
                assert torch.equal(one.counts, other.counts), name
                assert torch.equal(one.new_bias, other.new_bias), name


@pytest.mark.parametrize("rule", SHARED, ids=lambda rule: rule.name)
def test_ranks_that_share_a_micro_batch_agree_with_one_rank(rule: BalanceRule) -> None:
    """The micro-batch is cut over two ranks along the sequence, with padding in one of them."""
    batches = [batch(seed, 40) for seed in range(4)]
    valid = torch.arange(40) < 33

    def run(group: ProcessGroup | None) -> tuple[dict[str, Tensor], list[Tensor], list[Tensor]]:
        balancer = build(rule)
        maps, losses = [], []
        mine = slice(0, 40) if group is None else slice(20 * group.rank(), 20 * group.rank() + 20)
        tokens = TokenGroup(group=group, positions=torch.arange(40)[mine])
        for index, scores in enumerate(batches):
            map = feed(balancer, scores[mine], valid=valid[mine], tokens=tokens)
            loss = balancer.auxiliary_loss(scores[mine], map, valid=valid[mine], tokens=tokens)
            maps.append(map)
            losses.append(torch.zeros(()) if loss is None else loss)
            if index % 2:
                reduce([balancer], group)
                balancer.update(layer=0)
        return state(balancer), maps, losses

    expected, maps, losses = run(None)
    ranks = run_ranks(2, run)
    for buffers, *_ in ranks:
        assert_same(buffers, ranks[0][0])
        torch.testing.assert_close(buffers, expected, rtol=0, atol=1e-6)
    for index in range(4):
        assert torch.equal(torch.cat([rank[1][index] for rank in ranks]), maps[index])
        total = ranks[0][2][index] + ranks[1][2][index]
        torch.testing.assert_close(total, losses[index], rtol=1e-6, atol=1e-6)


@every_rule
def test_evaluation_changes_nothing(rule: BalanceRule) -> None:
    balancer = build(rule)
    step(balancer, batch(0, 50))
    feed(balancer, batch(1, 50))
    before, generator = state(balancer), torch.get_rng_state()
    balancer.eval()
    once = balancer.select(batch(2, 50), valid=None, tokens=ALONE).map
    again = balancer.select(batch(2, 50), valid=None, tokens=ALONE).map
    assert torch.equal(once, again)
    assert_same(state(balancer), before)
    assert torch.equal(torch.get_rng_state(), generator)
    assert (once.sum(1) == TOP_K).all() or not balancer.exactly_top_k


@every_rule
def test_routing_again_in_the_same_step_gives_the_same(rule: BalanceRule) -> None:
    balancer = build(BalanceOptions(rule=rule, rejection_probability=0.5))
    for seed in range(4):
        step(balancer, batch(seed, 50))
    scores = batch(9, 50)
    first = balancer.select(scores, valid=None, tokens=ALONE)
    balancer.observe(scores, first, valid=None, tokens=ALONE)
    assert torch.equal(balancer.select(scores, valid=None, tokens=ALONE).map, first.map)


@every_rule
@pytest.mark.parametrize("tokens", [0, 9])
def test_a_step_without_a_valid_token_leaves_the_bias(rule: BalanceRule, tokens: int) -> None:
    balancer = build(rule)
    step(balancer, batch(0, 50))
    saved = copy.deepcopy(balancer.state_dict())
    feed(balancer, batch(1, tokens), valid=torch.zeros(tokens, dtype=torch.bool))
    feed(balancer, batch(1, 0))
    load = balancer.update(layer=3)
    assert_same(saved, dict(balancer.state_dict()))
    assert (int(load.tokens), int(load.counts.sum()), int(load.dropped)) == (0, 0, 0)
    assert int(load.out_of_range) == 0
    assert float(load.bin_width) == 0


@every_rule
def test_an_empty_micro_batch_counts_nothing(rule: BalanceRule) -> None:
    one, two = build(rule), build(rule)
    for seed in range(2):
        feed(two, batch(seed, 0))
        feed(two, batch(5, 7), valid=torch.zeros(7, dtype=torch.bool))
        expected, load = step(one, batch(seed, 50)), step(two, batch(seed, 50))
        assert torch.equal(load.counts, expected.counts)
        assert_same(state(one), state(two))


@every_rule
def test_all_experts_for_every_token(rule: BalanceRule) -> None:
    options = BalanceOptions(rule=rule)
    balancer = build_balancer(options, num_experts=4, top_k=4, device="cpu")
    for seed in range(3):
        scores = batch(seed, 30)[:, :4]
        load = step(balancer, scores)
        assert load.counts.tolist() == [30] * 4
    for value in balancer.state_dict().values():
        assert value.isfinite().all()


@every_rule
def test_a_resumed_balancer_goes_on_with_the_same_bits(rule: BalanceRule) -> None:
    options = BalanceOptions(rule=rule, rejection_probability=0.7)
    balancer, resumed = build(options), build(options)
    for seed in range(3):
        step(balancer, batch(seed, 50))
    resumed.load_state_dict(copy.deepcopy(balancer.state_dict()))
    for seed in range(3, 6):
        one, two = step(balancer, batch(seed, 50)), step(resumed, batch(seed, 50))
        assert torch.equal(one.counts, two.counts)
    assert_same(state(balancer), state(resumed))


@every_rule
def test_casting_the_model_leaves_the_state_alone(rule: BalanceRule) -> None:
    balancer = build(rule)
    step(balancer, batch(0, 50))
    feed(balancer, batch(1, 50))
    before = state(balancer)
    torch.nn.Sequential(torch.nn.Linear(2, 2), balancer).to(torch.bfloat16).half().double()
    assert_same(state(balancer), before)
    assert all(value.dtype is not torch.bfloat16 for value in before.values())


@every_rule
def test_the_record_of_a_step(rule: BalanceRule) -> None:
    balancer = build(rule)
    step(balancer, batch(0, 50))
    in_use = balancer.bias.clone()
    feed(balancer, batch(1, 30))
    map = feed(balancer, batch(2, 30), valid=torch.arange(30) < 20)
    load = balancer.update(layer=7)
    (host,) = to_host([load])
    assert (load.layer, load.top_k, int(load.tokens)) == (7, TOP_K, 50)
    assert torch.equal(load.bias, in_use)
    assert torch.equal(load.new_bias, balancer.bias)
    assert (load.counts >= map[:20].sum(0)).all()
    assert load.counts.sum() + load.dropped == 50 * TOP_K or not balancer.exactly_top_k
    for name, value in vars(load).items():
        other = getattr(host, name)
        assert torch.equal(value, other) if isinstance(value, Tensor) else value == other, name
        assert not isinstance(value, Tensor) or value.dtype is other.dtype
    among_many = to_host([load] * 60)[0]
    assert len(pickle.dumps(among_many)) < 1.1 * len(pickle.dumps(host)), "its own numbers alone"
    # The record is a copy: the next step does not reach into it.
    kept = load.counts.clone()
    step(balancer, batch(3, 50))
    assert torch.equal(load.counts, kept)


@pytest.mark.parametrize("name", [n for n in SPLIT_FREE if n.startswith("quantile")])
def test_the_bias_is_centred_and_float64_scores_give_the_same(name: str) -> None:
    one, two = build(SPLIT_FREE[name]), build(SPLIT_FREE[name])
    for seed in range(3):
        step(one, batch(seed, 200))
        step(two, batch(seed, 200).double())
        assert abs(float(one.bias.double().mean())) < 1e-7
        torch.testing.assert_close(one.bias, two.bias, rtol=0, atol=1e-5)


def test_the_histogram_and_sorting_agree_to_a_bin_before_centring() -> None:
    """Run for run: each step's bias from the histogram, against sorting under the same bias."""
    for name in ("quantile", "quantile_k3"):
        coarse, exact = build(SPLIT_FREE[name]), build(SPLIT_FREE["quantile_exact"])
        for seed in range(5):
            scores = batch(seed, 300)
            exact.bias.copy_(coarse.bias)
            feed(coarse, scores)
            feed(exact, scores)
            found, other = coarse.update(0), exact.update(0)
            # Less than a bin for each expert; centring moves all by the mean, again below a bin.
            assert (found.new_bias - other.new_bias).abs().max() < 2 * found.bin_width + 1e-6


def test_options_reach_the_rule() -> None:
    options = BalanceOptions(rule=BalanceRule.sign, sign_step=0.25)
    balancer = build(options)
    load = step(balancer, batch(0, 50))
    expected = 0.25 * torch.sign(load.counts.double().mean() - load.counts)
    assert torch.equal(balancer.bias, expected.float())
    narrow = build(replace(SPLIT_FREE["quantile"], bins=16))
    assert narrow.histogram.shape == (EXPERTS, 18)
