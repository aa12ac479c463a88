"""What the hardware gave: memory at its peak, and the share of the peak rate that was used."""

from __future__ import annotations

import math
import resource
import sys

import torch
import torch.distributed as dist

from megatron_ext.config.schema import Precision

GIB = 2.0**30

# Dense matrix rates by data sheet, FLOP/s, by the name that torch gives the device: (bf16, fp32).
PEAK_RATES: dict[str, tuple[float, float]] = {
    "H200": (989e12, 67e12),
    "H100": (989e12, 67e12),
    "H800": (989e12, 67e12),
    "GB200": (2500e12, 80e12),
    "B200": (2250e12, 80e12),
    "A100": (312e12, 19.5e12),
    "A800": (312e12, 19.5e12),
}


def peak_rate(device: torch.device, precision: Precision) -> float:
    """FLOP/s of one device; NaN where it is not known, as for a CPU."""
    if device.type != "cuda":
        return math.nan
    name = torch.cuda.get_device_name(device)
    for part, (bf16, fp32) in PEAK_RATES.items():
        if part in name:
            return bf16 if precision is Precision.bf16 else fp32
    return math.nan


def own_peak_gib(device: torch.device) -> float:
    """Peak memory of this rank: allocated on its GPU, else resident."""
    if device.type == "cuda":
        used = float(torch.cuda.max_memory_allocated(device))
    else:
        unit = 1 if sys.platform == "darwin" else 1024
        used = float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * unit
    return used / GIB


def peak_memory_gib(device: torch.device) -> float:
    """Peak memory of the fullest rank. Collective."""
    fullest = torch.tensor(own_peak_gib(device), dtype=torch.float64, device=device)
    dist.all_reduce(fullest, op=dist.ReduceOp.MAX)
    return float(fullest)
