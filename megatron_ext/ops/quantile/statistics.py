"""What a micro-batch adds to the statistics of a balancer: load and histograms of margins.

Shapes: T tokens, E experts, B bins.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from megatron_ext.config.schema import KernelBackend, KernelOptions
from megatron_ext.ops.backend import choose_backend, planned, rejection_exact, triton_misfit
from megatron_ext.ops.quantile.histogram import Bins
from megatron_ext.ops.quantile.top_k import select_top_k

# Every program of the kernel looks at the bias of all experts.
MAX_EXPERTS = 4096
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
    """The backend of `add_statistics` that will run; never ``auto``. See `ops.backend`."""
    misfit = triton_misfit(device, dtype)
    if misfit is None and dtype is not torch.float32:
        misfit = f"it takes float32 scores, given {dtype}"
    if misfit is None and experts > MAX_EXPERTS:
        misfit = f"it takes at most {MAX_EXPERTS} experts, given {experts}"
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
    from megatron_ext.ops.quantile.triton import add_statistics_triton

    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(CHECKED_TOKENS + 1, CHECKED_EXPERTS, generator=generator)
    scores, bias = torch.sigmoid(drawn[1:]).to(device), (0.1 * drawn[0]).to(device)
    valid = (drawn[1:, 0] > -1).to(device)

    def counted(scores: Tensor, *, fast: bool) -> Tensor:
        counts = torch.zeros(CHECKED_EXPERTS + 1, dtype=torch.int64, device=device)
        histogram = bins.zeros(CHECKED_EXPERTS, device=device)
        map, cutoff = select_top_k(scores + bias, CHECKED_TOP_K)
        run = add_statistics_triton if fast else _add_statistics_dense
        run(counts, histogram, scores, bins=bins, map=map, cutoff=cutoff, bias=bias, valid=valid)
        return torch.cat([counts, histogram.flatten()])

    return rejection_exact(
        "add_statistics",
        fast=lambda scores: counted(scores, fast=True),
        slow=lambda scores: counted(scores, fast=False),
        inputs=[scores],
    )
