"""A layer of K3's width: python bench/layer_slice.py [--json FILE] [--quick] [--skip-whole]

Linear attention and a latent mixture of experts as one of 32 expert parallel ranks has them: 8192
tokens of width 7168, 28 of 896 experts that get 16 x 8192 rows, and 8 sources of attention
residuals; bf16, forward and backward, no communication. The router has all 896 outputs; which
expert takes a row is fixed and even, so that every version does the same work. In one process:

- ours with `residual=block` and `residual=standard`;
- the same from public parts with the same weights (fla, torch.compile of the parts or of the whole
  layer, torch's grouped_mm), and how far its output and gradients are from ours.

Prints time, time of matrix products and of everything else by the names of kernels, the share of a
large product's measured rate, what `block` costs beside `standard` in time and memory, and our
longest kernels. Without a GPU and with --quick all is small; without fla formulas stand in for its
kernels, which shows that the program works and nothing about speed. Other words are
overrides of ours.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import (
    Row,
    default_device,
    extra_gib,
    finish,
    free_memory,
    milliseconds,
    relative_error,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import build_module
from support.kernel_time import kernels, product_rate, split
from support.public_kernels import PublicKernels, from_fla, stand_ins
from support.public_layers import Layer, Mixture
from torch import Tensor, nn

from megatron_ext.config.compose import compose
from megatron_ext.config.layout import LayerKind
from megatron_ext.config.schema import RunConfig
from megatron_ext.layers.router import BalancedRouter
from megatron_ext.model.count import feed_forward_weights, kda_weights
from megatron_ext.model.residual import connect_layers
from megatron_ext.model.spec import layer_spec
from megatron_ext.ops.attn_res.gradients import with_gradient_sum
from megatron_ext.ops.kda import fla
from megatron_ext.parallel import mesh, runtime
from megatron_ext.parallel.mcore_config import transformer_config
from megatron_ext.parallel.pipeline import SourceCache

LARGE = ["model=k3", "data=sample", "run.precision=bf16", "residual=block"]
SMALL = [
    "model=k3",
    "data=sample",
    "residual=block",
    "model.hidden_size=128",
    "model.kda.num_heads=2",
    "model.kda.head_dim=64",
    "model.kda.value_dim=64",
    "model.experts.num_experts=56",
    "model.experts.latent_size=64",
    "model.experts.feed_forward_size=32",
    "model.experts.shared_feed_forward_size=64",
]
LAYER = 73  # of K3: linear attention, inside the seventh block, so that both mixes read 8 sources
SOURCES = 8
# Behind each other, as layers of a step are: the host starts a call while the last one runs.
CALLS = 4
LOCAL = 28  # experts of one of K3's 32 expert parallel ranks
# Several roundings to bf16 in a row, and sums over a token's experts in bf16 in the public version.
ALLOWED_ERROR = {"bf16": 5e-2, "fp32": 1e-4}


class LocalRouter(nn.Module):
    """Our router over all experts, for a mixture that has a share of them.

    Of every `fold` experts in a row one is here. Each token's are given, so that rows are even.
    """

    exactly_top_k = True  # of the experts here, by `forced_experts`

    def __init__(self, router: BalancedRouter, forced: Tensor, *, local: int) -> None:
        super().__init__()
        self.router, self.shape = router, (local, router.weight.shape[0] // local)
        self.options = router.options
        chosen = torch.zeros(len(forced), router.weight.shape[0], dtype=torch.bool)
        self.map = chosen.to(forced.device).scatter_(1, forced, True)
        router.hook = lambda router, scores, selection: self.map

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Weights [T, local] and map bool [T, local]."""
        weights, chosen = self.router(x, padding_mask)
        return weights.unflatten(1, self.shape).sum(-1), chosen.unflatten(1, self.shape).any(-1)


def forced_experts(tokens: int, *, experts: int, k: int, device: torch.device) -> Tensor:
    """int64 [tokens, k]: no two experts of a token are the same local one, all are as busy."""
    fold, token = experts // LOCAL, torch.arange(tokens, device=device)
    local = (token[:, None] * k + torch.arange(k, device=device)) % LOCAL
    return local * fold + (token % fold)[:, None]


def our_layer(config: RunConfig, groups: ProcessGroupCollection, forced: Tensor) -> Any:
    """The real layer of the model, with the share of experts of one rank."""
    options = config.model.experts
    few = replace(options, num_experts=LOCAL)
    small = replace(config, model=replace(config.model, experts=few))
    tc = transformer_config(small)
    spec = layer_spec(small.model, kind=LayerKind.kda, balance=config.balance)
    (spec, *_) = connect_layers(small, [spec], layers=[LAYER], chunk=0, cache=SourceCache())
    layer = build_module(spec, config=tc, layer_number=LAYER + 1, pg_collection=groups)
    router = BalancedRouter(
        transformer_config(config), options=options, balance=config.balance, pg_collection=groups
    )
    layer.mlp.router = LocalRouter(router, forced, local=LOCAL)
    return layer


def draw(layer: nn.Module) -> None:
    """Matrices and queries normal, the other vectors as a new model has them. At any width the
    layer adds about as much as it gets, so that an error in it shows; at K3's that is its 0.02."""
    torch.manual_seed(0)
    for name, parameter in layer.named_parameters():
        if parameter.dim() > 1 or name.endswith("query"):
            nn.init.normal_(parameter, std=1.7 * parameter.shape[-1] ** -0.5)
        elif name.endswith(("A_log", "dt_bias")):
            nn.init.constant_(parameter, 0.0 if name.endswith("A_log") else -4.0)
        else:
            nn.init.ones_(parameter)


def weights_of(layer: nn.Module) -> dict[str, Tensor]:
    """By the names in a model."""
    return {
        name.replace("router.router.", "router."): weight
        for name, weight in layer.named_parameters()
    }


def call_ours(layer: Any, sources: list[Tensor], *, several: bool) -> Tensor:
    """The last source after the layer, [s, 1, h]."""
    if several:  # the layers that finished the others have prepared them so
        finished = tuple(map(with_gradient_sum, sources[:-1]))
        return layer(sources[-1], context=finished, attention_mask=None)[0]
    return layer(sources[-1], attention_mask=None)[0]


def call_public(layer: Any, sources: list[Tensor], *, several: bool) -> Tensor:
    """The same; the public layer has batches first."""
    given = sources if several else sources[-1:]
    return layer(*(x.transpose(0, 1) for x in given))[-1].transpose(0, 1)


def both_ways(function: Callable[[], Tensor], leaves: list[Tensor]) -> Callable[[], Any]:
    """Output and gradients, always of the same upstream gradient."""
    with torch.no_grad():
        out = function()
    torch.manual_seed(1)
    upstream = torch.randn_like(out)

    def run() -> list[Tensor]:
        made = function()
        return [made, *torch.autograd.grad(made, leaves, upstream)]

    return run


def product_flops(config: RunConfig, *, tokens: int) -> float:
    """Of matrix products with weights, forward and backward: attention's, the router's, the
    latent's, shared and local routed experts'. The delta rule's own products are left out."""
    model, options = config.model, config.model.experts
    latent = options.latent_size or model.hidden_size
    shared = feed_forward_weights(
        replace(model, feed_forward_size=options.shared_feed_forward_size)
    )
    weights = (
        kda_weights(model.kda, hidden_size=model.hidden_size)
        + model.hidden_size * (options.num_experts + 2 * latent)
        + shared
        + options.top_k * 3 * latent * options.feed_forward_size
    )
    return 6.0 * weights * tokens


def measure(
    name: str, run: Callable[[], Any], *, flops: float, rate: float, device: torch.device
) -> Row:
    """A row of one version."""

    def several() -> None:
        for _ in range(CALLS):
            run()

    took = milliseconds(several, device=device, repeats=5) / CALLS
    found = split(kernels(run, device=device))
    return {
        "version": name,
        "ms": took,
        "products ms": found.products,
        "others ms": found.others,
        "kernels": found.count,
        "TFLOP/s of products": flops / took / 1e9,
        "of measured peak": f"{100 * flops / took * 1e3 / rate:.1f} %",
        "extra GiB": extra_gib(run, device=device),
    }


class Results(NamedTuple):
    """Output, gradients of the sources, and the norm of the gradients of all weights."""

    output: Tensor
    gradients: list[Tensor]
    norm: Tensor

    @classmethod
    def of(cls, made: list[Tensor], sources: int) -> Results:
        """From what `both_ways` gives."""
        norms = torch.stack([x.detach().double().norm() for x in made[1 + sources :]])
        return cls(made[0].detach(), made[1 : 1 + sources], norms.norm())

    def errors(self, wanted: Results) -> Row:
        """Relative; of the gradients the worst."""
        pairs = zip(self.gradients, wanted.gradients, strict=True)
        return {
            "output off": relative_error(self.output, wanted.output),
            "worst gradient off": max(relative_error(*pair) for pair in pairs),
            "norm of weights' off": relative_error(self.norm, wanted.norm),
        }


OFF = ("output off", "worst gradient off", "norm of weights' off")


def one_residual(
    config: RunConfig,
    groups: ProcessGroupCollection,
    *,
    public: PublicKernels,
    whole: bool,
    tokens: int,
    rate: float,
    device: torch.device,
) -> tuple[list[Row], list[Row]]:
    """Rows of all versions with one kind of residual, and our longest kernels."""
    kind, options = config.residual.kind.value, config.model.experts
    several, flops = kind == "block", product_flops(config, tokens=tokens)
    forced = forced_experts(tokens, experts=options.num_experts, k=options.top_k, device=device)
    ours = our_layer(config, groups, forced)
    draw(ours)
    torch.manual_seed(2)
    count = SOURCES if several else 1
    dtype = transformer_config(config).params_dtype
    sources = [
        torch.randn(tokens, 1, config.model.hidden_size, device=device).to(dtype).requires_grad_()
        for _ in range(count)
    ]
    call = partial(call_ours, ours, sources, several=several)
    run = both_ways(call, [*sources, *ours.parameters()])
    wanted = Results.of(run(), count)
    measured = partial(measure, flops=flops, rate=rate, device=device)
    rows = [measured(f"ours, {kind}", run)]
    longest: list[Row] = [
        {"kernel": x.name[:90], "ms": x.milliseconds, "times": x.count, "product": x.is_product}
        for x in kernels(run, device=device)[:25]
    ]
    free_memory()
    theirs = Layer(weights_of(ours), config.model, public, local=LOCAL).to(device)
    assert isinstance(theirs.mlp, Mixture)
    theirs.mlp.forced = forced
    forms: dict[str, Any] = {"compiled parts": theirs}
    if whole:
        forms["compiled whole"] = torch.compile(theirs, dynamic=False)
    for form, layer in forms.items():
        name = f"{public.name}, {form}, {kind}"
        call = partial(call_public, layer, sources, several=several)
        try:
            again = both_ways(call, [*sources, *theirs.parameters()])
            off = Results.of(again(), count).errors(wanted)
            rows.append(measured(name, again) | off)
        except Exception as error:  # a compiler's failure of any kind is a result here, and is told
            if form == "compiled parts":
                raise
            text = f"{type(error).__name__}: {error}"
            rows.append({"version": name, "remark": text.splitlines()[0][:120]})
        free_memory()
    return rows, longest


def compared(rows: list[Row]) -> list[Row]:
    """Our versions beside the fastest public one, and `block` beside `standard`."""
    found: list[Row] = []
    for kind in ("block", "standard"):
        mine = next(row for row in rows if row["version"] == f"ours, {kind}")
        rivals = [row for row in rows if row["version"].endswith(f", {kind}") and "ms" in row]
        best = min((row for row in rivals if row is not mine), key=lambda row: row["ms"])
        found.append(
            {
                "what": f"ours / {best['version']}",
                "total": mine["ms"] / best["ms"],
                "products": mine["products ms"] / best["products ms"],
                "others": mine["others ms"] / best["others ms"],
            }
        )
    block, plain = (next(r for r in rows if r["version"] == f"ours, {k}") for k in
                    ("block", "standard"))  # fmt: skip
    row = {"what": "ours: block / standard", "total": block["ms"] / plain["ms"]}
    row["others"] = block["others ms"] / plain["others ms"]
    if block["extra GiB"] is not None:
        row["extra GiB more"] = block["extra GiB"] - plain["extra GiB"]
    return [*found, row]


def main() -> None:
    """Measures and prints, the tables last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the numbers there")
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--skip-whole", action="store_true", help="do not compile whole layers")
    options, overrides = parser.parse_known_args()
    runtime.quiet()
    device = default_device()
    large = device.type == "cuda" and not options.quick
    words, tokens = (LARGE, 8192) if large else (SMALL, 128)
    words = [*words, *overrides]
    config = compose(words)
    runtime.start(config.run)
    groups = mesh.build_mesh(config.parallel)
    has_fla = fla.available(device)
    public = from_fla() if has_fla else stand_ins()
    whole = has_fla and not options.skip_whole
    rate = product_rate(device=device)
    rows: list[Row] = []
    tables: dict[str, list[Row]] = {}
    for kind in ("block", "standard"):
        found, longest = one_residual(
            compose([*words, f"residual={kind}"]),
            groups,
            public=public,
            whole=whole,
            tokens=tokens,
            rate=rate,
            device=device,
        )
        rows += found
        tables[f"longest kernels, ours, {kind}"] = longest
        free_memory()
    runtime.stop()
    allowed = ALLOWED_ERROR[config.run.precision.value]
    failures = [
        f"{row['version']}: {what} {row[what]:.1e}, allowed {allowed:.0e}"
        for row in rows
        for what in OFF
        if what in row and not row[what] <= allowed
    ]
    title = (
        f"a layer of width {config.model.hidden_size}, {tokens} tokens, forward and backward; "
        f"a large product makes {rate / 1e12:.3g} TFLOP/s"
    )
    tables |= {title: rows, "compared": compared(rows)}
    finish(tables, failures=failures, json_file=options.json)


if __name__ == "__main__":
    main()
