"""Ranks as threads of this process: collectives without starting processes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist

LIMIT = timedelta(seconds=60)


def run_ranks[T](size: int, function: Callable[[dist.ProcessGroup], T]) -> list[T]:
    """Calls ``function`` with each rank's gloo group, side by side; results in order of rank."""
    store = dist.HashStore()

    def work(rank: int) -> T:
        group = dist.ProcessGroup(store, rank, size)
        backend = dist.ProcessGroup.BackendType.GLOO
        group._set_default_backend(backend)
        gloo = dist.ProcessGroupGloo(store, rank, size, LIMIT)
        group._register_backend(torch.device("cpu"), backend, gloo)
        return function(group)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, range(size)))
