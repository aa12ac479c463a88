"""Kimi Delta Attention against its recurrence, written out token by token, in float64."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch.nn.functional import softplus

from megatron_ext.config.schema import Gate, GateInit, KdaBackend, KdaOptions, OutputGate
from megatron_ext.errors import ConfigError
from megatron_ext.layers.initializers import Constant, LogOfUniform, LogUniformSoftplusInverse
from megatron_ext.layers.kda import KimiDeltaAttention
from tests.support.one_rank import draw, one_rank, small_config

OPTIONS = KdaOptions(
    num_heads=3,
    head_dim=8,
    value_dim=8,
    conv_width=4,
    decay_rank=5,
    output_gate_rank=6,
    backend=KdaBackend.dense,
)


@pytest.fixture(scope="module")
def groups():
    with one_rank() as collection:
        yield collection


def make(groups, options=OPTIONS, **config):
    layer = KimiDeltaAttention(small_config(**config), options=options, pg_collection=groups)
    draw(layer)
    return layer


def convolve(x, weight):
    """SiLU of the causal depthwise convolution: x [s, b, C], weight [C, W], zeros before."""
    taps = weight.shape[-1]
    padded = torch.cat([x.new_zeros(taps - 1, *x.shape[1:]), x])
    y = sum(padded[i : i + len(x)] * weight[:, i] for i in range(taps))
    return y / (1 + torch.exp(-y))


def log_decay(options, z, p):
    bias = p["dt_bias"].double().view(options.num_heads, -1)
    if options.gate is Gate.bounded_plain:
        return options.lower_bound * torch.sigmoid(z + bias)
    rate = p["A_log"].double().exp()[:, None]
    if options.gate is Gate.softplus:
        return -rate * softplus(z + bias)
    return options.lower_bound * torch.sigmoid(rate * (z + bias))


def formula(layer, x):
    """[s, b, h] to [s, b, h]: the equations, one token after the other."""
    o, p = layer.options, dict(layer.named_parameters())
    split = (o.num_heads, o.head_dim)
    q, k, v = (
        convolve(x @ p["qkv.weight"][i].T, p["conv_weight"][i].double()).unflatten(-1, split)
        for i in range(3)
    )
    q = q / (q.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() * o.head_dim**-0.5
    k = k / (k.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt()
    z = (x @ p["decay_down.weight"].T @ p["decay_up.weight"].T).unflatten(-1, split)
    decay = log_decay(o, z, p).exp()
    beta = torch.sigmoid(x @ p["beta.weight"].T)
    state = x.new_zeros(x.shape[1], *split, o.head_dim)
    outputs = []
    for t in range(len(x)):
        state = decay[t][..., None] * state
        error = v[t] - torch.einsum("bhk,bhkv->bhv", k[t], state)
        state = state + torch.einsum("bh,bhk,bhv->bhkv", beta[t], k[t], error)
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[t], state))
    y = torch.stack(outputs)
    y = y / (y.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * p["norm.weight"]
    gate_input = x @ p["gate_down.weight"].T if "gate_down.weight" in p else x
    y = y * torch.sigmoid(gate_input @ p["gate_up.weight"].T).unflatten(-1, split)
    return y.flatten(-2) @ p["out.weight"].T


def compare(actual, wanted):
    for got, want in zip(actual, wanted, strict=True):
        # float64 all through, except that float32 parameters have float32 gradients.
        tolerance = 1e-5 if got.dtype is torch.float32 else 1e-8
        assert (got - want).norm() <= tolerance * want.norm()
        assert want.norm() > 0


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"output_gate": OutputGate.low_rank},
        {"gate": Gate.bounded_plain},
        {"gate": Gate.softplus, "backend": KdaBackend.reference},
        {"gate_init": GateInit.wide},
    ],
    ids=lambda changes: "-".join(changes) or "default",
)
def test_kda_is_its_formula_with_every_gradient(groups, changes):
    layer = make(groups, dataclasses.replace(OPTIONS, **changes))
    x = torch.randn(70, 2, 24, dtype=torch.float64, requires_grad=True)
    leaves = [x, *layer.parameters()]
    upstream = torch.randn(70, 2, 24, dtype=torch.float64)
    out, bias = layer(x)
    expected = formula(layer, x)
    assert bias is None
    compare([out], [expected])
    compare(
        torch.autograd.grad(out, leaves, upstream), torch.autograd.grad(expected, leaves, upstream)
    )


def test_packed_documents_equal_documents_alone(groups):
    layer = make(groups)
    bounds = [0, 5, 6, 75, 80]
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens)
    x = torch.randn(80, 1, 24, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(80, 1, 24, dtype=torch.float64)
    leaves = [x, *layer.parameters()]
    together, _ = layer(x, packed_seq_params=packed)
    alone = torch.cat([layer(x[start:end])[0] for start, end in itertools.pairwise(bounds)])
    compare([together], [alone])
    compare(
        torch.autograd.grad(together, leaves, upstream),
        torch.autograd.grad(alone, leaves, upstream),
    )
    # The bounds matter: without them the later documents see the earlier ones.
    assert (layer(x)[0] - together)[5:].abs().max() > 1e-3


def test_selective_recompute_changes_no_bit(groups):
    plain = make(groups)
    again = make(groups, recompute_granularity="selective", recompute_modules=["core_attn"])
    x = torch.randn(20, 2, 24, dtype=torch.float64)
    for layer in (plain, again):
        layer(x)[0].square().sum().backward()
    for one, other in zip(plain.parameters(), again.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_recurrence_parameters_are_float32_and_not_decayed_in_a_bfloat16_model(groups):
    layer = make(groups, params_dtype=torch.bfloat16)
    parameters = dict(layer.named_parameters())
    kept = {name for name, value in parameters.items() if value.dtype is torch.float32}
    assert kept == {"A_log", "dt_bias", "conv_weight"}
    undecayed = {name for name, value in parameters.items() if hasattr(value, "no_weight_decay")}
    assert undecayed == {*kept, "norm.weight"}
    out, _ = layer(torch.randn(9, 1, 24).bfloat16())
    assert out.dtype is torch.bfloat16
    out.float().sum().backward()
    assert all(value.grad is not None for value in parameters.values())


def test_initial_decay_is_stated_by_the_parameters(groups):
    slow = make(groups)
    assert slow.A_log.initializer == Constant(0.0)
    assert slow.dt_bias.initializer == LogUniformSoftplusInverse(1e-3, 0.1)
    # A half-life of 1.5 to 139 tokens where z = 0: the decay spans a sensible range at step 0.
    s = torch.linspace(-1, 1, 101).clamp(-1 + 2**-24, 1 - 2**-24)
    decay = -5 * torch.sigmoid(slow.dt_bias.initializer.from_symmetric(s))
    half_life = -torch.log(torch.tensor(2.0)) / decay
    assert 1.4 < half_life.min() < 1.5
    assert 138 < half_life.max() < 140
    wide = make(groups, dataclasses.replace(OPTIONS, gate_init=GateInit.wide))
    assert wide.A_log.initializer == LogOfUniform(1.0, 16.0)
    plain = make(groups, dataclasses.replace(OPTIONS, gate=Gate.bounded_plain))
    assert plain.A_log is None


def test_everything_sharded_is_split_by_heads(groups):
    state = make(groups).sharded_state_dict("", (), {"dp_cp_group": groups.dp_cp})
    axes = {
        name: getattr(entry.data, "partition_dim", None)
        for name, entry in state.items()
        if getattr(entry.data, "tensor_model_parallel", False)
    }
    assert axes == {
        "qkv.weight": 1,
        "conv_weight": 1,
        "decay_up.weight": 0,
        "beta.weight": 0,
        "A_log": 0,
        "dt_bias": 0,
        "gate_up.weight": 0,
        "out.weight": 1,
    }


def test_value_heads_of_another_width_are_refused(groups):
    with pytest.raises(ConfigError, match=r"model\.kda\.value_dim: 16 given"):
        make(groups, dataclasses.replace(OPTIONS, value_dim=16))
