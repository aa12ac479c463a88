"""Norms, linears, the feed-forward and the softmax core against their formulas, in float64."""

from __future__ import annotations

import itertools

import pytest
import torch

from megatron_ext.config.schema import AttentionBackend
from megatron_ext.errors import ConfigError
from megatron_ext.layers.core_attention import SdpaAttention, attention_class
from megatron_ext.layers.feed_forward import SituFeedForward
from megatron_ext.layers.linears import ColumnShard, DuplicatedLinear
from megatron_ext.layers.norms import GatedHeadNorm, RMSNorm
from tests.support.one_rank import draw, one_rank, small_config


@pytest.fixture(scope="module")
def groups():
    with one_rank() as collection:
        yield collection


def close(actual, expected):
    # float64 in both; only the order of sums differs.
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


def test_rms_norm_is_its_formula(groups):
    norm = RMSNorm(small_config(), 24, eps=1e-3)
    draw(norm)
    x = torch.randn(5, 2, 24, dtype=torch.float64)
    close(norm(x), x / (x.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt() * norm.weight)


def test_rms_norm_computes_in_float32_inside(groups):
    norm = RMSNorm(small_config(params_dtype=torch.bfloat16), 512, eps=1e-5)
    draw(norm)
    x = (torch.randn(8, 512) * 100).bfloat16()
    wide = x.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight.double()
    assert norm(x).dtype is torch.bfloat16
    # One rounding to bfloat16 at the end: half a unit in the last of 8 bits, and a little.
    torch.testing.assert_close(norm(x).double(), expected, rtol=2.0**-8 * 1.01, atol=0.0)


def test_gated_head_norm_is_its_formula(groups):
    norm = GatedHeadNorm(small_config(), 6, eps=1e-5, tp_group=groups.tp)
    draw(norm)
    o = torch.randn(3, 7, 4, 6, dtype=torch.float64)
    gate = torch.randn(7, 3, 24, dtype=torch.float64)
    normed = o / (o.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight
    close(norm(o, gate), normed.flatten(-2).transpose(0, 1) / (1 + torch.exp(-gate)))


def test_column_parts_are_separate_maps(groups):
    fused = ColumnShard(
        small_config(), in_features=24, out_features=10, parts=3, tp_group=groups.tp, key="k"
    )
    draw(fused)
    x = torch.randn(5, 2, 24, dtype=torch.float64)
    assert fused.weight.shape == (3, 10, 24)
    close(fused(x), torch.cat([x @ part.T for part in fused.weight], dim=-1))


def test_sharded_state_dict_names_the_axis_that_is_split(groups):
    fused = ColumnShard(
        small_config(), in_features=24, out_features=10, parts=3, tp_group=groups.tp, key="k"
    )
    shard = fused.sharded_state_dict("p.", (), {"dp_cp_group": groups.dp_cp})["p.weight"]
    assert shard.data is fused.weight
    assert shard.global_shape == (3, 10, 24)
    assert fused.weight.partition_dim == 1
    replicated = DuplicatedLinear(
        small_config(), in_features=24, out_features=10, tp_group=groups.tp
    )
    assert not getattr(replicated.weight, "tensor_model_parallel", False)
    assert replicated.weight.sequence_parallel is False


class TwoRanks:
    """Stands for a group of two ranks where only its size is asked."""

    def size(self) -> int:
        return 2


def test_indivisible_width_is_refused_with_the_nearest_that_works(groups):
    with pytest.raises(ConfigError, match=r"model\.kda\.num_heads: 5 .*nearest that does is 4"):
        ColumnShard(
            small_config(),
            in_features=24,
            out_features=5,
            tp_group=TwoRanks(),
            key="model.kda.num_heads",
        )


def test_feed_forward_is_its_formula(groups):
    layer = SituFeedForward(
        small_config(), feed_forward_size=40, beta=4.0, linear_beta=25.0, pg_collection=groups
    )
    draw(layer)
    x = torch.randn(5, 2, 24, dtype=torch.float64) * 5
    g, u = x @ layer.fc1.weight[0].T, x @ layer.fc1.weight[1].T
    inner = 4 * torch.tanh(g / 4) / (1 + torch.exp(-g)) * 25 * torch.tanh(u / 25)
    out, bias = layer(x)
    assert bias is None
    close(out, inner @ layer.fc2.weight.T)


def attention(q, k, v, scale, bounds):
    """softmax(scale q k^T + mask) v, one row at a time."""
    out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype)
    for start, end in itertools.pairwise(bounds):
        for i in range(start, end):
            scores = torch.einsum("bhd,bjhd->bhj", q[:, i], k[:, start : i + 1]) * scale
            out[:, i] = torch.einsum("bhj,bjhd->bhd", scores.softmax(-1), v[:, start : i + 1])
    return out


@pytest.mark.parametrize("v_width", [5, 8, 11])
@pytest.mark.parametrize("bounds", [None, [0, 4, 4, 5, 12]])
def test_softmax_core_is_its_formula_with_and_without_documents(groups, v_width, bounds):
    core = SdpaAttention(
        small_config(), num_heads=3, k_channels=8, v_channels=v_width, softmax_scale=0.7
    )
    batch = 2 if bounds is None else 1
    q, k = torch.randn(2, batch, 12, 3, 8, dtype=torch.float64)
    v = torch.randn(batch, 12, 3, v_width, dtype=torch.float64)
    cu_seqlens = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
    close(core(q, k, v, cu_seqlens=cu_seqlens), attention(q, k, v, 0.7, bounds or [0, 12]))


def test_asking_for_transformer_engine_without_a_gpu_is_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert attention_class(AttentionBackend.auto) is SdpaAttention
    with pytest.raises(ConfigError, match="use sdpa"):
        attention_class(AttentionBackend.transformer_engine)
