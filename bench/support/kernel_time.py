"""Where the time of a call goes, by kernels: matrix products and everything else."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from common import milliseconds
from torch.profiler import ProfilerActivity, profile

# Parts of the names of matrix products: cuBLAS (nvjet on Hopper, splitKreduce adds up its parts),
# CUTLASS (grouped_mm). On a CPU names of torch's operators.
PRODUCTS = ("gemm", "nvjet", "cutlass", "splitkreduce", "gemv", "cublas")
PRODUCTS_ON_CPU = ("aten::mm", "aten::addmm", "aten::bmm", "aten::_grouped_mm")
ATTENTION = ("flash", "fmha", "sdpa", "attention")  # has products inside, and is no product


class Kernel(NamedTuple):
    """One kernel: name, milliseconds of a call, how often it runs in it."""

    name: str
    milliseconds: float
    count: float

    @property
    def is_product(self) -> bool:
        """Whether it is a matrix product."""
        name = self.name.lower()
        if name.startswith("aten::"):
            return name in PRODUCTS_ON_CPU
        return any(x in name for x in PRODUCTS) and not any(x in name for x in ATTENTION)


def kernels(
    function: Callable[[], object], *, device: torch.device, calls: int = 3
) -> list[Kernel]:
    """Of an average call, the longest first. On a CPU torch's operators, without what they call."""
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as record:
        for _ in range(calls):
            function()
        if on_gpu:
            torch.cuda.synchronize()
    wanted = torch.autograd.DeviceType.CUDA if on_gpu else torch.autograd.DeviceType.CPU
    found = []
    for event in record.key_averages():
        total = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if event.device_type == wanted and total > 0 and (on_gpu or event.key.startswith("aten::")):
            found.append(Kernel(event.key, total / 1e3 / calls, event.count / calls))
    return sorted(found, key=lambda kernel: -kernel.milliseconds)


class Split(NamedTuple):
    """Milliseconds of a call by kernels, and their number."""

    products: float
    others: float
    count: float


def split(found: list[Kernel]) -> Split:
    """Products and everything else."""
    products = sum(kernel.milliseconds for kernel in found if kernel.is_product)
    everything = sum(kernel.milliseconds for kernel in found)
    return Split(products, everything - products, sum(kernel.count for kernel in found))


def product_rate(*, device: torch.device) -> float:
    """FLOP/s of a large bfloat16 matrix product, here and now."""
    size = 8192 if device.type == "cuda" else 256
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    took = milliseconds(lambda: a @ b, device=device, repeats=20)
    return 2.0 * size**3 / (took / 1e3)
