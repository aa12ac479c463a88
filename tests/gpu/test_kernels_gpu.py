"""The tests of `tests/kernels`, compiled and on the GPU, and what `auto` does there."""

from __future__ import annotations

import warnings
from importlib import import_module

import pytest
import torch

from megatron_ext.config.schema import BinPlacement, KernelBackend
from megatron_ext.ops import (
    cross_entropy,
    expert_rows,
    gating,
    qkv_conv,
    quantile,
    rms_norm,
    router,
    situ,
)
from megatron_ext.ops.kda import inputs

KERNELS = (
    "attn_res",
    "cross_entropy",
    "expert_rows",
    "gating",
    "kda_backward",
    "kda_health",
    "kda_inputs",
    "qkv_conv",
    "rms_norm",
    "router",
    "situ",
    "statistics",
)
if torch.cuda.is_available():  # importing them imports Triton
    for kernel in KERNELS:
        # By kernel: two files may use one name, and the second would hide the first.
        globals().update(
            {
                f"test_{kernel}_{name.removeprefix('test_')}": value
                for name, value in vars(import_module(f"tests.kernels.{kernel}")).items()
                if name.startswith("test_")
            }
        )

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("operator", "sizes"),
    [
        (situ, [3072]),
        (gating, [128]),
        (rms_norm, [7168]),
        (rms_norm, [512]),
        (qkv_conv, [4]),
        (expert_rows, []),
        (cross_entropy, [20480]),
        (cross_entropy, [512]),
    ],
)
def test_auto_is_triton_and_says_nothing(operator, sizes, dtype):
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        chosen = operator.resolve_backend(
            KernelBackend.auto, torch.device("cuda", 0), dtype, *sizes, require=True
        )
    assert chosen is KernelBackend.triton


@pytest.mark.parametrize("placement", list(BinPlacement))
def test_routing_is_by_triton_and_nothing_is_said(placement):
    given = (KernelBackend.auto, torch.device("cuda", 0), torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for experts in (8, 100, 896):
            chosen = router.resolve_backend(*given, experts=experts, require=True)
            assert chosen is KernelBackend.triton
        bins = quantile.Bins(128, placement)
        chosen = quantile.statistics.resolve_backend(*given, bins=bins, experts=896, require=True)
    assert chosen is KernelBackend.triton


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_inputs_of_kda_are_made_by_triton_and_nothing_is_said(dtype):
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        chosen = inputs.resolve_backend(torch.device("cuda", 0), dtype, width=128)
    assert chosen is KernelBackend.triton
