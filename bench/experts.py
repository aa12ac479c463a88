"""A mixture of experts at the width of Kimi K3: python bench/experts.py [--json FILE] [--quick]

On a GPU: hidden 7168, 8192 tokens, 896 experts, top 16, latent width 3584. Three tables:

- the experts' matrix products by every backend that can run here, Transformer Engine's in FP8 as
  well, at three loads of 28 experts (one rank of 32), with their error against float64;
- the router's product in each precision: time, and how many tokens it sends elsewhere;
- routing with its statistics and the update of the bias, as a share of a layer's step: linear
  attention, and a mixture of 28 experts that takes all 16 x 8192 rows, forward and backward.

`GPU ms` sums kernels; `ms` has waits for the host too. Without a GPU or with --quick all is small.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from common import (
    Row,
    both_ways,
    default_device,
    extra_gib,
    finish,
    free_memory,
    measured,
    milliseconds,
    relative_error,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn

from megatron_ext.config.compose import compose
from megatron_ext.config.schema import ExpertBackend, ExpertFp8, RouterMatmul, RunConfig
from megatron_ext.errors import ConfigError
from megatron_ext.layers.balance import Selection, TokenGroup
from megatron_ext.layers.kda import KimiDeltaAttention
from megatron_ext.layers.latent_moe import LatentMoE
from megatron_ext.layers.router import BalancedRouter
from megatron_ext.ops.grouped_mlp import grouped_mlp, grouped_mlp_reference, resolve_backend
from megatron_ext.ops.quantile import select_top_k
from megatron_ext.ops.router import route_tokens, router_logits
from megatron_ext.parallel import mesh, runtime
from megatron_ext.parallel.mcore_config import transformer_config

BOUNDS = {"beta": 4.0, "linear_beta": 25.0}
K3 = ["model=k3", "data=sample", "run.precision=bf16"]
SMALL = [
    *K3,
    "model.hidden_size=128",
    "model.kda.num_heads=2",
    "model.kda.head_dim=64",
    "model.kda.value_dim=64",
    "model.experts.num_experts=56",
    "model.experts.latent_size=64",
    "model.experts.feed_forward_size=32",
    "model.experts.shared_feed_forward_size=64",
]
LOCAL_EXPERTS = 28  # of one of 32 expert parallel ranks of K3
# Each number rounded to the 8 bits of bfloat16; to 4 and, of gradients, to 3 bits of FP8.
ALLOWED = {ExpertFp8.none: 1e-2, ExpertFp8.current: 0.12, ExpertFp8.blockwise: 0.12}
VARIANTS = (
    (ExpertBackend.grouped_mm, ExpertFp8.none),
    (ExpertBackend.loop, ExpertFp8.none),
    *((ExpertBackend.transformer_engine, precision) for precision in ExpertFp8),
)


def expert_inputs(
    counts: list[int], *, latent: int, width: int, device: torch.device, dtype: torch.dtype
) -> list[Tensor]:
    """x, counts, scale, fc1, fc2 of `grouped_mlp`, with gradients where there are any."""
    torch.manual_seed(0)
    rows, experts = sum(counts), len(counts)
    x = torch.randn(rows, latent, device=device).to(dtype)
    scale = torch.rand(rows, device=device)
    fc1 = (torch.randn(experts, 2, width, latent, device=device) * latent**-0.5).to(dtype)
    fc2 = (torch.randn(experts, latent, width, device=device) * width**-0.5).to(dtype)
    x, scale, fc1, fc2 = (tensor.requires_grad_() for tensor in (x, scale, fc1, fc2))
    return [x, torch.tensor(counts), scale, fc1, fc2]


def leaves_of(inputs: list[Tensor]) -> list[Tensor]:
    """Those with gradients."""
    return [x for x in inputs if x.requires_grad]


def runnable(
    device: torch.device, *, dtype: torch.dtype, widths: tuple[int, int]
) -> list[tuple[ExpertBackend, ExpertFp8]]:
    """Backends and precisions that run as they are; of others it prints why not."""
    found = []
    for backend, precision in VARIANTS:
        try:
            chosen = resolve_backend(
                backend, device, dtype=dtype, widths=widths, precision=precision
            )
        except ConfigError as error:
            print(error)
            continue
        if chosen is backend:
            found.append((backend, precision))
    return found


def expert_error(
    backend: ExpertBackend, precision: ExpertFp8, *, device: torch.device, dtype: torch.dtype
) -> float:
    """The worst relative error of outputs and gradients, with an expert that gets nothing."""
    inputs = expert_inputs([300, 0, 41, 171], latent=256, width=192, device=device, dtype=dtype)
    exact = [x.detach().double().requires_grad_() if x.requires_grad else x for x in inputs]

    def run(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
        out = function(*inputs, **BOUNDS)
        upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
        return [out, *torch.autograd.grad(out, leaves_of(inputs), upstream.to(out))]

    found = run(partial(grouped_mlp, backend=backend, precision=precision), inputs)
    pairs = zip(found, run(grouped_mlp_reference, exact), strict=True)
    return max(relative_error(*pair) for pair in pairs)


def experts_table(config: RunConfig, *, device: torch.device, loads: list[int]) -> list[Row]:
    """Speed of the experts' products by load and backend."""
    options, rows = config.model.experts, []
    latent, width = options.latent_size or config.model.hidden_size, options.feed_forward_size
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    variants = runnable(device, dtype=dtype, widths=(latent, width))
    for load in loads:
        counts = [load // LOCAL_EXPERTS] * LOCAL_EXPERTS
        inputs = expert_inputs(counts, latent=latent, width=width, device=device, dtype=dtype)
        for backend, precision in variants:
            forward = partial(grouped_mlp, *inputs, **BOUNDS, backend=backend, precision=precision)
            both = both_ways(forward, leaves_of(inputs))
            with torch.no_grad():
                forward_ms = milliseconds(forward, device=device)
            both_ms = milliseconds(both, device=device)
            flop = 6.0 * sum(counts) * latent * width  # three matrices, two operations a weight
            rows.append(
                {
                    "rows": sum(counts),
                    "backend": backend.name,
                    "FP8": precision.name,
                    "fwd ms": forward_ms,
                    "fwd TFLOP/s": flop / forward_ms / 1e9,
                    "fwd+bwd ms": both_ms,
                    "fwd+bwd TFLOP/s": 3 * flop / both_ms / 1e9,
                    "extra GiB": extra_gib(both, device=device),
                    "error": expert_error(backend, precision, device=device, dtype=dtype),
                }
            )
        free_memory()
    return rows


def router_table(config: RunConfig, *, tokens: int, device: torch.device) -> list[Row]:
    """The router's product in each precision, and tokens that float64 would send elsewhere."""
    experts, hidden = config.model.experts, config.model.hidden_size
    torch.manual_seed(0)
    x = torch.randn(tokens, hidden, device=device).bfloat16().requires_grad_()
    weight = (0.02 * torch.randn(experts.num_experts, hidden, device=device)).bfloat16()
    leaves = [x, weight.requires_grad_()]
    exact = select_top_k(torch.sigmoid(x.double() @ weight.double().T), experts.top_k).map
    rows = []
    for precision in RouterMatmul:
        product = partial(router_logits, x, weight, precision=precision)
        with torch.no_grad():
            chosen = select_top_k(torch.sigmoid(product()), experts.top_k).map
        share = float((chosen != exact).any(1).double().mean())
        row = measured(precision.name, both_ways(product, leaves), device=device)
        rows.append({**row, "tokens sent elsewhere": f"{100 * share:.3g} %"})
    return rows


def draw(module: nn.Module) -> None:
    """Matrices normal, everything else 1; nothing is trained here."""
    for parameter in module.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
        else:
            nn.init.ones_(parameter)


def layer_table(
    config: RunConfig, groups: ProcessGroupCollection, *, tokens: int, device: torch.device
) -> list[Row]:
    """Parts of a layer's step, and routing as a share of it."""
    model, precision = config.model, config.model.experts.router_matmul
    few = replace(model.experts, num_experts=LOCAL_EXPERTS)
    attention = KimiDeltaAttention(
        transformer_config(config), options=model.kda, pg_collection=groups
    )
    mixture = LatentMoE(
        transformer_config(replace(config, model=replace(model, experts=few))),
        options=few,
        balance=config.balance,
        beta=model.situ_beta,
        linear_beta=model.situ_linear_beta,
        kernels=model.kernels,
        pg_collection=groups,
    )
    router = BalancedRouter(
        transformer_config(config),
        options=model.experts,
        balance=config.balance,
        kernels=model.kernels,
        pg_collection=groups,
    )
    x = torch.randn(tokens, 1, model.hidden_size, device=device).bfloat16().requires_grad_()
    rows = []
    names = ("linear attention", f"mixture, {LOCAL_EXPERTS} experts", "router and its statistics")
    for name, module in zip(names, (attention, mixture, router), strict=True):
        draw(module)
        both = both_ways(lambda module=module: module(x)[0], [x, *module.parameters()])
        rows.append(measured(name, both, device=device))
    flat = x.detach().flatten(0, 1).requires_grad_()
    product = partial(router_logits, flat, router.weight, precision=precision)
    rows.append(
        measured(
            f"  of it: product in {precision.name}",
            both_ways(product, [flat, router.weight]),
            device=device,
        )
    )
    balancer, options = router.balancer, model.experts
    route = partial(
        route_tokens,
        product().detach(),
        balancer.bias,
        top_k=options.top_k,
        scaling=options.scaling,
        kernels=model.kernels,
    )
    found = route()
    observe = partial(
        balancer.observe,
        found.scores,
        Selection(found.map, found.cutoff),
        valid=None,
        tokens=TokenGroup(),
    )
    rows.append(measured("  of it: experts and weights (forward)", route, device=device))
    rows.append(measured("  of it: statistics", observe, device=device))
    rows.append(measured("update, once a step", lambda: balancer.update(0), device=device))
    for key in ("ms", "GPU ms") if device.type == "cuda" else ("ms",):
        first, second, whole, dense, _, _, last = (row[key] for row in rows[:7])
        share = (whole - dense + last) / (first + second + whole + last)
        name = f"routing + statistics + update, by {key}"
        rows.append({"part": name, "share of the layer": f"{100 * share:.2f} %"})
    size = sum(part.numel() * part.element_size() for part in balancer.statistics())
    return [*rows, {"part": f"summed over ranks once a step: {size / 1e3:.0f} kB"}]


def main() -> None:
    """Measures and prints, the tables last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the numbers there")
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--only-layer", action="store_true", help="the last table alone")
    options = parser.parse_args()
    device = default_device()
    large = device.type == "cuda" and not options.quick
    runtime.quiet()
    config = compose(K3 if large else SMALL)
    runtime.start(config.run)
    groups = mesh.build_mesh(config.parallel)
    tokens, loads = (8192, [4096, 32768, 131072]) if large else (128, [280])
    products, tables = [], {}
    if not options.only_layer:
        products = experts_table(config, device=device, loads=loads)
        tables = {
            f"experts: {LOCAL_EXPERTS} of a rank": products,
            f"router product: {tokens} tokens, forward and backward": router_table(
                config, tokens=tokens, device=device
            ),
        }
    tables[f"a layer: {tokens} tokens, forward and backward"] = layer_table(
        config, groups, tokens=tokens, device=device
    )
    runtime.stop()
    failures = [
        f"experts by {row['backend']}, FP8 {row['FP8']}: error {row['error']:.1e}, allowed {bound}"
        for row in products
        if row["error"] > (bound := ALLOWED[ExpertFp8[row["FP8"]]])
    ]
    finish(tables, failures=failures, json_file=options.json)


if __name__ == "__main__":
    main()
