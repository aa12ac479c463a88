"""Modules without memory and ranks without processes: what counting and planning build with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.overrides import TorchFunctionMode

from megatron_ext.config.schema import ParallelOptions
from megatron_ext.parallel import cpu_support, mesh


class _EveryDeviceIsMeta(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": torch.device("meta")}
        return func(*args, **kwargs)


@contextmanager
def on_meta() -> Iterator[None]:
    """Tensors made inside have a shape and a dtype and no memory, whatever device is asked for.

    Works in a running job of any device, and touches no GPU in a process that has not started one.
    """
    support_needed = cpu_support.installed_device() is None and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if support_needed:
        cpu_support.install(torch.device("meta"))
    try:
        with torch.device("meta"), _EveryDeviceIsMeta():
            yield
    finally:
        if support_needed:
            cpu_support.uninstall()


@dataclass(frozen=True)
class OneRank:
    """Stands for a process group of this process alone, where only its size and rank are asked."""

    def size(self) -> int:
        """Number of ranks: 1."""
        return 1

    def rank(self) -> int:
        """This rank: 0."""
        return 0


def one_rank_mesh() -> ProcessGroupCollection:
    """Groups of one rank each, for building modules; they cannot communicate.

    No process group is started or needed, so it can be used inside a running job of any layout.
    """
    group = cast("dist.ProcessGroup", OneRank())
    return ProcessGroupCollection(**{field.name: group for field in fields(ProcessGroupCollection)})


@contextmanager
def fake_world(
    parallel: ParallelOptions, *, rank: int, world_size: int
) -> Iterator[ProcessGroupCollection]:
    """The groups that `rank` of a job of `world_size` ranks would have, in this process alone.

    Collectives over them do nothing. At 4096 ranks it takes about half a second.

    Raises:
        RuntimeError: a process group is running: fake ranks belong in a process of their own.
        ConfigError: the sizes do not divide `world_size`.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RuntimeError("fake_world: a process group is running; plan in a process of its own")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield mesh.build_groups(parallel)
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
