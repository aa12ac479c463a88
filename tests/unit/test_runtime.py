"""Where a process is and what it computes with, from the launcher's variables and the options."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from megatron_ext.config.schema import Device, ParallelOptions, Precision, RunOptions
from megatron_ext.errors import ConfigError
from megatron_ext.parallel import cpu_support, mesh, runtime
from megatron_ext.parallel.environment import Environment, read_environment

LAUNCHER = [
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_LOCALID",
    "SLURM_STEP_TASKS_PER_NODE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMP_NUM_THREADS",
]


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.fixture
def stopped() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    runtime.stop()
    cpu_support.uninstall()
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = False
    torch.set_float32_matmul_precision("highest")
    torch.set_num_threads(threads)


def test_without_a_launcher_a_process_is_alone(clean: pytest.MonkeyPatch) -> None:
    assert read_environment() == Environment(launched=False)


def test_torchrun_says_which_rank_this_is(clean: pytest.MonkeyPatch) -> None:
    for name, value in zip(LAUNCHER, ("5", "16", "1", "4"), strict=False):
        clean.setenv(name, value)
    assert read_environment() == Environment(5, 16, 1, 4, launched=True)


def test_slurm_counts_only_where_it_starts_one_process_a_rank(clean: pytest.MonkeyPatch) -> None:
    clean.setenv("SLURM_PROCID", "6")
    clean.setenv("SLURM_LOCALID", "2")
    clean.setenv("SLURM_STEP_NUM_TASKS", "8")
    clean.setenv("SLURM_STEP_TASKS_PER_NODE", "4(x2)")
    assert not read_environment().launched  # nobody to meet
    clean.setenv("MASTER_ADDR", "host")
    clean.setenv("MASTER_PORT", "29500")
    assert read_environment() == Environment(6, 8, 2, 4, launched=True)
    clean.setenv("SLURM_STEP_NUM_TASKS", "1")  # an interactive shell of an allocation
    assert read_environment() == Environment(launched=False)


def test_ranks_beyond_the_gpus_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    devices = [runtime.choose_device(Device.auto, local_rank=rank) for rank in range(4)]
    assert [device.index for device in devices] == [0, 1, 0, 1]
    assert runtime.choose_device(Device.cpu, local_rank=3) == torch.device("cpu")


def test_cuda_without_a_gpu_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert runtime.choose_device(Device.auto) == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"run\.device: got cuda"):
        runtime.choose_device(Device.cuda)


@pytest.mark.usefixtures("stopped")
def test_one_rank_starts_without_a_network_and_the_seed_fixes_every_generator(
    clean: pytest.MonkeyPatch,
) -> None:
    draws = []
    for _ in range(2):
        place = runtime.start(RunOptions(device=Device.cpu, seed=7))
        assert (place.rank, place.world_size, place.backend) == (0, 1, "gloo")
        assert place.device == torch.device("cpu")
        groups = mesh.build_mesh(ParallelOptions(), seed=7)
        assert groups.tp.size() == groups.dp.size() == 1
        draws.append((random.random(), np.random.rand(), torch.rand(1).item()))
        runtime.stop()
        runtime.stop()  # harmless
    assert draws[0] == draws[1]
    runtime.start(RunOptions(device=Device.cpu))
    with pytest.raises(ConfigError, match="do not divide the 1 started"):
        mesh.build_mesh(ParallelOptions(tensor=2))


@pytest.mark.usefixtures("stopped")
def test_a_deterministic_run_refuses_by_name_and_fp32_is_full_float32(
    clean: pytest.MonkeyPatch,
) -> None:
    clean.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")  # a user's choice is kept
    runtime.start(RunOptions(device=Device.cpu, deterministic=True, precision=Precision.fp32))
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cudnn.allow_tf32
    with pytest.raises(RuntimeError, match="put_ does not have a deterministic implementation"):
        torch.zeros(2).put_(torch.tensor([0]), torch.tensor([1.0]))
