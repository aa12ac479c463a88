"""On a GPU nothing is replaced, NCCL connects late, and counting leaves the device alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from megatron_ext.config.schema import (
    BalanceOptions,
    BalanceRule,
    Device,
    ParallelOptions,
    Precision,
    RunConfig,
    RunOptions,
)
from megatron_ext.layers.balance import TokenGroup, build_balancer
from megatron_ext.model.build import build_chunks
from megatron_ext.model.count import count_parameters
from megatron_ext.ops.quantile import HostCopy
from megatron_ext.parallel import cpu_support, mesh, runtime
from megatron_ext.parallel.mcore_config import transformer_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.fixture
def started() -> Iterator[runtime.Runtime]:
    originals = {name: getattr(torch.cuda, name) for name in ("current_device", "Stream", "stream")}
    yield runtime.start(RunOptions(device=Device.auto, precision=Precision.bf16))
    assert {name: getattr(torch.cuda, name) for name in originals} == originals
    assert cpu_support.installed_device() is None
    runtime.stop()


def test_a_gpu_run_replaces_nothing_and_builds_in_bf16_on_the_gpu(
    started: runtime.Runtime,
) -> None:
    assert (started.device.type, started.backend) == ("cuda", "nccl")
    config = RunConfig(run=RunOptions(device=Device.cuda, precision=Precision.bf16))
    groups = mesh.build_mesh(ParallelOptions())
    chunks = build_chunks(config, transformer_config(config), groups, vocab_size=256)
    parameters = dict(chunks[0].named_parameters())
    assert {parameter.device for parameter in parameters.values()} == {started.device}
    kept = {name for name, parameter in parameters.items() if parameter.dtype is not torch.bfloat16}
    assert {"decoder.layers.0.self_attention.A_log", "decoder.layers.0.self_attention.dt_bias"} <= (
        kept
    )
    before = torch.cuda.memory_allocated()
    counts = count_parameters(config, 256)
    assert torch.cuda.memory_allocated() == before
    assert counts.total == sum(parameter.numel() for parameter in parameters.values())


def test_a_cpu_run_on_a_machine_with_a_gpu_stays_on_the_cpu() -> None:
    place = runtime.start(RunOptions(device=Device.cpu))
    try:
        assert (place.device.type, place.backend) == ("cpu", "gloo")
        assert torch.empty(1, device=torch.cuda.current_device()).device.type == "cpu"
        groups = mesh.build_mesh(ParallelOptions())
        config = RunConfig()
        chunks = build_chunks(config, transformer_config(config), groups, vocab_size=256)
        assert {p.device.type for chunk in chunks for p in chunk.parameters()} == {"cpu"}
    finally:
        runtime.stop()
        cpu_support.uninstall()


def test_records_of_experts_reach_the_host_before_what_is_queued_after_them() -> None:
    options = BalanceOptions(rule=BalanceRule.quantile)
    balancer = build_balancer(options, num_experts=16, top_k=2, device="cuda")
    scores = torch.rand(64, 16, device="cuda")
    selection = balancer.select(scores, valid=None, tokens=TokenGroup())
    balancer.observe(scores, selection, valid=None, tokens=TokenGroup())
    load = balancer.update(layer=3)
    wanted, bias = load.counts.tolist(), load.new_bias.tolist()
    copy = HostCopy([load])
    torch.cuda._sleep(2_000_000_000)  # a second or so
    ended = torch.cuda.Event()
    ended.record()
    balancer.bias.zero_()
    (host,) = copy.wait()
    assert not ended.query()
    assert host.counts.tolist() == wanted
    assert host.new_bias.tolist() == bias
    torch.cuda.synchronize()
