"""Initial values as data: every parameter says how it is drawn, `model.init` draws it.

A layer never draws numbers itself. It attaches one of these descriptions to the parameter, and
`megatron_ext.model.init` turns a counter-based uniform into the value, so that the result depends
on (seed, logical name, element index) alone and not on the layout or the order of construction.

`from_symmetric` takes s, uniform on (-1, 1): odd multiples of 2**-24, exact in float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class Initializer(Protocol):
    """How the elements of a parameter are drawn, each independently of the others."""

    def from_symmetric(self, s: Tensor) -> Tensor:
        """Values for s: float32, any shape, uniform on (-1, 1). Same shape, floating point."""
        ...


@dataclass(frozen=True)
class Constant:
    """Every element is `value`."""

    value: float

    def from_symmetric(self, s: Tensor) -> Tensor:
        return torch.full_like(s, self.value)


@dataclass(frozen=True)
class Normal:
    """Normal with mean 0 and standard deviation `std`; 24 bits cut it at 5.3 deviations."""

    std: float

    def from_symmetric(self, s: Tensor) -> Tensor:
        return torch.erfinv(s).mul_(self.std * math.sqrt(2.0))


@dataclass(frozen=True)
class Uniform:
    """Uniform between `low` and `high`."""

    low: float
    high: float

    def from_symmetric(self, s: Tensor) -> Tensor:
        return (s * (0.5 * (self.high - self.low))).add_(0.5 * (self.high + self.low))


# The two below are for small vectors, and take float64 so that the last bit of a logarithm, which
# devices round differently, is far below the float32 that is kept.


@dataclass(frozen=True)
class LogUniformSoftplusInverse:
    """softplus(x) is log-uniform between `low` and `high` (the slow gate, as in fla's KDA)."""

    low: float
    high: float

    def from_symmetric(self, s: Tensor) -> Tensor:
        lowest, highest = math.log(self.low), math.log(self.high)
        step = Uniform(lowest, highest).from_symmetric(s.double()).exp()
        return step + torch.log(-torch.expm1(-step))


@dataclass(frozen=True)
class LogOfUniform:
    """exp(x) is uniform between `low` and `high` (the wide gate, as in Mamba-2)."""

    low: float
    high: float

    def from_symmetric(self, s: Tensor) -> Tensor:
        return Uniform(self.low, self.high).from_symmetric(s.double()).log()


def parameter(
    *shape: int,
    dtype: torch.dtype,
    initializer: Initializer | None = None,
    weight_decay: bool = True,
    sequence_parallel: bool | None = None,
    tensor_parallel_axis: int | None = None,
) -> nn.Parameter:
    """An unset parameter on the current device, carrying what other parts read from it.

    Args:
        shape: local shape, after tensor-parallel splitting.
        dtype: stays what it is here: float32 parameters of a bfloat16 model are created float32.
        initializer: None leaves the choice to `model.init` (Normal for matrices, 1 for norms).
        weight_decay: False sets `no_weight_decay`, which the optimizer's groups obey.
        sequence_parallel: for replicated parameters only. True says that each tensor-parallel rank
            sees another part of the sequence, so that the gradients have to be summed.
        tensor_parallel_axis: the axis that tensor parallelism splits; None: replicated.
    """
    made: Any = nn.Parameter(torch.empty(shape, dtype=dtype, device=torch.cuda.current_device()))
    if initializer is not None:
        made.initializer = initializer
    if not weight_decay:
        made.no_weight_decay = True
    if sequence_parallel is not None:
        made.sequence_parallel = sequence_parallel
    if tensor_parallel_axis is not None:
        made.tensor_model_parallel = True
        made.partition_dim = tensor_parallel_axis
        made.partition_stride = 1
    return made
