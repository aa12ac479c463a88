"""Layers on a GPU: fused kernels against float64 copies of the same layers, and equal weights."""

from __future__ import annotations

import copy
import importlib.util
import itertools

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_ext.config.schema import Device, Gate, KdaBackend, KdaOptions, MlaOptions
from megatron_ext.layers.core_attention import SdpaAttention, TransformerEngineAttention
from megatron_ext.layers.gated_mla import GatedMLA, GatedMlaSubmodules
from megatron_ext.layers.initializers import (
    LogOfUniform,
    LogUniformSoftplusInverse,
    Normal,
    Uniform,
)
from megatron_ext.layers.kda import KimiDeltaAttention
from megatron_ext.model.init import fill
from megatron_ext.ops.kda import cudnn
from tests.support.one_rank import (
    assert_close_in_bfloat16,
    draw,
    one_rank,
    outputs_and_gradients,
    small_config,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
BOUNDS = [0, 100, 101, 400, 512]


@pytest.fixture(scope="module")
def groups():
    with one_rank(Device.cuda) as collection:
        yield collection


def packed():
    cu_seqlens = torch.tensor(BOUNDS, dtype=torch.int32, device="cuda")
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=299,
        max_seqlen_kv=299,
    )


def mla(groups, kernel, dtype):
    return GatedMLA(
        small_config(hidden_size=256, params_dtype=dtype),
        options=MlaOptions(num_heads=4, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
        submodules=GatedMlaSubmodules(core_attention=kernel),
        pg_collection=groups,
    )


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("kernel", [SdpaAttention, TransformerEngineAttention])
def test_gated_mla_in_bfloat16_follows_float64(groups, kernel, documents):
    if kernel is TransformerEngineAttention and not importlib.util.find_spec("transformer_engine"):
        pytest.skip("Transformer Engine is not installed")
    layer = mla(groups, kernel, torch.bfloat16)
    draw(layer, std=0.05)
    twin = mla(groups, SdpaAttention, torch.float64)
    twin.load_state_dict(
        {k: v for k, v in layer.state_dict().items() if isinstance(v, torch.Tensor)}, strict=False
    )
    forward = {"packed_seq_params": packed()} if documents else {}
    x = torch.randn(512, 1, 256, device="cuda").bfloat16()
    upstream = torch.randn_like(x)
    assert_close_in_bfloat16(
        outputs_and_gradients(layer, x, upstream, **forward),
        outputs_and_gradients(twin, x.double(), upstream, **forward),
    )


@pytest.mark.parametrize(
    "backend", [KdaBackend.auto, KdaBackend.dense, KdaBackend.fla, KdaBackend.cudnn]
)
@pytest.mark.parametrize("documents", [False, True])
def test_kda_in_bfloat16_follows_float64(groups, backend, documents):
    if backend in (KdaBackend.auto, KdaBackend.fla) and not importlib.util.find_spec("fla"):
        pytest.skip("fla is not installed")
    reasons = cudnn.misfits(torch.device("cuda"), head_dim=128, gate=Gate.bounded)
    if backend is KdaBackend.cudnn and reasons:
        pytest.skip("; ".join(reasons))
    options = KdaOptions(num_heads=2, head_dim=128, value_dim=128, backend=backend, require=True)
    layer = KimiDeltaAttention(
        small_config(hidden_size=256, params_dtype=torch.bfloat16),
        options=options,
        pg_collection=groups,
    )
    draw(layer, std=0.05)
    twin_options = copy.copy(options)
    twin_options.backend = KdaBackend.dense
    twin = KimiDeltaAttention(
        small_config(hidden_size=256), options=twin_options, pg_collection=groups
    )
    twin.load_state_dict(
        {k: v for k, v in layer.state_dict().items() if isinstance(v, torch.Tensor)}, strict=False
    )
    forward = {"packed_seq_params": packed()} if documents else {}
    x = torch.randn(512, 1, 256, device="cuda").bfloat16()
    upstream = torch.randn_like(x)
    assert_close_in_bfloat16(
        outputs_and_gradients(layer, x, upstream, **forward),
        outputs_and_gradients(twin, x.double(), upstream, **forward),
        # cudnn's gradient of the gate is off by 2e-2 to 3e-2 alone, and A_log sums it.
        tolerance=1e-1 if backend is KdaBackend.cudnn else 2e-2,
    )


def test_documents_in_one_kernel_equal_documents_alone(groups):
    layer = mla(groups, SdpaAttention, torch.bfloat16)
    draw(layer, std=0.05)
    x = torch.randn(512, 1, 256, device="cuda").bfloat16()
    together, _ = layer(x, packed_seq_params=packed())
    alone = torch.cat([layer(x[start:end])[0] for start, end in itertools.pairwise(BOUNDS)])
    assert_close_in_bfloat16([together], [alone])


@pytest.mark.parametrize(
    "initializer",
    [
        Normal(0.02),
        Uniform(-0.5, 0.5),
        LogOfUniform(1.0, 16.0),
        LogUniformSoftplusInverse(1e-3, 0.1),
    ],
    ids=lambda initializer: type(initializer).__name__,
)
def test_initial_weights_are_the_same_on_cpu_and_gpu(initializer):
    shape, offset, whole = (300, 5_000), (7, 100), (1_000, 20_000)
    host, device = torch.empty(shape), torch.empty(shape, device="cuda")
    for out in (host, device):
        fill(out, initializer, seed=1, name="w", global_shape=whole, offset=offset)
    # Uniform is exact; the others take functions that devices round differently, by a few units
    # in the last place of float32 at most.
    tolerance = 0.0 if isinstance(initializer, Uniform) else 5e-7
    torch.testing.assert_close(device.cpu(), host, rtol=tolerance, atol=0.0)
