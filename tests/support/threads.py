"""Ranks as threads of one process: real gloo collectives, no start-up time, errors with a trace."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def run_ranks[Result](
    count: int, function: Callable[[dist.ProcessGroup], Result], *, seconds: float = 60.0
) -> list[Result]:
    """Call `function` with the group of all ranks, on as many threads; results by rank.

    The group is known to nobody but `function`. A rank that raises leaves the others waiting for
    at most `seconds`; the first error of any rank is raised here.
    """
    store = dist.HashStore()
    results: list[Any] = [None] * count
    errors: list[BaseException] = []

    def rank_main(rank: int) -> None:
        torch.set_num_threads(1)  # ranks that each took all cores would wait for one another
        try:
            results[rank] = function(_group(store, rank, count, seconds))
        except BaseException as error:  # handed to the caller's thread
            errors.append(error)

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(count)]
    cores = torch.get_num_threads()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.set_num_threads(cores)
    if errors:
        raise errors[0]
    return results


def _group(store: dist.Store, rank: int, count: int, seconds: float) -> dist.ProcessGroup:
    group = dist.ProcessGroup(store, rank, count)
    kind = dist.ProcessGroup.BackendType.GLOO
    backend = dist.ProcessGroupGloo(store, rank, count, timeout=timedelta(seconds=seconds))
    group._set_default_backend(kind)
    group._register_backend(torch.device("cpu"), kind, backend)
    return group
