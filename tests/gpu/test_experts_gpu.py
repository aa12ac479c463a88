"""Experts on a GPU: every backend and dispatcher against float64, routing equal to the CPU's."""

from __future__ import annotations

import importlib.util
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from megatron_ext.config.schema import (
    BalanceOptions,
    BalanceRule,
    BinPlacement,
    Device,
    Dispatcher,
    ExpertBackend,
    ExpertOptions,
    KernelBackend,
    KernelOptions,
    RouterMatmul,
)
from megatron_ext.errors import ConfigError
from megatron_ext.layers.balance import TokenGroup, build_balancer
from megatron_ext.layers.latent_moe import LatentMoE
from megatron_ext.layers.router import BalancedRouter
from megatron_ext.ops.grouped_mlp import grouped_mlp, grouped_mlp_reference, resolve_backend
from megatron_ext.ops.router import router_logits
from tests.support.cuda import no_waits
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
BOUNDS = {"beta": 4.0, "linear_beta": 25.0}
OPTIONS = ExpertOptions(
    num_experts=8,
    top_k=2,
    latent_size=128,
    feed_forward_size=64,
    shared_feed_forward_size=96,
    scaling=1.5,
)
FAST = [
    ExpertBackend.grouped_mm,
    pytest.param(
        ExpertBackend.transformer_engine,
        marks=pytest.mark.skipif(
            importlib.util.find_spec("transformer_engine") is None,
            reason="needs Transformer Engine",
        ),
    ),
]
# Two products and an activation, each rounded to 8 bits: 3e-3 to 5e-3 are expected.
BFLOAT16 = 1e-2


@pytest.fixture(scope="module")
def groups():
    with one_rank(Device.cuda) as collection:
        yield collection


def experts_inputs(counts, *, latent=128, width=64):
    torch.manual_seed(0)
    rows, experts = sum(counts), len(counts)
    x = torch.randn(rows, latent, device="cuda").bfloat16()
    fc1 = (torch.randn(experts, 2, width, latent, device="cuda") * latent**-0.5).bfloat16()
    fc2 = (torch.randn(experts, latent, width, device="cuda") * width**-0.5).bfloat16()
    scale = torch.rand(rows, device="cuda")
    x, scale, fc1, fc2 = (leaf.requires_grad_() for leaf in (x, scale, fc1, fc2))
    return x, torch.tensor(counts), scale, fc1, fc2


def run(function, inputs, **options):
    leaves = [x for x in inputs if x.requires_grad]
    out = function(*inputs, **BOUNDS, **options)
    generator = torch.Generator().manual_seed(1)
    upstream = torch.randn(out.shape, generator=generator).bfloat16().to(out)
    return [out, *torch.autograd.grad(out, leaves, upstream)]


@pytest.mark.parametrize("backend", [*FAST, ExpertBackend.loop])
@pytest.mark.parametrize("counts_on", ["cpu", "cuda"])
@pytest.mark.parametrize(
    "counts", [[64, 64, 64, 64], [1, 0, 200, 55], [0, 0, 0, 3], [37, 1, 0, 0], [0, 0]]
)
def test_every_backend_is_the_formula(counts, counts_on, backend):
    # What the allocator hands out next is full of NaN: a gradient that is not set would show.
    for _ in range(8):
        torch.full((len(counts), 2, 64, 128), float("nan"), device="cuda", dtype=torch.bfloat16)
    inputs = experts_inputs(counts)
    exact = [x.detach().double().requires_grad_() if x.requires_grad else x for x in inputs]
    wanted = run(grouped_mlp_reference, exact)
    inputs = [inputs[0], inputs[1].to(counts_on), *inputs[2:]]
    found = run(grouped_mlp, inputs, backend=backend, require=True)
    for got, want in zip(found, wanted, strict=True):
        assert got.shape == want.shape
        assert (got.double() - want).norm() <= BFLOAT16 * want.norm()


def test_a_gradient_that_is_one_number_expanded_is_taken():
    # As `out.sum().backward()` makes it; grouped_mm itself refuses strides of zero.
    x, counts, scale, fc1, fc2 = experts_inputs([40, 24])
    out = grouped_mlp(x, counts, scale, fc1, fc2, **BOUNDS, backend=ExpertBackend.grouped_mm)
    expanded = torch.autograd.grad(out.sum(), [x, fc1, fc2], retain_graph=True)
    written_out = torch.autograd.grad(out, [x, fc1, fc2], torch.ones_like(out))
    for a, b in zip(expanded, written_out, strict=True):
        torch.testing.assert_close(a, b)


def test_auto_is_grouped_mm_in_bfloat16_and_the_loop_in_float32():
    gpu = {"device": torch.device("cuda", 0), "widths": (128, 64)}
    found = resolve_backend(ExpertBackend.auto, dtype=torch.bfloat16, require=True, **gpu)
    assert found is ExpertBackend.grouped_mm
    assert resolve_backend(ExpertBackend.auto, dtype=torch.float32, **gpu) is ExpertBackend.loop
    with pytest.raises(ConfigError, match="bfloat16 only"):
        resolve_backend(ExpertBackend.auto, dtype=torch.float32, require=True, **gpu)


def layer(groups, options, dtype):
    config = small_config(
        hidden_size=256,
        params_dtype=dtype,
        num_moe_experts=options.num_experts,
        moe_router_topk=options.top_k,
        moe_router_load_balancing_type="none",
    )
    balance = BalanceOptions(rule=BalanceRule.none)
    made = LatentMoE(config, options=options, balance=balance, **BOUNDS, pg_collection=groups)
    made.set_layer_number(1)
    made.router.balancer.bias[0] = -2.0  # nobody takes expert 0
    return made


@pytest.mark.parametrize("backend", [*FAST, ExpertBackend.loop])
@pytest.mark.parametrize("dispatcher", list(Dispatcher))
def test_the_mixture_in_bfloat16_follows_float64(groups, dispatcher, backend):
    options = replace(OPTIONS, dispatcher=dispatcher, backend=backend, require=True)
    made = layer(groups, options, torch.bfloat16)
    draw(made, std=0.05)
    twin = layer(groups, replace(options, backend=ExpertBackend.loop), torch.float64)
    twin.load_state_dict(
        {k: v for k, v in made.state_dict().items() if isinstance(v, torch.Tensor)}, strict=False
    )
    maps = []

    def keep(router, scores, selection):
        maps.append(selection.map)
        return selection.map

    made.router.hook = keep
    # A score that nearly ties could go elsewhere in float64, which no tolerance covers.
    twin.router.hook = lambda router, scores, selection: maps[0]
    x = torch.randn(256, 2, 256, device="cuda").bfloat16()
    upstream = torch.randn_like(x)
    found = outputs_and_gradients(made, x, upstream)
    assert_close_in_bfloat16(found, outputs_and_gradients(twin, x.double(), upstream))
    assert not maps[0][:, 0].any()
    names = ["", "x", *(name for name, _ in made.named_parameters())]
    gradients = dict(zip(names, found, strict=True))
    for name in ("experts.fc1", "experts.fc2"):
        assert not gradients[name][0].any()


# float32 sums of 256 exact products; TF32 cuts the upstream gradient to 10 bits, bf16 to 7.
@pytest.mark.parametrize(
    ("precision", "backward"),
    [
        (RouterMatmul.fp32, 1e-6),
        (RouterMatmul.tf32, 1e-3),
        (RouterMatmul.bf16, 5e-3),
        (RouterMatmul.auto, 5e-3),
    ],
)
def test_the_router_product_keeps_float32_sums(precision, backward):
    torch.manual_seed(0)
    x = torch.randn(300, 256, device="cuda").bfloat16().requires_grad_()
    weight = torch.randn(56, 256, device="cuda").bfloat16().requires_grad_()
    out = router_logits(x, weight, precision=precision)
    exact = x.double() @ weight.double().T
    assert out.dtype == torch.float32
    assert (out.double() - exact).norm() <= 1e-6 * exact.norm()
    upstream = torch.randn_like(out)
    found = torch.autograd.grad(out, (x, weight), upstream)
    wanted = torch.autograd.grad(exact, (x, weight), upstream.double())
    for got, want in zip(found, wanted, strict=True):
        # The gradients themselves are rounded to bfloat16, both times.
        assert (got.double() - want.double()).norm() <= (backward + 2**-8) * want.double().norm()


@pytest.mark.parametrize("placement", list(BinPlacement))
def test_routing_and_statistics_are_those_of_the_cpu(placement):
    generator = torch.Generator().manual_seed(0)
    scores = torch.sigmoid(torch.randn(2000, 896, generator=generator))
    scores[:100] = 0.5  # ties
    options = BalanceOptions(rule=BalanceRule.quantile, placement=placement)
    balancers = [
        build_balancer(options, num_experts=896, top_k=16, device=device)
        for device in ("cpu", "cuda")
    ]
    for step in range(3):
        # The same bias: it is rounded from float64, where devices differ in the last bit.
        balancers[1].bias.copy_(balancers[0].bias)
        made = []
        for balancer in balancers:
            x = scores.roll(step, 1).to(balancer.device)
            selection = balancer.select(x, valid=None, tokens=TokenGroup())
            balancer.observe(x, selection, valid=None, tokens=TokenGroup())
            statistics = [tensor.cpu().clone() for tensor in balancer.statistics()]
            made.append([selection.map.cpu(), selection.cutoff.cpu(), *statistics])
        for ours, theirs in zip(*made, strict=True):
            assert torch.equal(ours, theirs)
        cpu, cuda = (balancer.update(0).new_bias.cpu() for balancer in balancers)
        torch.testing.assert_close(cuda, cpu, rtol=0.0, atol=1e-6)


def test_routing_statistics_and_update_do_not_wait(groups):
    made = layer(groups, OPTIONS, torch.bfloat16)
    draw(made, std=0.05)
    router = made.router
    router.balancer = build_balancer(BalanceOptions(), num_experts=8, top_k=2, device="cuda")
    x = torch.randn(64, 2, 256, device="cuda").bfloat16().requires_grad_()
    for tried in range(2):  # the first call may build handles
        with no_waits() if tried else nullcontext():
            weights, _ = router(x)
            torch.autograd.grad(weights, [x, router.weight], torch.ones_like(weights))
            load = router.balancer.update(0)
    assert int(load.tokens) == 128


@pytest.mark.parametrize("rule", [BalanceRule.quantile, BalanceRule.sign])
def test_the_router_by_our_kernels_is_the_router_in_torch(groups, rule):
    """Padding, statistics, update, evaluation and a second pass, as recomputation makes it."""
    options = replace(OPTIONS, num_experts=56, top_k=6)
    config = small_config(
        hidden_size=256,
        params_dtype=torch.float32,
        num_moe_experts=56,
        moe_router_topk=6,
        moe_router_load_balancing_type="none",
    )
    torch.manual_seed(0)
    x = torch.randn(300, 2, 256, device="cuda")
    padding = torch.rand(300, 2, device="cuda") < 0.2
    upstream = torch.randn(600, 56, device="cuda")
    made = []
    for backend in (KernelBackend.triton, KernelBackend.dense):
        router = BalancedRouter(
            config,
            options=options,
            balance=BalanceOptions(rule=rule),
            kernels=KernelOptions(backend=backend, require=True),
            pg_collection=groups,
        )
        draw(router, std=0.05)
        given = x.clone().requires_grad_()
        with torch.no_grad():
            first = router(given, padding)
        weights, chosen = router(given, padding)
        assert torch.equal(first[0], weights)
        grads = torch.autograd.grad(weights, [given, router.weight], upstream)
        router.eval()
        assert torch.equal(router(given, padding)[1], chosen)
        counts = router.balancer.counts.clone()
        made.append([chosen, counts, weights, *grads, router.balancer.update(0).new_bias])
    assert torch.equal(made[0][0], made[1][0])
    assert torch.equal(made[0][1], made[1][1])
    assert made[0][1][-1] == (~padding).sum()
    for ours, theirs in zip(made[0][2:], made[1][2:], strict=True):
        # Scores differ in the last bit, and a margin may be on the other side of a bin's edge.
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
