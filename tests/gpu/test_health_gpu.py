"""Health of attention on a GPU: the numbers of the CPU, by deterministic operators alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from megatron_ext.config.schema import Gate
from megatron_ext.ops.kda.health import AttentionHealth, Sum, layer_health

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_counts_as_a_cpu_does(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    z = (2 * torch.randn(2, 300, 12, 128, generator=generator)).to(dtype)
    slope, bias = torch.randn(12, generator=generator), torch.randn(12, 128, generator=generator)
    state = torch.randn(2, 12, 128, 128, generator=generator)
    found = []
    for device in ("cpu", "cuda"):
        health = AttentionHealth(device)
        here = [x.to(device) for x in (z, slope, bias, state)]
        health.add_decay(*here[:3], gate=Gate.bounded, lower_bound=-5.0)
        health.add_gate(Sum.OUTPUTS, Sum.OUTPUT_GATE, here[0])
        health.add_state(here[3])
        found.append(layer_health(0, health.sums.cpu(), health.maxima.cpu()))
    cpu, cuda = found
    # exp and sigmoid differ in the last bit, which moves a gate or two across an edge.
    assert cuda.values == pytest.approx(cpu.values, rel=1e-5, abs=1e-5)
    assert sum(cuda.rates) == sum(cpu.rates) == z.numel()
    assert sum(abs(a - b) for a, b in zip(cuda.rates, cpu.rates, strict=True)) < 1e-4 * z.numel()
