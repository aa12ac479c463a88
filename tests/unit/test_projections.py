"""Several maps of one input: their gradients, what is kept, and that no sum is left to autograd."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ext.config.schema import (
    BalanceOptions,
    BalanceRule,
    ExpertOptions,
    KdaBackend,
    KdaOptions,
    MlaOptions,
    OutputGate,
)
from megatron_ext.layers.feed_forward import SituFeedForward
from megatron_ext.layers.gated_mla import GatedMLA
from megatron_ext.layers.kda import KimiDeltaAttention
from megatron_ext.layers.latent_moe import LatentMoE
from megatron_ext.layers.linears import project_together
from megatron_ext.ops.projections import project
from tests.support.one_rank import draw, one_rank, small_config

WIDTHS = (6, 1, 9)  # of the outputs
SHAPE = (7, 2, 24)  # of the input: s, b, h


def separate(x: Tensor, weights: list[Tensor]) -> tuple[Tensor, ...]:
    return tuple(F.linear(x, weight) for weight in weights)


def drawn(dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(0)
    x = torch.randn(SHAPE, dtype=dtype, requires_grad=True)
    return x, [torch.randn(n, SHAPE[-1], dtype=dtype, requires_grad=True) for n in WIDTHS]


def gradients(
    run: Callable[..., tuple[Tensor, ...]], x: Tensor, weights: list[Tensor], used: tuple[int, ...]
) -> list[Tensor | None]:
    """Of the input and the weights, if the loss reads the outputs `used`."""
    torch.manual_seed(1)
    made = run(x, weights)
    upstream = [torch.randn(y.shape, dtype=y.dtype) for y in made]
    return list(
        torch.autograd.grad(
            [made[i] for i in used],
            [leaf for leaf in (x, *weights) if leaf.requires_grad],
            [upstream[i] for i in used],
            allow_unused=True,
        )
    )


def subsets() -> Iterator[tuple[int, ...]]:
    for count in range(1, len(WIDTHS) + 1):
        yield from itertools.combinations(range(len(WIDTHS)), count)


@pytest.mark.parametrize("used", subsets(), ids=str)
def test_gradients_are_those_of_separate_maps(used: tuple[int, ...]) -> None:
    x, weights = drawn(torch.float64)
    actual = gradients(project, x, weights, used)
    for got, want in zip(actual, gradients(separate, x, weights, used), strict=True):
        assert (got is None) == (want is None)
        # Sums of 24 products and three terms.
        assert got is None or (got - want).norm() <= 1e-12 * want.norm()


def test_on_a_cpu_in_float32_the_bits_are_those_of_separate_maps() -> None:
    x, weights = drawn(torch.float32)
    for one, two in zip(project(x, weights), separate(x, weights), strict=True):
        assert torch.equal(one, two)
    every = (0, 1, 2)
    expected = gradients(separate, x, weights, every)
    for got, want in zip(gradients(project, x, weights, every), expected, strict=True):
        assert torch.equal(got, want)


def test_in_bfloat16_the_sum_is_no_worse_than_autograds() -> None:
    x, weights = drawn(torch.bfloat16)
    every = (0, 1, 2)
    wide = [leaf.detach().double().requires_grad_() for leaf in (x, *weights)]

    def upstream_of_bfloat16(x: Tensor, weights: list[Tensor]) -> tuple[Tensor, ...]:
        return tuple(y.bfloat16() for y in separate(x, weights))

    exact = gradients(upstream_of_bfloat16, wide[0], wide[1:], every)[0]
    ours, theirs = (gradients(run, x, weights, every)[0] for run in (project, separate))
    assert (ours - exact).norm() <= 1.01 * (theirs - exact).norm()


@pytest.mark.parametrize("frozen", ["x", "weights", "one weight"])
def test_what_no_gradient_needs_is_not_kept(frozen: str) -> None:
    x, weights = drawn(torch.float64)
    for leaf in {"x": [x], "weights": weights, "one weight": weights[:1]}[frozen]:
        leaf.requires_grad_(False)
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        project(x, weights)
    sizes = {"x": [x], "weights": weights, "one weight": [x, *weights]}[frozen]
    assert kept == [leaf.numel() for leaf in sizes]
    every = (0, 1, 2)
    expected = gradients(separate, x, weights, every)
    for got, want in zip(gradients(project, x, weights, every), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_under_autocast_the_maps_are_separate() -> None:
    x, weights = drawn(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made = project(x, weights)
    assert {y.dtype for y in made} == {torch.bfloat16}
    for y in made:
        y.float().sum().backward()
    assert x.grad.dtype is torch.float32


@pytest.fixture(scope="module")
def groups() -> Iterator[ProcessGroupCollection]:
    with one_rank() as collection:
        yield collection


def kda(groups: ProcessGroupCollection, gate: OutputGate, **more: int) -> nn.Module:
    options = KdaOptions(
        num_heads=3,
        head_dim=8,
        value_dim=8,
        decay_rank=5,
        output_gate=gate,
        output_gate_rank=6,
        backend=KdaBackend.dense,
    )
    return KimiDeltaAttention(small_config(), options=options, pg_collection=groups, **more)


def mla(groups: ProcessGroupCollection, **changes: object) -> nn.Module:
    options = MlaOptions(
        num_heads=3,
        q_lora_rank=10,
        kv_lora_rank=8,
        qk_nope_head_dim=6,
        qk_rope_head_dim=4,
        v_head_dim=5,
    )
    return GatedMLA(small_config(), options=replace(options, **changes), pg_collection=groups)


def experts(groups: ProcessGroupCollection) -> nn.Module:
    options = ExpertOptions(
        num_experts=6, top_k=2, latent_size=10, feed_forward_size=7, shared_feed_forward_size=9
    )
    return LatentMoE(
        small_config(num_moe_experts=6, moe_router_topk=2, moe_router_load_balancing_type="none"),
        options=options,
        balance=BalanceOptions(rule=BalanceRule.none),
        beta=4.0,
        linear_beta=25.0,
        pg_collection=groups,
    )


def dense(groups: ProcessGroupCollection) -> nn.Module:
    return SituFeedForward(
        small_config(), feed_forward_size=9, beta=4.0, linear_beta=25.0, pg_collection=groups
    )


LAYERS: dict[str, tuple[Callable[[ProcessGroupCollection], nn.Module], int]] = {
    "kda": (lambda groups: kda(groups, OutputGate.full_rank), 0),
    "kda_low_rank_gate": (lambda groups: kda(groups, OutputGate.low_rank), 0),
    "kda_segments": (lambda groups: kda(groups, OutputGate.full_rank, segment_tokens=3), 1),
    "mla": (mla, 0),
    "mla_without_query_latent": (lambda groups: mla(groups, q_lora_rank=0), 0),
    "experts": (experts, 1),  # the router's product has a precision of its own
    "dense": (dense, 0),
}


def autograd_sums(out: Tensor, x: Tensor) -> int:
    """How often autograd adds a gradient of x, or of x handed on, to another."""
    readers: dict[object, int] = {}
    seen, todo = set(), [out.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for reader, _ in node.next_functions:
            readers[reader] = readers.get(reader, 0) + 1
            todo.append(reader)
    handed_on = [x.grad_fn, *(n for n in seen if n and n.name().startswith("_CopyToModel"))]
    return sum(readers[node] - 1 for node in handed_on if node in readers)


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_of_a_layers_input_are_not_added_by_autograd(
    groups: ProcessGroupCollection, name: str
) -> None:
    make, sums = LAYERS[name]
    layer = make(groups)
    draw(layer)
    x = torch.randn(SHAPE, dtype=torch.float64, requires_grad=True) * 1
    assert autograd_sums(layer(x)[0], x) == sums


@pytest.mark.parametrize(("name", "up"), [("kda", "decay_up"), ("mla", "kv_up")])
def test_wide_gradients_come_as_the_projection_reads_them(
    groups: ProcessGroupCollection, name: str, up: str
) -> None:
    layer = LAYERS[name][0](groups)
    draw(layer)
    copied: list[bool] = []

    def watch(module: nn.Module, given: object, out: Tensor) -> None:
        out.register_hook(lambda grad: copied.append(not grad.is_contiguous()))

    getattr(layer, up).register_forward_hook(watch)
    layer(torch.randn(SHAPE, dtype=torch.float64))[0].square().sum().backward()
    assert copied == [False]


class Additions(TorchDispatchMode):
    """Counts sums of tensors of the input's size, and what products add to."""

    def __init__(self) -> None:
        super().__init__()
        self.sums = self.products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        size = SHAPE[0] * SHAPE[1] * SHAPE[2]
        self.sums += name in ("add", "add_") and out.numel() == size
        self.products += name == "addmm"
        return out


def test_off_the_cpu_products_add_and_no_kernel_does() -> None:
    with torch.device("meta"):
        x, weights = drawn(torch.bfloat16)
        counts = {}
        for run in (separate, project):
            with Additions() as seen:
                made = run(x, weights)
                torch.autograd.backward(made, [torch.empty_like(y) for y in made])
            counts[run] = seen.sums, seen.products
            x.grad = None
    assert counts == {separate: (2, 0), project: (0, 2)}


def test_only_maps_of_one_and_the_same_tensor_are_joined(groups: ProcessGroupCollection) -> None:
    layer = kda(groups, OutputGate.full_rank)
    draw(layer)
    x = torch.randn(SHAPE, dtype=torch.float64, requires_grad=True)
    other = x.detach().clone().requires_grad_()
    uses = [(x, layer.beta), (other, layer.qkv), (x, layer.decay_down)]
    made = project_together(*uses)
    for y, (given, module) in zip(made, uses, strict=True):
        assert torch.equal(y, module(given))
    assert made[0].grad_fn is made[2].grad_fn is not made[1].grad_fn
