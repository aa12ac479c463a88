"""A rank that is out of memory says what it needed, what was expected, and what to change."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil
import torch

from megatron_ext.config.schema import RunConfig
from megatron_ext.errors import MegatronExtError, OutOfMemory
from megatron_ext.parallel.runtime import Runtime
from megatron_ext.plan.relief import Answer, ask
from megatron_ext.train.throughput import GIB, own_peak_gib

# torch on a CPU, CUDA and NCCL, cuBLAS.
_WORDS = re.compile(
    r"can't allocate memory|out of memory|CUBLAS_STATUS_ALLOC_FAILED", re.IGNORECASE
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that an allocation failed, on a GPU or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and _WORDS.search(str(error)) is not None


@contextmanager
def told(config: RunConfig, runtime: Runtime, *, doing: Callable[[], str]) -> Iterator[None]:
    """Turns an allocation that fails into `OutOfMemory` with a remedy. Other errors pass.

    It may happen to one rank only, whose end makes the launcher end the others.

    Args:
        config: of the run or stage.
        runtime: of this rank.
        doing: what the run is at, in words.

    Raises:
        OutOfMemory: with exit code 20, after which nothing is started again: it would happen again.
    """
    try:
        yield
    except MegatronExtError:
        raise
    except Exception as error:  # looked at below, and raised again where it is another one
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(_text(config, runtime, error, doing=doing())) from error


def _text(config: RunConfig, runtime: Runtime, error: Exception, *, doing: str) -> str:
    stage = runtime.rank * config.parallel.pipeline // runtime.world_size
    peak, limit = own_peak_gib(runtime.device), _limit_gib(runtime.device)
    answer = ask(config, world_size=runtime.world_size, stage=stage)
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    lines = [
        f"out of memory on rank {runtime.rank} of {os.uname().nodename}, pipeline stage {stage}, "
        f"{doing}: {first}",
        f"  peak       {peak:.2f} of {limit:.2f} GiB"
        + ("" if runtime.device.type == "cuda" else ", Python and its libraries included"),
    ]
    if isinstance(answer, str):
        lines.append(f"  expected   no estimate ({answer}); ask run.mode=plan")
        return "\n".join(lines)
    lines += [f"  expected   {_parts(answer)}", *_ways(answer)]
    lines.append("run.mode=plan shows every stage, profile.steps=[1] where a GPU's memory went")
    return "\n".join(lines)


def _parts(answer: Answer) -> str:
    parts = {
        "weights": answer.weights,
        "gradients": answer.gradients,
        "optimizer": answer.optimizer,
        "activations": answer.activations,
    }
    named = ", ".join(f"{name} {_size(size)}" for name, size in parts.items())
    return f"{_size(answer.total)} by the plan: {named}"


def _ways(answer: Answer) -> Iterator[str]:
    if not answer.ways:
        yield "  nothing in the configuration makes it smaller: more ranks, or a smaller model"
        return
    yield "cheapest first, each alone, with what the plan expects then:"
    for number, way in enumerate(answer.ways, 1):
        yield f"  {number}. {way.words}  {_size(way.total)}; {way.price}"


def _size(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:.2f} MiB"


def _limit_gib(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory / GIB)
    return float(psutil.virtual_memory().total / GIB)
