"""The mix over depth on a GPU: fla's fused kernel and the dense form against float64."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from megatron_ext.config.schema import AttentionResidualBackend as Backend
from megatron_ext.config.schema import Device, ResidualKind, ResidualOptions
from megatron_ext.layers.attn_res import MixNorm
from megatron_ext.ops.attn_res import depth_mix, resolve_backend
from tests.support.one_rank import draw, one_rank, small_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
needs_fla = pytest.mark.skipif(
    importlib.util.find_spec("fla") is None, reason="needs the package fla-core"
)
EPS = 1e-5
BACKENDS = [Backend.dense, Backend.triton, pytest.param(Backend.fla, marks=needs_fla)]
# Of outputs and sources one rounding to 8 bits, at most 2^-9 of an element; fla's exponentials are
# good to some 1e-6. The gradients of the vectors are float32 sums over tokens.
TOLERANCE = {torch.bfloat16: 2**-8, torch.float32: 1e-4}


def inputs(count, dtype, *, width, norm, shape=(129, 2)):
    generator = torch.Generator().manual_seed(count)

    def make(*size):
        return torch.randn(*size, generator=generator)

    sources = [(1.5**j * make(*shape, width)).to("cuda", dtype) for j in range(count)]
    vectors = [0.1 * make(width).cuda(), 1 + make(width).cuda() / 4]
    if norm:  # its weight has the dtype of the model, the other two are always float32
        vectors.append((1 + make(width).cuda() / 4).to(dtype))
    return [v.requires_grad_() for v in sources], [v.requires_grad_() for v in vectors]


def run(sources, vectors, backend):
    query, key_weight, *norm = vectors
    out = depth_mix(
        sources,
        query,
        key_weight,
        eps=EPS,
        norm_weight=norm[0] if norm else None,
        backend=backend,
        require=True,
    )
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).bfloat16()
    return [out, *torch.autograd.grad(out, [*sources, *vectors], upstream.to(out))]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("count", "width"), [(1, 128), (5, 128), (5, 1000), (9, 1000)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_mix_is_the_formula(backend, count, width, norm, dtype):
    sources, vectors = inputs(count, dtype, width=width, norm=norm)
    exact = [[v.detach().double().requires_grad_() for v in part] for part in (sources, vectors)]
    found, wanted = run(sources, vectors, backend), run(*exact, Backend.reference)
    assert found[0].dtype == dtype
    for got, want in zip(found, wanted, strict=True):
        # A lone source has weight 1 whatever the query: that gradient is zero, or rounding.
        scale = max(float(want.norm()), 0.1 * float(wanted[1].norm()))
        assert float((got.double() - want).norm()) <= TOLERANCE[dtype] * scale


@needs_fla
def test_auto_is_our_kernel_on_a_gpu_and_fla_beyond_it():
    device = torch.device("cuda", 0)
    for dtype in (torch.bfloat16, torch.float32):
        for count, expected in ((9, Backend.triton), (17, Backend.fla)):
            found = resolve_backend(Backend.auto, device, dtype=dtype, width=7168, count=count)
            assert found is expected
    assert resolve_backend(Backend.auto, device, dtype=torch.float64, width=64) is Backend.dense


@pytest.mark.parametrize("backend", [Backend.triton, pytest.param(Backend.fla, marks=needs_fla)])
def test_zero_queries_give_the_mean(backend):
    sources, (query, key_weight) = inputs(4, torch.float32, width=128, norm=False)
    mixed = depth_mix(sources, torch.zeros_like(query), key_weight, eps=EPS, backend=backend)
    torch.testing.assert_close(mixed, torch.stack(sources).mean(0), rtol=1e-5, atol=1e-5)


@needs_fla
def test_fla_keeps_little_beside_the_sources():
    for count in (2, 8):
        sources, vectors = inputs(count, torch.bfloat16, width=128, norm=True)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        out = depth_mix(
            sources, vectors[0], vectors[1], eps=EPS, norm_weight=vectors[2], backend=Backend.fla
        )
        kept = torch.cuda.memory_allocated() - before - out.numel() * out.element_size()
        tokens = sources[0].numel() // sources[0].shape[-1]
        # Two float32 numbers a token and source; each of a few tensors is rounded up to 512 bytes.
        assert kept <= 2 * 4 * tokens * count + 6 * 512
        del out


@needs_fla
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_pre_norm_over_fla_follows_the_dense_one(dtype):
    with one_rank(Device.cuda):
        norms = []
        for backend in (Backend.fla, Backend.dense):
            options = ResidualOptions(kind=ResidualKind.block, backend=backend, require=True)
            norm = MixNorm(small_config(hidden_size=128, params_dtype=dtype), 128, options=options)
            draw(norm)
            norms.append(norm)
        sources, _ = inputs(3, dtype, width=128, norm=False)
        pairs = [norm(tuple(sources)) for norm in norms]
        assert all(residual is sources[-1] for _, residual in pairs)
        ours, dense = (normed for normed, _ in pairs)
        assert ours.dtype == dense.dtype == dtype
        assert (ours - dense).norm() <= 2 * TOLERANCE[dtype] * dense.norm()
