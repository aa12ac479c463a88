"""Quantile balancing of any stream of items over bins: no model, no configuration, no GPU needed.

Shapes: T items of one call, E bins, k bins an item.

    taken = balancer.assign(scores)      any number of times: routes the items and counts them
    load = balancer.update()             now and then: the bias that levels what was counted

The rule is that of `layers.balance.quantile`, for arrays instead of layers: an item takes the k
bins with the largest score + bias, and an update moves every bin's bias to the k/E quantile of the
margins of the items since the last one. Source: Kimi K3, section 2.3.3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_ext.config.schema import BinPlacement
from megatron_ext.ops.quantile.exact import next_bias
from megatron_ext.ops.quantile.histogram import Bins
from megatron_ext.ops.quantile.top_k import select_top_k

# Scores that are looked at together: bounds the memory of the selection, 10 bytes a score.
BLOCK = 1 << 24


class StreamLoad(NamedTuple):
    """What the bins were given between two updates, over all shards.

    Attributes:
        items: their number.
        counts: int64 [E], items of each bin; as the scores were, a NumPy array or a tensor.
        max_violation: largest count over the mean count, less 1; 0 without items.
        floor: what chance alone leaves of it where all bins are equally likely,
            sqrt(2 ln E / mean count); infinite without items.
    """

    items: int
    counts: NDArray[Any] | Tensor
    max_violation: float
    floor: float


class QuantileBalancer:
    """Assigns items to bins by score, and levels the load of the bins without looking ahead.

    Every assignment uses the bias of the last update, so it depends on earlier items only. All
    statistics are integers: the bias is the same bits however the items of an update are cut into
    calls and over shards (give `positions` where scores tie).

    Args:
        num_bins: E, at least 2.
        top_k: k, bins an item takes: 1 to E - 1.
        span: largest difference between two scores of an item; 1 for scores in [0, 1].
        resolution: bins of the histogram of margins that is kept for each of the E; see `Bins`.
        placement: `centred` (finest at the bias in use) or `uniform`, as a word.
        device: of the state and of the arithmetic.
        reduce: sums an int32 tensor in place over the shards of the stream, for instance
            `torch.distributed.all_reduce`, or `lambda x: comm.Allreduce(MPI.IN_PLACE, x.numpy())`.
            Called once by every `update`, 4 (E (resolution + 3) + 1) bytes; so all shards update
            together. None: there is one shard.

    Attributes:
        bias: float32 [E] tensor, in use; its mean is 0.

    Raises:
        ValueError: a number out of its range.
    """

    def __init__(
        self,
        num_bins: int,
        *,
        top_k: int = 1,
        span: float = 1.0,
        resolution: int = 128,
        placement: str = "centred",
        device: torch.device | str = "cpu",
        reduce: Callable[[Tensor], object] | None = None,
    ) -> None:
        if placement not in BinPlacement.__members__:
            raise ValueError(f"placement={placement!r}: allowed {list(BinPlacement.__members__)}")
        if not 1 <= top_k < num_bins:
            raise ValueError(f"top_k={top_k}: allowed 1 to num_bins - 1 = {num_bins - 1}")
        if not 0 < span < math.inf:
            raise ValueError(f"span={span}: must be finite and positive")
        self.num_bins, self.top_k = num_bins, top_k
        self._histogram_bins = Bins(resolution, BinPlacement[placement], span)
        self._reduce = reduce
        self._numpy = False
        self.bias = torch.zeros(num_bins, device=device)
        # One tensor, so that shards sum it in one call: histogram, items of each bin, items.
        cells = num_bins * (resolution + 2)
        self._statistics = torch.zeros(cells + num_bins + 1, dtype=torch.int32, device=device)
        self._histogram = self._statistics[:cells].view(num_bins, -1)
        self._counts = self._statistics[cells:-1]

    @torch.no_grad()
    def assign[Array: (NDArray[Any], Tensor)](
        self, scores: Array, *, positions: Array | None = None, count: bool = True
    ) -> Array:
        """Which bins each item takes; counts the items for the next update.

        Args:
            scores: floating [T, E], a NumPy array or a tensor; larger is better. Any T, 0 too.
            positions: int64 [T], a number for each item: ties between bins are dealt out by it.
                Default: the number of items counted on this shard since the last update, and up.
            count: False leaves the state as it is, for items that are only looked at.

        Returns:
            int64 [T, k], bins in ascending order; an array or a tensor on a device, as `scores` is.

        Raises:
            ValueError: another shape, not floating, not finite, or an item's scores differ by more
                than `span`. Nothing was counted then.
        """
        values = self._checked(_tensor(scores))
        if positions is None:
            first = int(self._statistics[-1])
            places = torch.arange(first, first + len(values), device=values.device)
        else:
            places = _tensor(positions).to(values.device)
            if places.shape != values.shape[:1]:
                raise ValueError(f"positions {tuple(places.shape)}: allowed ({len(values)},)")
        taken = torch.empty(len(values), self.top_k, dtype=torch.int64, device=values.device)
        for block in self._blocks(len(values)):
            selection = select_top_k(values[block] + self.bias, self.top_k, positions=places[block])
            # Row by row, and in each row exactly k.
            taken[block] = selection.map.nonzero()[:, 1].view(-1, self.top_k)
            if count:
                self._histogram_bins.add(
                    self._histogram, values[block], bias=self.bias, cutoff=selection.cutoff
                )
                self._counts += selection.map.sum(0, dtype=torch.int32)
        if count:
            self._statistics[-1] += len(values)
            self._numpy = isinstance(scores, np.ndarray)
        if isinstance(scores, np.ndarray):
            return taken.numpy(force=True)
        return taken.to(scores.device)

    def _checked(self, scores: Tensor) -> Tensor:
        """The scores as float32 or wider on the device of the state."""
        if scores.ndim != 2 or scores.shape[1] != self.num_bins or not scores.is_floating_point():
            raise ValueError(
                f"scores {scores.dtype} {list(scores.shape)}: allowed floating [T, {self.num_bins}]"
            )
        wide = torch.promote_types(scores.dtype, torch.float32)
        values = scores.detach().to(self.bias.device, wide)
        if len(values):
            low, high = values.aminmax(dim=1)
            widest = float((high - low).max())  # NaN where a score is NaN or infinite
            if not widest <= self._histogram_bins.span * (1 + 1e-5):
                raise ValueError(
                    f"scores: those of an item differ by {widest:g}, allowed up to "
                    f"span={self._histogram_bins.span:g} (larger: QuantileBalancer(..., span=...))"
                )
        return values

    def _blocks(self, items: int) -> Iterator[slice]:
        step = max(1, BLOCK // self.num_bins)
        for start in range(0, items, step):
            yield slice(start, start + step)

    @torch.no_grad()
    def update(self) -> StreamLoad:
        """Set the bias from the items since the last update, and forget these.

        Call it when some items a bin have come: the quantile of few is noisy. Without any item the
        bias stays as it is.
        """
        if self._reduce is not None:
            self._reduce(self._statistics)
        found = self._histogram_bins.quantile(self._histogram, bias=self.bias, top_k=self.top_k)
        items = int(self._statistics[-1])
        counts = self._counts.to(torch.int64)
        self.bias = next_bias(
            found.value, bias=self.bias, top_k=self.top_k, tokens=self._statistics[-1]
        )
        self._statistics.zero_()
        mean = items * self.top_k / self.num_bins
        return StreamLoad(
            items=items,
            counts=counts.numpy(force=True) if self._numpy else counts,
            max_violation=float(counts.max()) / mean - 1 if items else 0.0,
            floor=math.sqrt(2 * math.log(self.num_bins) / mean) if items else math.inf,
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything to go on from, between two updates too: plain values and CPU tensors.

        On shards each has its own `statistics`; `bias` is the same on all.
        """
        return {
            "num_bins": self.num_bins,
            "top_k": self.top_k,
            "span": self._histogram_bins.span,
            "resolution": self._histogram_bins.number,
            "placement": self._histogram_bins.placement.name,
            "bias": self.bias.cpu().clone(),
            "statistics": self._statistics.cpu().clone(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned.

        Raises:
            ValueError: it is of another kind of balancer; nothing was loaded.
        """
        mine = self.state_dict()
        tensors = ("bias", "statistics")
        wrong = [
            f"{key}: given {state.get(key)!r}, allowed {value!r}"
            for key, value in mine.items()
            if key not in tensors and state.get(key) != value
        ]
        if wrong:
            raise ValueError("state of another balancer: " + "; ".join(wrong))
        self.bias.copy_(torch.as_tensor(state["bias"]))
        self._statistics.copy_(torch.as_tensor(state["statistics"]))


def _tensor(array: NDArray[Any] | Tensor) -> Tensor:
    """Without a copy where torch can do that: it takes neither negative strides nor, in silence,
    memory that must not be written."""
    if isinstance(array, Tensor):
        return array
    array = np.ascontiguousarray(array)
    return torch.from_numpy(array if array.flags.writeable else array.copy())
