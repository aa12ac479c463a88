"""What one layer's experts were given in one step: the plain record that dashboards read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class LayerLoad:
    """One expert layer in one optimizer step, over the valid tokens of the global batch.

    Every field is the same on all ranks and in every layout (given the same scores). Numbers are
    tensors without axes on the device of the layer, so that making the record waits for nothing;
    `to_host` brings the records of all layers over at once.

    Attributes:
        layer: 0-based number of the layer.
        top_k: experts a token.
        tokens: int64 [], valid tokens.
        counts: int64 [E], tokens that each expert was given.
        bias: float32 [E], in use during the step.
        new_bias: float32 [E], from the next step on.
        predicted: float64 [E], tokens that each expert would have been given in this batch with
            the new bias and the cut-offs held, known up to the mass of one bin where there is a
            histogram; None where the rule makes no such promise.
        out_of_range: int64 [], margins that fell outside the histogram (of tokens * E).
        bin_width: float64 [], widest bin at the quantiles that were read; 0 without a histogram.
        dropped: int64 [], slots (of tokens * top_k) that no expert took.
    """

    layer: int
    top_k: int
    tokens: Tensor
    counts: Tensor
    bias: Tensor
    new_bias: Tensor
    predicted: Tensor | None
    out_of_range: Tensor
    bin_width: Tensor
    dropped: Tensor


def settle(
    counts: Tensor,
    bias: Tensor,
    *,
    layer: int,
    top_k: int,
    new_bias: Tensor,
    predicted: Tensor | None = None,
    out_of_range: Tensor | None = None,
    bin_width: Tensor | None = None,
) -> LayerLoad:
    """The record of a step; takes over the new bias and clears the counts.

    Args:
        counts: int64 [E + 1], tokens an expert, then valid tokens.
        bias: float32 [E], in use.
        new_bias: float32 [E]; this and the rest: see `LayerLoad`.
    """
    kept = counts.clone()
    tokens = kept[-1]
    load = LayerLoad(
        layer=layer,
        top_k=top_k,
        tokens=tokens,
        counts=kept[:-1],
        bias=bias.clone(),
        new_bias=new_bias.clone(),
        predicted=predicted,
        out_of_range=torch.zeros_like(tokens) if out_of_range is None else out_of_range,
        bin_width=tokens.double() * 0 if bin_width is None else bin_width,
        dropped=tokens * top_k - kept[:-1].sum(),
    )
    bias.copy_(load.new_bias)
    counts.zero_()
    return load


def to_host(loads: Sequence[LayerLoad]) -> list[LayerLoad]:
    """The records with all tensors on the CPU: one copy for all of them, one wait."""
    return HostCopy(loads).wait()


class HostCopy:
    """`to_host` in two halves: what is queued on the device in between is not waited for.

    Args:
        loads: of all layers of this rank. The copy is queued when this object is made.
    """

    def __init__(self, loads: Sequence[LayerLoad]) -> None:
        self._loads = loads
        self._tensors = [tensor for load in loads for tensor in _tensors(load).values()]
        self._copied: torch.cuda.Event | None = None
        if not self._tensors:
            return
        # float64 holds every count below 2^53, and float32, exactly.
        self._flat = torch.cat([tensor.reshape(-1).double() for tensor in self._tensors])
        if self._flat.is_cuda:
            pinned = torch.empty(self._flat.shape, dtype=self._flat.dtype, pin_memory=True)
            self._flat = pinned.copy_(self._flat, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no type
            self._copied.record()

    def wait(self) -> list[LayerLoad]:
        """The records with all tensors on the CPU."""
        if not self._tensors:
            return list(self._loads)
        if self._copied is not None:
            self._copied.synchronize()
        parts = iter(torch.split(self._flat, [tensor.numel() for tensor in self._tensors]))
        result = []
        for load in self._loads:
            moved: dict[str, Any] = {
                # Copies: a view would be pickled with the storage of all.
                name: next(parts).reshape(value.shape).to(value.dtype, copy=True)
                for name, value in _tensors(load).items()
            }
            result.append(replace(load, **moved))
        return result


def _tensors(load: LayerLoad) -> dict[str, Tensor]:
    named = {field.name: getattr(load, field.name) for field in fields(load)}
    return {name: value for name, value in named.items() if isinstance(value, Tensor)}
