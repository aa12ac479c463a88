"""Process start-up: device, backend, seeds."""

from __future__ import annotations

import logging
import os
import random
import warnings
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from megatron_ext.config.schema import Device, Precision, RunOptions
from megatron_ext.errors import ConfigError
from megatron_ext.ops.kda import tuned
from megatron_ext.parallel import cpu_support
from megatron_ext.parallel.environment import read_environment


@dataclass(frozen=True)
class Runtime:
    """A started process: its place among the ranks, and what it computes with."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    backend: str


def quiet() -> None:
    """Hide the warnings that megatron-core gives on import and construction; errors stay.

    They say that Transformer Engine and Apex are missing (our own header says which backends are
    in use) and that GPTModel gets no new features. To silence those of the import, call it first.
    """
    for category in (UserWarning, FutureWarning, DeprecationWarning):
        warnings.filterwarnings("ignore", category=category, module=r"megatron\.")
    # megatron-core's own habits, reported against torch or our function mode
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.")
    warnings.filterwarnings(
        "ignore", message=r"The \.grad attribute of a Tensor that is not a leaf"
    )
    logging.getLogger("megatron").setLevel(logging.ERROR)
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)


def choose_device(wanted: Device, *, local_rank: int = 0) -> torch.device:
    """The device of this rank. `auto` takes CUDA when there is a GPU.

    Ranks beyond the number of GPUs share them in turn, which is meant for correctness tests.

    Raises:
        ConfigError: CUDA is asked for and there is no GPU.
    """
    if wanted is Device.cpu:
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda", local_rank % torch.cuda.device_count())
    if wanted is Device.cuda:
        raise ConfigError(
            "run.device: got cuda, but torch finds no GPU; use run.device=cpu or run.device=auto"
        )
    return torch.device("cpu")


def start(run: RunOptions) -> Runtime:
    """Choose the device, start torch.distributed and seed every generator. Call it once.

    In an fp32 run matrix products are full float32: TensorFloat-32 is switched off, since with it
    layouts agree to 1e-3 only. In a bf16 run it is allowed for the few float32 products.

    Returns:
        This process's place. With no launcher the process is its only rank and needs no network.

    Raises:
        ConfigError: `run.device=cuda` without a GPU.
    """
    quiet()
    environment = read_environment()
    device = choose_device(run.device, local_rank=environment.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        for name, value in tuned.variables(torch.cuda.get_device_name(device)).items():
            os.environ.setdefault(name, value)
    else:
        _limit_threads()
    cpu_support.install(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    # No device_id: it makes NCCL connect every group at once, 7 GB of GPU memory a rank.
    timeout = timedelta(seconds=run.timeout_seconds)
    if environment.launched:
        dist.init_process_group(
            backend,
            rank=environment.rank,
            world_size=environment.world_size,
            timeout=timeout,
        )
    else:
        dist.init_process_group(
            backend,
            store=dist.HashStore(),
            rank=0,
            world_size=1,
            timeout=timeout,  # type: ignore[attr-defined]
        )
    seed_everything(run.seed)
    set_precision(run.precision)
    if run.deterministic:
        set_deterministic()
    return Runtime(
        rank=environment.rank,
        world_size=environment.world_size,
        local_rank=environment.local_rank,
        device=device,
        backend=backend,
    )


def to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of a tensor in main memory, which nobody waits for."""
    # From memory that is not page-locked the copy would wait for what the device still computes.
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


def stop() -> None:
    """Leave the process groups. Safe to call when nothing was started."""
    from megatron.core import parallel_state

    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def seed_everything(seed: int) -> None:
    """Seed python, numpy and torch. The same on every rank: what must differ is drawn by rank."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def set_precision(precision: Precision) -> None:
    """Switch TensorFloat-32 off for fp32 runs, on for bf16 runs."""
    exact = precision is Precision.fp32
    torch.set_float32_matmul_precision("highest" if exact else "high")
    torch.backends.cudnn.allow_tf32 = not exact


def set_deterministic() -> None:
    """Make torch refuse operators that are not deterministic, by their name, and cuBLAS too."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def _limit_threads() -> None:
    """One thread a rank as under torchrun, unless the user set OMP_NUM_THREADS.

    Small operators end before a sleeping second thread wakes up: `nano` on two cores took 3.4 s a
    step with two threads, 1.6 s with one.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
