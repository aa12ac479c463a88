"""Layers whose mixes our kernels take in two phases, against a mix each. On a CPU only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ext.config.schema import AttentionResidualBackend as Backend
from megatron_ext.layers import mix_norm
from megatron_ext.ops import attn_res
from megatron_ext.ops.attn_res import two_phase
from tests.kernels.common import DEVICE
from tests.support.one_rank import one_rank
from tests.support.small_model import build, loss


@pytest.mark.skipif(DEVICE == "cuda", reason="the model is built for a CPU")
def test_layers_in_two_phases_are_those_with_a_mix_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our kernels in a model, in the place of what a CPU would run."""
    for module in (attn_res, two_phase):
        monkeypatch.setattr(module, "resolve_backend", lambda *_, **__: Backend.triton)
    phases: list[int] = []
    original = mix_norm.second_phase

    def second(*args: Any, **options: Any) -> Tensor:
        phases.append(1)
        return original(*args, **options)

    monkeypatch.setattr(mix_norm, "second_phase", second)
    results = []
    with one_rank() as groups:
        for pays in (mix_norm.pays, lambda *_, **__: False):
            monkeypatch.setattr(mix_norm, "pays", pays)
            model, _ = build(
                groups, "residual=block", "residual.block_size=1", "model.num_layers=4",
                "model.attention=mla", dtype=torch.float32,
            )  # fmt: skip
            out = loss(model)
            out.backward()
            results.append([out.detach(), *(p.grad for p in model.parameters())])
            assert len(phases) == 2  # the last two layers, whose banks have three and four sources
    for got, want in zip(*results, strict=True):
        assert (got - want).norm() <= 1e-5 * want.norm() + 1e-9
