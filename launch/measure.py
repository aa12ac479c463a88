"""What one host is and does, as plain numbers. torch is imported where a measurement needs it."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import socket
import subprocess
import time
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

GIB, MIB = 2.0**30, 2**20
QUERY = {
    "memory_mib": "memory.total",
    "used_mib": "memory.used",
    "clock_mhz": "clocks.max.sm",
    "ecc_errors": "ecc.errors.uncorrected.volatile.total",
}


@dataclass
class Host:
    """What was found on a host; rates that were not measured are missing.

    Attributes:
        name: as SLURM and `launch.exclude` know it.
        versions: of what must be the same everywhere.
        memory_gib: free main memory.
        gpus: for each, the values of `QUERY`; NaN where the driver has none.
        rates: what was timed: `matmul TFLOP/s` (slowest GPU, or the CPU), `disk GB/s`,
            `copy GB/s` (slowest pair of neighbouring GPUs), `network GB/s` (best of two peers).
        skew_seconds: of the clock, against the median of the hosts.
    """

    name: str
    versions: dict[str, str] = field(default_factory=dict)
    memory_gib: float = 0.0
    gpus: list[dict[str, float]] = field(default_factory=list)
    rates: dict[str, float] = field(default_factory=dict)
    skew_seconds: float = 0.0


def look_at_host(folder: Path, *, megabytes: int) -> Host:
    """Everything that needs no other host.

    Args:
        folder: on the file system that checkpoints go to.
        megabytes: to write there.
    """
    host = Host(socket.gethostname().split(".")[0], versions=versions(), gpus=gpus())
    host.memory_gib = free_memory_gib()
    host.rates["disk GB/s"] = disk_rate(folder, megabytes=megabytes)
    host.rates |= compute_rates()
    return host


def versions() -> dict[str, str]:
    """Versions whose difference between hosts is a fault."""
    found = {"python": platform.python_version(), "kernel": platform.release()}
    for name in ("torch", "megatron-core", "triton", "transformer-engine"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "absent"
    driver = _smi("driver_version")
    return found | ({"driver": driver[0]} if driver else {})


def gpus() -> list[dict[str, float]]:
    """The values of `QUERY` for each GPU, as nvidia-smi gives them; empty without one."""
    return [
        {key: _number(cell) for key, cell in zip(QUERY, line.split(","), strict=True)}
        for line in _smi(",".join(QUERY.values()))
    ]


def _number(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:  # "[N/A]"
        return float("nan")


def _smi(query: str) -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return (
        [line for line in done.stdout.splitlines() if line.strip()] if not done.returncode else []
    )


def free_memory_gib() -> float:
    """Main memory that programs may still take."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return float(line.split()[1]) / MIB
    return float("nan")


def disk_rate(folder: Path, *, megabytes: int) -> float:
    """GB/s of writing a file and having it on disk; 0 if the folder cannot be written."""
    path = folder / f".preflight.{socket.gethostname()}.{os.getpid()}"
    block = os.urandom(MIB)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        start = time.perf_counter()
        with path.open("wb") as file:
            for _ in range(megabytes):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        return megabytes * MIB / 1e9 / (time.perf_counter() - start)
    except OSError:
        return 0.0
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def compute_rates() -> dict[str, float]:
    """`matmul TFLOP/s` of the slowest device and, with several GPUs, `copy GB/s` of the slowest
    neighbours. A throttled or broken GPU, or a host somebody else is using, shows here."""
    import torch

    if not torch.cuda.is_available():
        return {"matmul TFLOP/s": _matmul_rate("cpu", size=1024, dtype=torch.float32)}
    devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    slowest = min(_matmul_rate(name, size=8192, dtype=torch.bfloat16) for name in devices)
    rates = {"matmul TFLOP/s": slowest}
    if len(devices) > 1:
        pairs = zip(devices, devices[1:] + devices[:1], strict=True)
        rates["copy GB/s"] = min(_copy_rate(source, target) for source, target in pairs)
    return rates


def _matmul_rate(device: str, *, size: int, dtype: object) -> float:
    import torch

    matrix = torch.randn(size, size, device=device).to(dtype)  # type: ignore[call-overload]
    best = 0.0
    for _ in range(5):
        _wait(device)
        start = time.perf_counter()
        for _ in range(4):
            matrix @ matrix
        _wait(device)
        best = max(best, 4 * 2 * size**3 / (time.perf_counter() - start) / 1e12)
    return best


def _copy_rate(source: str, target: str) -> float:
    import torch

    data = torch.empty(256 * MIB, dtype=torch.uint8, device=source)
    copy = torch.empty_like(data, device=target)
    best = 0.0
    for _ in range(4):
        _wait(source)
        _wait(target)
        start = time.perf_counter()
        copy.copy_(data)
        _wait(source)
        _wait(target)
        best = max(best, data.numel() / 1e9 / (time.perf_counter() - start))
    return best


def _wait(device: str) -> None:
    import torch

    if device != "cpu":
        torch.cuda.synchronize(device)


def exchange_rate(peers: list[int], *, rank: int, megabytes: int) -> float:
    """GB/s one way with each peer in turn while both send, the best of them. Collective.

    Args:
        peers: of this rank, one a round; -1: it rests in that round. If a host is slow with every
            peer, it is the host; if with one only, it is that one.
        rank: this one.
        megabytes: to send.
    """
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", 0) if dist.get_backend() == "nccl" else torch.device("cpu")
    outgoing = torch.empty(megabytes * MIB, dtype=torch.uint8, device=device)
    incoming = torch.empty_like(outgoing)
    best = 0.0
    for peer in peers:
        for _ in range(3):  # the first connects
            dist.barrier()
            if peer < 0:
                continue
            start = time.perf_counter()
            work = [
                dist.P2POp(dist.isend, outgoing, peer),
                dist.P2POp(dist.irecv, incoming, peer),
            ]
            for handle in dist.batch_isend_irecv(work):
                handle.wait()
            _wait(str(device))
            best = max(best, outgoing.numel() / 1e9 / (time.perf_counter() - start))
    return best


def peers_of(rank: int, count: int) -> list[int]:
    """Who a rank exchanges with in two rounds: its neighbours to either side; -1: nobody."""
    right = rank + 1 if rank + 1 < count else -1
    left = rank - 1
    if count % 2 == 0 and count > 2:  # a ring closes
        right, left = (rank + 1) % count, (rank - 1) % count
    return [right, left] if rank % 2 == 0 else [left, right]
