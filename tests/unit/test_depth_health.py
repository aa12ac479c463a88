"""Health of attention residuals: definitions, bounded keys, what counts and how often."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.config.compose import compose
from megatron_ext.config.residual import mix_sources
from megatron_ext.config.schema import ResidualKind, ResidualOptions
from megatron_ext.layers.attn_res import MixNorm, OutputMix
from megatron_ext.model.build import build_chunks
from megatron_ext.observe.depth_health import (
    depth_metrics,
    depth_record,
    sublayer_name,
    weight_matrix,
)
from megatron_ext.observe.metric_table import RESIDUAL_METRICS
from megatron_ext.ops.attn_res import depth_weights_reference
from megatron_ext.ops.attn_res.health import DepthHealth, mix_health
from megatron_ext.parallel.mcore_config import transformer_config
from tests.support.loads import draw_depth
from tests.support.one_rank import draw, one_rank


@pytest.fixture(scope="module")
def groups() -> Iterator[Any]:
    with one_rank() as collection:
        yield collection


def sources(count: int, tokens: int = 7) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    shape = (count, tokens, 2, 6)
    return list(torch.randn(shape, generator=generator, dtype=torch.float64))


def test_weights_entropy_and_norms_are_their_definitions() -> None:
    v, query, key_weight = sources(3), torch.linspace(-1, 2, 6).double(), torch.ones(6).double()
    health = DepthHealth(3, "cpu")
    for half in (slice(0, 4), slice(4, 7)):  # two micro-batches
        health.add([x[half] for x in v], query, key_weight, eps=1e-5)
    found = mix_health(5, health.sums)
    a = depth_weights_reference(v, query, key_weight, eps=1e-5)
    assert (found.sublayer, found.tokens) == (5, 14)
    assert found.weights == pytest.approx(a.mean((1, 2)).tolist(), rel=1e-12)
    entropy = -(a * a.log()).sum(0).mean() / math.log(3)
    assert found.entropy == pytest.approx(float(entropy), rel=1e-12)
    rms = [float(x.square().mean(-1).sqrt().mean()) for x in v]
    assert found.norms == pytest.approx(rms, rel=1e-12)


def test_a_query_of_zeros_is_even_and_a_large_one_picks_one_source() -> None:
    v = sources(4)
    even, picked = DepthHealth(4, "cpu"), DepthHealth(4, "cpu")
    even.add(v, torch.zeros(6), torch.ones(6), eps=1e-5)
    found = mix_health(1, even.sums)
    assert found.entropy == pytest.approx(1.0)
    assert found.weights == pytest.approx([0.25] * 4)
    v[2] = torch.ones_like(v[2])
    picked.add(v, torch.full((6,), 1e3), torch.ones(6), eps=1e-5)
    assert mix_health(1, picked.sums).weights[2] > 0.999
    assert mix_health(1, picked.sums).entropy < 0.01


@pytest.mark.parametrize("valid", [0, 3, 7])
def test_padding_counts_nowhere(valid: int) -> None:
    v = sources(3)
    padded, alone = DepthHealth(3, "cpu", valid_tokens=valid), DepthHealth(3, "cpu")
    junk = [torch.cat([x[:valid], torch.full_like(x[valid:], math.nan)]) for x in v]
    query = torch.linspace(-1, 1, 6)
    padded.add(junk, query, torch.ones(6), eps=1e-5)
    alone.add([x[:valid] for x in v], query, torch.ones(6), eps=1e-5)
    assert torch.equal(padded.sums, alone.sums)


def test_a_mix_that_saw_no_token_is_an_error() -> None:
    with pytest.raises(ValueError, match="sublayer 3"):
        mix_health(3, DepthHealth(2, "cpu").sums)


def test_the_sources_of_every_mix_are_those_of_the_procedure() -> None:
    block = ResidualOptions(kind=ResidualKind.block, block_size=2)
    assert mix_sources(block, 3) == {1: 2, 2: 2, 3: 2, 4: 2, 5: 3, 6: 3}
    full = ResidualOptions(kind=ResidualKind.full)
    assert mix_sources(full, 2) == {1: 2, 2: 3, 3: 4, 4: 5}
    assert mix_sources(ResidualOptions(kind=ResidualKind.standard), 3) == {}


@pytest.mark.parametrize("kind", [ResidualKind.block, ResidualKind.full])
def test_the_number_of_keys_does_not_grow_with_depth(kind: ResidualKind) -> None:
    for layers in (2, 93 if kind is ResidualKind.block else 12):
        mixes = draw_depth(2, layers=layers, kind=kind)
        found = depth_metrics(mixes)
        assert found.keys() == {metric.name for metric in RESIDUAL_METRICS}
        entropies = [mix.entropy for mix in mixes]
        assert found["residual/entropy/min"] == min(entropies)
        assert found["residual/entropy"] == pytest.approx(sum(entropies) / len(entropies))
        assert found["residual/output_weight"] == mixes[-1].weights[-1]
        assert found["residual/source_norm/max"] == max(mixes[-1].norms)


def test_a_record_holds_the_whole_matrix() -> None:
    mixes = draw_depth(1)
    record = depth_record(mixes)
    matrix = weight_matrix(record)
    assert matrix.shape == (8, 3)
    for row, mix in zip(matrix, mixes, strict=True):
        count = len(mix.weights)
        assert row[:count] == pytest.approx(mix.weights, rel=1e-5)
        assert all(map(math.isnan, row[count:]))
    names = [sublayer_name(mix.sublayer, last=mixes[-1].sublayer) for mix in mixes]
    assert names == ["0f", "1a", "1f", "2a", "2f", "3a", "3f", "out"]
    with pytest.raises(ValueError, match="7 rows"):
        weight_matrix(record | {"weights": record["weights"][1:]})


def mixes_of(model: Any) -> list[MixNorm | OutputMix]:
    return [m for m in model.modules() if isinstance(m, MixNorm | OutputMix)]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_measuring_changes_no_bit_and_counts_each_token_once(groups: Any, recompute: str) -> None:
    config = compose(
        ["data=sample", "run.device=cpu", "model.num_layers=3", "residual=block",
         "residual.block_size=2", f"train.recompute={recompute}", "model.first_dense_layers=null"]
    )  # fmt: skip
    (model,) = build_chunks(config, transformer_config(config), groups, vocab_size=128)
    draw(model)
    tokens = torch.randint(128, (2, 10), generator=torch.Generator().manual_seed(0))

    def step() -> list[Tensor]:
        model.zero_grad()
        logits = model(input_ids=tokens, position_ids=None, attention_mask=None)
        F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        return [logits.detach(), *(p.grad for p in model.parameters())]

    plain = step()
    counts = mix_sources(config.residual, 3).values()
    for mix, count in zip(mixes_of(model), counts, strict=True):
        mix.health = DepthHealth(count, "cpu")
    assert all(torch.equal(a, b) for a, b in zip(plain, step(), strict=True))
    assert [float(mix.health.sums[0]) for mix in mixes_of(model)] == [20.0] * 6
    model.eval()  # evaluation counts for nobody
    model(input_ids=tokens, position_ids=None, attention_mask=None)
    model.train()
    with torch.no_grad():
        model(input_ids=tokens, position_ids=None, attention_mask=None)
    assert [float(mix.health.sums[0]) for mix in mixes_of(model)] == [20.0] * 6
