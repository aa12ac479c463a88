"""The statistics of a balancer: what a micro-batch adds to load and histograms of margins, and the
new bias that follows from them.

Shapes: T tokens, E experts, B bins.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_ext.config.schema import KernelBackend, KernelOptions
from megatron_ext.ops.backend import choose_backend, planned, rejection_exact, triton_misfit
from megatron_ext.ops.quantile.exact import next_bias
from megatron_ext.ops.quantile.histogram import Bins
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
    if planned(scores, options.backend):
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


class Levelled(NamedTuple):
    """The bias for the next step, and what is known of it.

    Attributes:
        new_bias: float32 [E].
        predicted: float64 [E]; see `LayerLoad`, as for the other two.
        out_of_range: int64 [].
        bin_width: float64 [].
    """

    new_bias: Tensor
    predicted: Tensor
    out_of_range: Tensor
    bin_width: Tensor


def level(
    histogram: Tensor,
    *,
    bins: Bins,
    bias: Tensor,
    top_k: int,
    tokens: Tensor,
    kernels: KernelOptions | None = None,
) -> Levelled:
    """The bias that would have levelled the load, `next_bias` of `Bins.quantile`, in two kernels
    where they can run. Waits for nothing.

    Args:
        histogram: int32 [E, B + 2], over all tokens of the step, contiguous.
        bias: float32 [E], in use when they were counted.
        top_k: k.
        tokens: int64 [], valid tokens of the step.
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
        from megatron_ext.ops.quantile.triton_update import level_triton

        return Levelled(*level_triton(histogram, bins=bins, bias=bias, top_k=top_k, tokens=tokens))
    return _level_dense(histogram, bins=bins, bias=bias, top_k=top_k, tokens=tokens)


def _level_dense(
    histogram: Tensor, *, bins: Bins, bias: Tensor, top_k: int, tokens: Tensor
) -> Levelled:
    found = bins.quantile(histogram, bias=bias, top_k=top_k)
    return Levelled(
        next_bias(found.value, bias=bias, top_k=top_k, tokens=tokens),
        found.tokens.double() * top_k / len(bias),
        found.out_of_range,
        found.width,
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
    if misfit is None and (experts > MAX_EXPERTS or bins.number > MAX_BINS):
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

    def bias_differs(scores: Tensor) -> Tensor:
        counts, histogram = counted(scores, fast=False)
        ours, theirs = (
            run(histogram, bins=bins, bias=bias, top_k=CHECKED_TOP_K, tokens=counts[-1])
            for run in (level_triton, _level_dense)
        )
        pairs = zip(ours, theirs, strict=True)
        return torch.cat([(~torch.isclose(a, b, rtol=1e-6)).flatten() for a, b in pairs])

    found = rejection_exact(
        "add_statistics",
        fast=lambda scores: torch.cat([x.flatten() for x in counted(scores, fast=True)]),
        slow=lambda scores: torch.cat([x.flatten() for x in counted(scores, fast=False)]),
        inputs=[given],
    )
    if found is None:
        found = rejection_exact(
            "level",
            fast=bias_differs,
            slow=lambda scores: torch.zeros_like(bias_differs(scores)),
            inputs=[given],
        )
    return found
