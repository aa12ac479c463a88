"""Rules that our routing kernel may select for, where it is refused, and what a plan sees of it."""

from __future__ import annotations

import pytest
import torch

from megatron_ext.config.schema import BalanceOptions, BalanceRule, KernelBackend, KernelOptions
from megatron_ext.errors import ConfigError
from megatron_ext.layers.balance import build_balancer
from megatron_ext.ops.quantile import Bins, add_statistics
from megatron_ext.ops.router import resolve_backend, route_tokens

BY_BIAS = ["quantile", "quantile_exact", "sign", "none"]
TRITON = KernelOptions(backend=KernelBackend.triton, require=True)


@pytest.mark.parametrize("rule", list(BalanceRule))
def test_only_rules_that_are_a_bias_leave_the_selection_to_the_operator(rule):
    balancer = build_balancer(BalanceOptions(rule=rule), num_experts=8, top_k=2, device="cpu")
    assert balancer.largest_biased == (rule.value in BY_BIAS)


def test_a_required_kernel_is_refused_where_it_cannot_run():
    logits, bias = torch.randn(4, 8), torch.zeros(8)
    with pytest.raises(ConfigError, match="route_tokens"):
        route_tokens(logits, bias, top_k=2, scaling=1.0, kernels=TRITON)
    routing = route_tokens(logits, bias, top_k=2, scaling=1.0)
    bins = Bins(16, BalanceOptions().placement)
    with pytest.raises(ConfigError, match="add_statistics"):
        add_statistics(
            torch.zeros(9, dtype=torch.int64),
            bins.zeros(8),
            routing.scores,
            bins=bins,
            map=routing.map,
            cutoff=routing.cutoff,
            bias=bias,
            kernels=TRITON,
        )


def test_what_does_not_fit_is_torch_and_said_why(monkeypatch):
    monkeypatch.setattr("megatron_ext.ops.router.triton_misfit", lambda device, dtype: None)
    gpu = torch.device("cuda")
    for dtype, experts, reason in (
        (torch.bfloat16, 8, "float32 logits"),
        (torch.float32, 2000, "at most 1024 experts, given 2000"),
    ):
        given = {"device": gpu, "dtype": dtype, "experts": experts}
        assert resolve_backend(KernelBackend.auto, **given) is KernelBackend.dense
        with pytest.raises(ConfigError, match=reason):
            resolve_backend(KernelBackend.auto, **given, require=True)


@pytest.mark.parametrize(
    ("backend", "experts", "kept"),
    [("auto", 8, 7 * 2 * 6), ("dense", 8, None), ("auto", 2000, None)],
)
def test_a_plan_counts_what_the_kernel_keeps(backend, experts, kept):
    logits = torch.empty(7, experts, device="meta", requires_grad=True)
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: sizes.append(x.numel() * x.element_size()), lambda x: x
    ):
        routing = route_tokens(
            logits,
            torch.empty(experts, device="meta"),
            top_k=2,
            scaling=1.0,
            kernels=KernelOptions(backend=KernelBackend[backend]),
        )
    shapes = [tuple(x.shape) for x in routing]
    assert shapes == [(7, experts), (7, experts), (7, experts), (7,)]
    assert routing.map.dtype is torch.bool
    assert sum(sizes) == kept if kept else sum(sizes) > 7 * experts * 9
