"""The statistics of a balancer: what a micro-batch adds to load and histograms of margins, and the
new bias that follows from them.

Shapes: T tokens, E experts, B bins.
"""

from __future__ import annotations

from dataclasses import fields
from functools import cache

import torch
from torch import Tensor

from megatron_ext.config.schema import KernelBackend, KernelOptions
from megatron_ext.ops.backend import choose_backend, planned, rejection_exact, triton_misfit
from megatron_ext.ops.quantile.exact import next_bias
from megatron_ext.ops.quantile.histogram import Bins
from megatron_ext.ops.quantile.load import LayerLoad, settle
from megatron_ext.ops.quantile.top_k import select_top_k

# Every program of the kernels looks at the bias of all experts, one at all bins of an expert.
MAX_EXPERTS, MAX_BINS = 4096, 8190
CHECKED_TOKENS, CHECKED_EXPERTS, CHECKED_TOP_K = 299, 150, 3


def add_load(counts: Tensor, map: Tensor, *, valid: Tensor | None = None) -> None:
    """Count the tokens of each expert, and all of them.

    Args:
        counts: int64 [E + 1], added to in place: tokens an expert, then valid tokens.
        map: bool [T, E], which expert takes which token.
        valid: bool [T]; tokens where it is False are not counted. Default: all are.
    """
    taken = map if valid is None else map & valid.unsqueeze(-1)
    counts[:-1] += taken.sum(0, dtype=torch.int32)  # twice as fast as int64 on a CPU
    counts[-1] += len(map) if valid is None else valid.sum()


def add_statistics(
    counts: Tensor,
    histogram: Tensor,
    scores: Tensor,
    *,
    bins: Bins,
    map: Tensor,
    cutoff: Tensor,
    bias: Tensor,
    valid: Tensor | None = None,
    kernels: KernelOptions | None = None,
) -> None:
    """`add_load` and `Bins.add`, in one kernel where it can run; the same integers in any case.

    Args:
        counts: int64 [E + 1]; see `add_load`.
        histogram: int32 [E, B + 2]; see `Bins.add`, and there for the rest.
        map: bool [T, E], which expert takes which token.
        kernels: backend; None takes the defaults.

    Raises:
        ConfigError: ``kernels.require``, and the backend asked for cannot run here.
    """
    options, experts = kernels or KernelOptions(), scores.shape[1]
    if planned(scores, options.backend) and _fits(experts, bins):
        return  # the kernel allocates nothing
    chosen = resolve_backend(
        options.backend,
        scores.device,
        scores.dtype,
        bins=bins,
        experts=experts,
        require=options.require,
    )
    if chosen is KernelBackend.triton:
        from megatron_ext.ops.quantile.triton import add_statistics_triton as run
    else:
        run = _add_statistics_dense
    run(counts, histogram, scores, bins=bins, map=map, cutoff=cutoff, bias=bias, valid=valid)


def _add_statistics_dense(
    counts: Tensor,
    histogram: Tensor,
    scores: Tensor,
    *,
    bins: Bins,
    map: Tensor,
    cutoff: Tensor,
    bias: Tensor,
    valid: Tensor | None,
) -> None:
    add_load(counts, map, valid=valid)
    bins.add(histogram, scores, bias=bias, cutoff=cutoff, valid=valid)


def level(
    counts: Tensor,
    histogram: Tensor,
    bias: Tensor,
    *,
    bins: Bins,
    top_k: int,
    layer: int,
    kernels: KernelOptions | None = None,
) -> LayerLoad:
    """End a step: set the bias that would have levelled its load, `next_bias` of `Bins.quantile`,
    and clear the statistics. Two kernels where they can run. Waits for nothing.

    Args:
        counts: int64 [E + 1], over all tokens of the step: see `add_load`. Cleared.
        histogram: int32 [E, B + 2], of the same tokens, contiguous. Cleared.
        bias: float32 [E], in use when they were counted. Set in place.
        top_k: k.
        layer: for the record.
        kernels: backend; None takes the defaults.

    Raises:
        ConfigError: ``kernels.require``, and the backend asked for cannot run here.
    """
    options = kernels or KernelOptions()
    chosen = resolve_backend(
        options.backend,
        bias.device,
        bias.dtype,
        bins=bins,
        experts=len(bias),
        require=options.require,
    )
    if chosen is KernelBackend.triton:
        from megatron_ext.ops.quantile.triton_update import level_triton as run
    else:
        run = _level_dense
    return run(counts, histogram, bias, bins=bins, top_k=top_k, layer=layer)


def _level_dense(
    counts: Tensor, histogram: Tensor, bias: Tensor, *, bins: Bins, top_k: int, layer: int
) -> LayerLoad:
    found = bins.quantile(histogram, bias=bias, top_k=top_k)
    histogram.zero_()
    return settle(
        counts,
        bias,
        layer=layer,
        top_k=top_k,
        new_bias=next_bias(found.value, bias=bias, top_k=top_k, tokens=counts[-1]),
        predicted=found.tokens.double() * top_k / len(bias),
        out_of_range=found.out_of_range,
        bin_width=found.width,
    )


@cache
def resolve_backend(
    backend: KernelBackend,
    device: torch.device,
    dtype: torch.dtype,
    *,
    bins: Bins,
    experts: int,
    require: bool = False,
) -> KernelBackend:
    """The backend of `add_statistics` and `level` that will run; never ``auto``. See
    `ops.backend`."""
    misfit = triton_misfit(device, dtype)
    if misfit is None and dtype is not torch.float32:
        misfit = f"it takes float32 scores, given {dtype}"
    if misfit is None and not _fits(experts, bins):
        misfit = (
            f"it takes at most {MAX_EXPERTS} experts and {MAX_BINS} bins, given {experts} and "
            f"{bins.number}"
        )
    return choose_backend(
        backend,
        operator="add_statistics",
        device=device,
        misfit=misfit,
        check=lambda: _rejection(device, bins),
        require=require,
    )


def _fits(experts: int, bins: Bins) -> bool:
    return experts <= MAX_EXPERTS and bins.number <= MAX_BINS


@cache
def _rejection(device: torch.device, bins: Bins) -> str | None:
    """The same integers, and from them the same numbers up to rounding."""
    from megatron_ext.ops.quantile.triton import add_statistics_triton
    from megatron_ext.ops.quantile.triton_update import level_triton

    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(CHECKED_TOKENS + 1, CHECKED_EXPERTS, generator=generator)
    given, bias = torch.sigmoid(drawn[1:]).to(device), (0.1 * drawn[0]).to(device)
    valid = (drawn[1:, 0] > -1).to(device)

    def counted(scores: Tensor, *, fast: bool) -> tuple[Tensor, Tensor]:
        counts = torch.zeros(CHECKED_EXPERTS + 1, dtype=torch.int64, device=device)
        histogram = bins.zeros(CHECKED_EXPERTS, device=device)
        map, cutoff = select_top_k(scores + bias, CHECKED_TOP_K)
        run = add_statistics_triton if fast else _add_statistics_dense
        run(counts, histogram, scores, bins=bins, map=map, cutoff=cutoff, bias=bias, valid=valid)
        return counts, histogram

    def differs(scores: Tensor) -> Tensor:
        pairs = []
        for run in (level_triton, _level_dense):
            state = [*counted(scores, fast=False), bias.clone()]
            load = run(*state, bins=bins, top_k=CHECKED_TOP_K, layer=0)
            found = (getattr(load, field.name) for field in fields(load))
            pairs.append([*state, *(x for x in found if isinstance(x, Tensor))])
        return torch.cat(
            [(~torch.isclose(a, b, rtol=1e-6)).flatten() for a, b in zip(*pairs, strict=True)]
        )

    found = rejection_exact(
        "add_statistics",
        fast=lambda scores: torch.cat([x.flatten() for x in counted(scores, fast=True)]),
        slow=lambda scores: torch.cat([x.flatten() for x in counted(scores, fast=False)]),
        inputs=[given],
    )
    if found is None:
        found = rejection_exact(
            "level",
            fast=differs,
            slow=lambda scores: torch.zeros_like(differs(scores)),
            inputs=[given],
        )
    return found
