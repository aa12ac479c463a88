"""The tests of `tests/kernels`, compiled and on the GPU, and what `auto` does there."""

from __future__ import annotations

import warnings

import pytest
import torch

from megatron_ext.config.schema import KernelBackend
from megatron_ext.ops import situ

if torch.cuda.is_available():
    # Importing them imports Triton.
    from tests.kernels.expert_rows import *  # noqa: F403 (pytest collects them here)
    from tests.kernels.gating import *  # noqa: F403 (pytest collects them here)
    from tests.kernels.qkv_conv import *  # noqa: F403 (pytest collects them here)
    from tests.kernels.situ import *  # noqa: F403 (pytest collects them here)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def test_auto_is_triton_and_says_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for dtype in (torch.float32, torch.bfloat16):
            chosen = situ.resolve_backend(
                KernelBackend.auto, torch.device("cuda", 0), dtype, width=3072, require=True
            )
            assert chosen is KernelBackend.triton
