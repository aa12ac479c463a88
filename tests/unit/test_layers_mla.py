"""Gated MLA against plain attention built from expanded weights, in float64."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_ext.config.schema import MlaOptions
from megatron_ext.layers.gated_mla import GatedMLA
from tests.support.one_rank import draw, one_rank, small_config

OPTIONS = MlaOptions(
    num_heads=3,
    q_lora_rank=10,
    kv_lora_rank=8,
    qk_nope_head_dim=6,
    qk_rope_head_dim=4,
    v_head_dim=5,
)


@pytest.fixture(scope="module")
def groups():
    with one_rank() as collection:
        yield collection


def make(groups, options=OPTIONS, **config):
    layer = GatedMLA(small_config(**config), options=options, pg_collection=groups)
    draw(layer)
    return layer


def rms(x, weight, eps):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def formula(layer, x):
    """[s, b, h] to [s, b, h] by the equations, head by head."""
    o, p = layer.options, dict(layer.named_parameters())
    if o.q_lora_rank:
        latent = rms(x @ p["q_down.weight"].T, p["q_latent_norm.weight"], o.norm_eps)
    else:
        latent = x
    kv = x @ p["kv_down.weight"].T
    c = rms(kv[..., : o.kv_lora_rank], p["kv_latent_norm.weight"], o.norm_eps)
    shared = kv[..., o.kv_lora_rank :]
    key_width = o.qk_nope_head_dim + o.qk_rope_head_dim
    heads = []
    for h in range(o.num_heads):
        q = latent @ p["q_up.weight"].view(o.num_heads, key_width, -1)[h].T
        expanded = c @ p["kv_up.weight"].view(o.num_heads, -1, o.kv_lora_rank)[h].T
        k = torch.cat([expanded[..., : o.qk_nope_head_dim], shared], dim=-1)
        v = expanded[..., o.qk_nope_head_dim :]
        scores = torch.einsum("ibd,jbd->bij", q, k) / key_width**0.5
        mask = torch.ones(len(x), len(x), dtype=torch.bool).tril()
        heads.append(
            torch.einsum("bij,jbd->ibd", scores.masked_fill(~mask, -torch.inf).softmax(-1), v)
        )
    out = torch.cat(heads, dim=-1)
    if o.output_gate:
        out = out / (1 + torch.exp(-(x @ p["gate.weight"].T)))
    return out @ p["out.weight"].T


@pytest.mark.parametrize("changes", [{}, {"q_lora_rank": 0}, {"output_gate": False}])
def test_gated_mla_is_its_formula_with_every_gradient(groups, changes):
    layer = make(groups, dataclasses.replace(OPTIONS, **changes))
    x = torch.randn(9, 2, 24, dtype=torch.float64, requires_grad=True)
    leaves = [x, *layer.parameters()]
    upstream = torch.randn(9, 2, 24, dtype=torch.float64)
    out, bias = layer(x)
    expected = formula(layer, x)
    assert bias is None
    # float64 in both; only the order of sums differs.
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
    actual = torch.autograd.grad(out, leaves, upstream)
    wanted = torch.autograd.grad(expected, leaves, upstream)
    for got, want in zip(actual, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)
        assert want.abs().max() > 0


def packed(bounds):
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    longest = max(b - a for a, b in itertools.pairwise(bounds))
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def test_packed_documents_equal_documents_alone(groups):
    layer = make(groups)
    bounds = [0, 5, 6, 14]
    x = torch.randn(14, 1, 24, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(14, 1, 24, dtype=torch.float64)
    leaves = [x, *layer.parameters()]
    together, _ = layer(x, packed_seq_params=packed(bounds))
    alone = torch.cat([layer(x[a:b])[0] for a, b in itertools.pairwise(bounds)])
    torch.testing.assert_close(together, alone, rtol=1e-10, atol=1e-12)
    for got, want in zip(
        torch.autograd.grad(together, leaves, upstream),
        torch.autograd.grad(alone, leaves, upstream),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)
    # The bounds matter: without them the later documents see the earlier ones.
    assert (layer(x)[0] - together)[5:].abs().max() > 1e-3


def test_selective_recompute_changes_no_bit(groups):
    plain = make(groups)
    again = make(groups, recompute_granularity="selective", recompute_modules=["core_attn"])
    x = torch.randn(7, 2, 24, dtype=torch.float64)
    for layer in (plain, again):
        layer(x)[0].square().sum().backward()
    for one, other in zip(plain.parameters(), again.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
