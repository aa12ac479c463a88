"""Experts in chunks of tokens: the same layer, and routed rows do not grow with the length."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

from megatron_ext.config.schema import BalanceOptions, BalanceRule, Dispatcher, ExpertOptions
from megatron_ext.layers.latent_moe import LatentMoE
from tests.support.memory import PeakMemory
from tests.support.one_rank import draw, one_rank, outputs_and_gradients, small_config

OPTIONS = ExpertOptions(
    num_experts=6, top_k=2, latent_size=10, feed_forward_size=7, shared_feed_forward_size=9
)


@pytest.fixture(scope="module")
def groups():
    with one_rank() as collection:
        yield collection


def layer(groups, chunk_tokens, *, options=OPTIONS, rule=BalanceRule.quantile):
    config = small_config(
        num_moe_experts=options.num_experts,
        moe_router_topk=options.top_k,
        moe_router_load_balancing_type="none",
    )
    made = LatentMoE(
        config,
        options=options,
        balance=BalanceOptions(rule=rule),
        beta=4.0,
        linear_beta=25.0,
        chunk_tokens=chunk_tokens,
        pg_collection=groups,
    )
    draw(made)
    return made


@pytest.mark.parametrize("dispatcher", list(Dispatcher))
@pytest.mark.parametrize("chunk", [1, 5, 7, 100])
def test_chunks_change_neither_values_nor_gradients_nor_a_bit_of_the_statistics(
    groups, chunk, dispatcher
):
    options = replace(OPTIONS, dispatcher=dispatcher)
    x, upstream = torch.randn(2, 7, 2, 24, dtype=torch.float64)
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[1, 5:] = True
    whole, chunked = layer(groups, None, options=options), layer(groups, chunk, options=options)
    truth = outputs_and_gradients(whole, x, upstream, padding_mask=padding)
    ours = outputs_and_gradients(chunked, x, upstream, padding_mask=padding)
    for got, want in zip(ours, truth, strict=True):
        # float64; gradients of weights are sums in another order
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-13)
    mine, its = (moe.router.balancer.statistics() for moe in (chunked, whole))
    for a, b in zip(mine, its, strict=True):
        assert torch.equal(a, b)
        assert b.sum() > 0


@pytest.mark.parametrize("rule", [BalanceRule.aux_loss, BalanceRule.threshold])
def test_rules_of_a_whole_micro_batch_see_all_of_it(groups, rule, monkeypatch):
    # What the training step sets; a backward pass without it leaves one of another shape behind.
    monkeypatch.setattr(MoEAuxLossAutoScaler, "main_loss_backward_scale", torch.ones(1))
    x, upstream = torch.randn(2, 9, 1, 24, dtype=torch.float64)
    truth, ours = (
        outputs_and_gradients(layer(groups, chunk, rule=rule), x, upstream) for chunk in (None, 4)
    )
    for got, want in zip(ours, truth, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-13)


def test_memory_of_routed_rows_is_flat_in_length(groups):
    # Wide experts, many a token: routed rows and their products are most of the memory.
    options = replace(OPTIONS, latent_size=None, feed_forward_size=200, top_k=5)

    def a_token(chunk):
        """Bytes that another token costs, while the layer runs forward and backward."""
        moe, peaks = layer(groups, chunk, options=options, rule=BalanceRule.none), []
        for tokens in (64, 192):
            x = torch.randn(tokens, 1, 24, dtype=torch.float64, requires_grad=True)
            with PeakMemory() as memory:
                moe(x)[0].sum().backward()
            peaks.append(memory.peak)
        return (peaks[1] - peaks[0]) / 128

    routed = options.top_k * 200 * 8  # of one tensor of the width inside
    assert a_token(None) > 2 * routed
    assert a_token(32) < 0.5 * routed
