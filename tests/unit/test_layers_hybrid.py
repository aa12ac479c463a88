"""The gated hybrid, and the specs that the layer pattern is turned into."""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_ext.config.schema import (
    AttentionPattern,
    KdaOptions,
    MlaOptions,
    ParallelOptions,
    RunConfig,
)
from megatron_ext.layers.gated_mla import GatedMLA
from megatron_ext.layers.hybrid import GatedHybrid, GatedHybridSubmodules
from megatron_ext.layers.kda import KimiDeltaAttention
from megatron_ext.model.spec import block_spec
from tests.support.one_rank import draw, one_rank, small_config


@pytest.fixture(scope="module")
def groups():
    with one_rank() as collection:
        yield collection


@pytest.fixture
def hybrid(groups):
    layer = GatedHybrid(
        small_config(),
        submodules=GatedHybridSubmodules(
            kda=ModuleSpec(
                module=KimiDeltaAttention,
                params={"options": KdaOptions(num_heads=2, head_dim=8, value_dim=8)},
            ),
            mla=ModuleSpec(module=GatedMLA, params={"options": MlaOptions(num_heads=2)}),
        ),
        pg_collection=groups,
    )
    draw(layer)
    return layer


def test_gate_mixes_the_branches_token_by_token(hybrid):
    x = torch.randn(9, 2, 24, dtype=torch.float64)
    share = 1 / (1 + torch.exp(-(x * hybrid.mix_weight[0]).sum(-1, keepdim=True)))
    expected = share * hybrid.kda(x)[0] + (1 - share) * hybrid.mla(x)[0]
    # float64 in both; only the order of sums differs.
    torch.testing.assert_close(hybrid(x)[0], expected, rtol=1e-10, atol=1e-12)


def test_gate_starts_with_equal_shares(hybrid):
    initial = hybrid.mix_weight.initializer.from_symmetric(torch.rand(1, 24))
    assert torch.equal(initial, torch.zeros(1, 24))


def test_every_parameter_of_both_branches_gets_a_gradient(hybrid):
    hybrid(torch.randn(9, 2, 24, dtype=torch.float64))[0].square().sum().backward()
    for name, parameter in hybrid.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (AttentionPattern.interleaved, ["K", "K", "K", "M", "K", "M"]),
        (AttentionPattern.kda, ["K"] * 6),
        (AttentionPattern.mla, ["M"] * 6),
        (AttentionPattern.gated, ["G"] * 6),
    ],
)
def test_stages_together_hold_the_pattern_in_order(pattern, expected):
    config = RunConfig(parallel=ParallelOptions(pipeline=2, virtual_pipeline=2))
    config.model.attention = pattern
    tc = small_config(num_layers=6)
    letter = {KimiDeltaAttention: "K", GatedMLA: "M", GatedHybrid: "G"}
    found = [
        letter[layer.submodules.self_attention.module]
        for virtual_stage in range(2)
        for rank in range(2)
        for layer in block_spec(
            config, tc, pipeline_rank=rank, virtual_stage=virtual_stage
        ).layer_specs
    ]
    assert found == expected
