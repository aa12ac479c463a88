"""Counts what runs on the meta device: live bytes, matrix products, memory traffic, messages."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from megatron_ext.ops.without_memory import is_of_experts

GRANULE = 512  # bytes; torch's CUDA allocator rounds every request up to a multiple
# Bytes over a rank's link in a ring of n ranks, as a multiple of (n - 1) / n and the larger tensor.
RING = {"allreduce": 2, "allgather_base": 1, "reduce_scatter_base": 1, "alltoall_base": 1}


@dataclass
class Work:
    """What one rank did.

    Attributes:
        flops: of matrix products, `dense` and `grouped`.
        traffic: bytes read and written by everything else.
        sent: bytes over this rank's link, by kind of parallelism and collective.
    """

    flops: Counter[str] = field(default_factory=Counter)
    traffic: int = 0
    sent: Counter[tuple[str, str]] = field(default_factory=Counter)

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.traffic + other.traffic, self.sent + other.sent)

    def times(self, count: int) -> Work:
        """The same, done `count` times."""
        return Work(
            Counter({kind: value * count for kind, value in self.flops.items()}),
            self.traffic * count,
            Counter({key: value * count for key, value in self.sent.items()}),
        )


class Tracker(TorchDispatchMode):
    """While it is active, every storage counts from its first tensor until nothing holds it.

    Args:
        groups: kind of parallelism by the name of a process group.
        granule: bytes that sizes are rounded up to.

    Attributes:
        live: bytes now.
        peak: most bytes since `begin`.
        work: since it was last taken.
    """

    def __init__(self, groups: Mapping[str, str], *, granule: int = GRANULE) -> None:
        super().__init__()
        self.groups, self.granule = groups, granule
        self.live = self.peak = 0
        self.work = Work()
        self._seen: dict[int, Any] = {}

    def begin(self) -> int:
        """Measure the peak anew from here. Returns the live bytes."""
        self.peak = self.live
        return self.live

    def take_work(self) -> Work:
        """What was done since the last call."""
        done, self.work = self.work, Work()
        return done

    def ignore(self, *tensors: Tensor) -> None:
        """Leave these out of the count."""
        self._seen |= {x.untyped_storage()._cdata: None for x in tensors}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            return self._communicate(func, args, kwargs)
        out = func(*args, **kwargs)
        made = _tensors((out,))
        new = [self._add(x) for x in made]
        packet = func.overloadpacket
        if packet in flop_registry:
            flops = flop_registry[packet](*args, **kwargs, out_val=out)
            kind = "grouped" if is_of_experts(*args, *kwargs.values()) else "dense"
            self.work.flops[kind] += flops
        elif packet is torch.ops.aten._grouped_mm:  # not in torch's registry
            self.work.flops["grouped"] += 2 * args[0].numel() * args[1].shape[-1]
        elif "empty" in packet.__name__:
            # Filled by a kernel that is not seen here, which read about as much.
            self.work.traffic += 2 * sum(x.nbytes for x in made)
        elif func._schema.is_mutable or any(new):
            read = _tensors((*args, *kwargs.values()))
            self.work.traffic += sum(x.nbytes for x in (*read, *made))
        return out

    def _add(self, x: Tensor) -> bool:
        storage = x.untyped_storage()
        key = storage._cdata
        if x.device.type != "meta" or key in self._seen:
            return False
        size = -(-storage.nbytes() // self.granule) * self.granule
        self.live += size
        self.peak = max(self.peak, self.live)
        self._seen[key] = weakref.finalize(storage, self._drop, key, size)
        return True

    def _drop(self, key: int, size: int) -> None:
        self.live -= size
        del self._seen[key]

    def _communicate(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Record a collective, which has nothing to do here."""
        name = func.overloadpacket.__name__.strip("_")
        given = (*args, *kwargs.values())
        group = next(
            dist.ProcessGroup.unbox(x)
            for x in given
            if isinstance(x, torch.ScriptObject) and str(x._type()).endswith("ProcessGroup")
        )
        largest = max((x.nbytes for x in _tensors(given)), default=0)
        ranks = group.size()
        sent = RING.get(name, 1) * largest * (ranks - 1) // ranks
        kind = self.groups.get(group.group_name, "other")
        self.work.sent[kind, name.removesuffix("_base")] += sent
        c10d = torch._C._distributed_c10d
        done = c10d.Work.boxed(c10d.FakeWork())
        return done if len(func._schema.returns) == 1 else (args[0], done)


def _tensors(values: tuple[Any, ...]) -> list[Tensor]:
    """Those among arguments or results of an operator, whose lists are never nested."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += [x for x in value if isinstance(x, Tensor)]
    return found
