"""Health of attention: every number is its definition, is counted once, and changes nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_ext.config.schema import Gate, KdaBackend, KdaOptions, MlaOptions
from megatron_ext.layers.gated_mla import GatedMLA
from megatron_ext.layers.kda import KimiDeltaAttention
from megatron_ext.ops.kda import health as module
from megatron_ext.ops.kda import log_decay, max_inverse_decay
from megatron_ext.ops.kda.health import (
    MAXIMA,
    AttentionHealth,
    LayerHealth,
    Maximum,
    Sum,
    decay_percentile,
    layer_health,
)
from tests.support.one_rank import draw, one_rank, small_config

KDA = KdaOptions(num_heads=3, head_dim=8, value_dim=8, decay_rank=5, backend=KdaBackend.dense)
MLA = MlaOptions(
    num_heads=2, q_lora_rank=0, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8
)


def inputs(gate: Gate, *, tokens: int = 37, heads: int = 3) -> tuple[Tensor, Tensor | None, Tensor]:
    generator = torch.Generator().manual_seed(0)
    z = 2 * torch.randn(2, tokens, heads, 8, generator=generator, dtype=torch.float64)
    slope = torch.randn(heads, generator=generator)
    bias = torch.randn(heads, 8, generator=generator) - 2
    return z, None if gate is Gate.bounded_plain else slope, bias


def measure(gate: Gate, z: Tensor, slope: Tensor | None, bias: Tensor) -> AttentionHealth:
    health = AttentionHealth("cpu")
    health.add_decay(z, slope, bias, gate=gate, lower_bound=-5.0)
    return health


@pytest.mark.parametrize("gate", list(Gate))
def test_every_number_of_the_decay_is_its_definition(gate: Gate) -> None:
    z, slope, bias = inputs(gate)
    health = measure(gate, z, slope, bias)
    found = layer_health(4, health.sums, health.maxima)
    g = log_decay(z, slope, bias, gate=gate, lower_bound=-5.0)
    assert (found.layer, sum(found.rates)) == (4, g.numel())
    assert found.values["decay_mean"] == pytest.approx(float(g.exp().mean()), rel=1e-12)
    assert found.values["saturated_low"] == float((g <= -4.95).double().mean())
    assert found.values["saturated_high"] == float((g >= -0.05).double().mean())
    tile = float(max_inverse_decay(g).log().amax())
    assert found.values["tile_decay"] == pytest.approx(tile, rel=1e-12)
    for percent in (1, 10, 50, 90, 99):
        # A bin is an eighth of an octave of the rate, so at most 9.1 % off.
        rate = -math.log(decay_percentile(found.rates, percent))
        exact = float(torch.quantile(g.neg(), 1 - percent / 100))
        assert rate == pytest.approx(exact, rel=0.091, abs=1e-6), percent
    assert "beta_mean" not in found.values


def test_sums_do_not_depend_on_how_tokens_and_heads_are_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    z, slope, bias = inputs(Gate.bounded, tokens=64)
    assert slope is not None
    whole = measure(Gate.bounded, z, slope, bias)
    sums, maxima = torch.zeros_like(whole.sums), torch.zeros_like(whole.maxima)
    for rows in (slice(0, 1), slice(1, 2)):  # micro-batches or data ranks
        for tokens in (slice(0, 32), slice(32, 64)):  # context ranks, at a multiple of a tile
            for heads in (slice(0, 1), slice(1, 3)):  # tensor ranks
                part = measure(Gate.bounded, z[rows, tokens, heads], slope[heads], bias[heads])
                sums += part.sums
                maxima = torch.maximum(maxima, part.maxima)
    assert torch.allclose(sums, whole.sums, rtol=1e-14)
    assert torch.equal(sums[Sum.HISTOGRAM :], whole.sums[Sum.HISTOGRAM :])
    assert torch.allclose(maxima, whole.maxima, rtol=1e-14)
    monkeypatch.setattr(module, "_AT_ONCE", 1)  # head by head
    assert torch.allclose(measure(Gate.bounded, z, slope, bias).sums, whole.sums, rtol=1e-14)


def test_extreme_gates_are_counted_at_the_ends_and_nan_is_left_to_the_loss() -> None:
    z = torch.tensor([-1e4, 1e4, 1e4, math.nan]).view(1, 4, 1, 1)
    health = measure(Gate.bounded_plain, z, None, torch.zeros(1, 1))
    rates = health.sums[Sum.HISTOGRAM :]
    assert (health.sums[Sum.HIGH], health.sums[Sum.LOW]) == (1, 2)
    assert rates.sum() == 4
    clean = measure(Gate.bounded_plain, z[:, :3], None, torch.zeros(1, 1))
    found = layer_health(0, clean.sums, clean.maxima)
    assert decay_percentile(found.rates, 99) == pytest.approx(1.0, abs=1e-6)
    assert decay_percentile(found.rates, 1) == pytest.approx(math.exp(-5), rel=0.4)
    assert math.isnan(decay_percentile((), 50))


@pytest.mark.parametrize("valid", [0, 5, 32])
def test_padding_counts_nowhere(valid: int) -> None:
    z, slope, bias = inputs(Gate.bounded, tokens=32)
    padded, alone = AttentionHealth("cpu", valid_tokens=valid), AttentionHealth("cpu")
    junk = torch.full_like(z[:, valid:], math.nan)
    for health, rows in ((padded, torch.cat([z[:, :valid], junk], 1)), (alone, z[:, :valid])):
        health.add_decay(rows, slope, bias, gate=Gate.bounded, lower_bound=-5.0)
        health.add_gate(Sum.WRITES, Sum.BETA, rows)
    assert torch.equal(padded.sums, alone.sums)
    assert torch.equal(padded.maxima, alone.maxima)
    padded.add_state(torch.ones(2, 3, 8, 8))
    assert "state_norm" not in layer_health(0, padded.sums, padded.maxima).values


@pytest.fixture(scope="module")
def groups() -> Iterator[ProcessGroupCollection]:
    with one_rank() as collection:
        yield collection


def steps(layer: KimiDeltaAttention | GatedMLA, *, again: bool = False) -> list[Tensor]:
    """Output and gradients of a forward and backward pass; `again`: the layer is recomputed."""
    torch.manual_seed(1)
    x = torch.randn(19, 2, 24, dtype=torch.float64, requires_grad=True)
    y = checkpoint(lambda h: layer(h)[0], x, use_reentrant=True) if again else layer(x)[0]
    layer.zero_grad()
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]


def record(layer: KimiDeltaAttention | GatedMLA, *, again: bool = False) -> LayerHealth:
    layer.health = AttentionHealth("cpu")
    steps(layer, again=again)
    found = layer_health(0, layer.health.sums, layer.health.maxima)
    layer.health = None
    return found


SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}


@pytest.mark.parametrize("config", [{}, SELECTIVE], ids=["plain", "selective"])
@pytest.mark.parametrize("kind", ["kda", "mla"])
def test_measuring_changes_no_bit_and_counts_each_token_once(
    groups: ProcessGroupCollection, kind: str, config: dict
) -> None:
    make = {
        "kda": lambda: KimiDeltaAttention(
            small_config(**config), options=KDA, pg_collection=groups
        ),
        "mla": lambda: GatedMLA(small_config(**config), options=MLA, pg_collection=groups),
    }[kind]
    layer = make()
    draw(layer)
    plain = steps(layer)
    found = record(layer)
    layer.health = AttentionHealth("cpu")
    measured = steps(layer)
    assert len(plain) == len(measured)
    assert all(torch.equal(a, b) for a, b in zip(plain, measured, strict=True))
    once = {"kda": (Sum.GATES, 19 * 2 * 3 * 8), "mla": (Sum.ATTENTION_OUTPUTS, 19 * 2 * 2 * 8)}
    place, count = once[kind]
    assert layer.health.sums[place] == count
    # A layer that is recomputed as a whole runs twice; evaluation runs for nobody.
    assert record(layer, again=True).values == found.values
    layer.health = AttentionHealth("cpu")
    layer.eval()
    layer(torch.randn(5, 1, 24, dtype=torch.float64))
    assert layer.health.sums.abs().sum() == 0
    assert torch.equal(layer.health.maxima, torch.zeros(MAXIMA, dtype=torch.float64))
    layer.train()
    with torch.no_grad():
        layer(torch.randn(5, 1, 24, dtype=torch.float64))
    assert layer.health.sums.abs().sum() == 0


def test_gates_and_the_state_of_a_layer_are_their_definitions(
    groups: ProcessGroupCollection,
) -> None:
    layer = KimiDeltaAttention(small_config(), options=KDA, pg_collection=groups)
    draw(layer)
    seen: dict[str, Tensor] = {}
    layer.norm.register_forward_pre_hook(lambda _, given: seen.update(gate=given[1].detach()))
    core = layer._core

    def keep(*args: Tensor, keep_state: bool) -> tuple[Tensor, Tensor | None]:
        o, state = core(*args, keep_state=keep_state)
        assert state is not None
        seen.update(state=state.detach(), beta=args[2].detach())
        return o, state

    layer._core = keep
    found = record(layer).values
    assert found["beta_mean"] == pytest.approx(float(torch.sigmoid(seen["beta"]).mean()))
    gate = float(torch.sigmoid(seen["gate"]).mean())
    assert found["output_gate_mean"] == pytest.approx(gate)
    assert seen["state"].shape == (2, 3, 8, 8)
    norms = seen["state"].square().sum((-1, -2)).sqrt()
    assert found["state_norm"] == pytest.approx(float(norms.max()))
    assert Maximum.STATE_NORM < MAXIMA
