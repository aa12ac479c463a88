"""Check the hosts of a job before it starts: python -m launch.preflight [--output FOLDER]

One process a host: `srun --ntasks-per-node=1 python -m launch.preflight`, or alone on one. Prints a
table and what is wrong, naming each bad host and the words that exclude it. Exit code 0, else 1.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from launch.measure import Host, exchange_rate, look_at_host, peers_of

# Of the median of all hosts: below, a host is bad. Good ones differ by some percent.
SHARE = {"matmul TFLOP/s": 0.85, "copy GB/s": 0.8, "network GB/s": 0.6, "disk GB/s": 0.3}
SKEW_SECONDS = 1.0
USED_GIB = 2.0


def find_faults(hosts: Sequence[Host]) -> list[tuple[str, str]]:
    """What is wrong, as (host, words). With few hosts only what is wrong by itself is found: a
    rate is compared with the median of three hosts or more."""
    faults = []
    for key in sorted({key for host in hosts for key in host.versions}):
        counts = Counter(host.versions.get(key, "absent") for host in hosts)
        common = counts.most_common(1)[0][0]
        faults += [
            (host.name, f"{key} {host.versions.get(key, 'absent')}, most hosts have {common}")
            for host in hosts
            if host.versions.get(key, "absent") != common
        ]
    numbers = Counter(len(host.gpus) for host in hosts)
    usual = numbers.most_common(1)[0][0]
    for host in hosts:
        if len(host.gpus) != usual:
            faults.append((host.name, f"{len(host.gpus)} GPUs, most hosts have {usual}"))
        for index, gpu in enumerate(host.gpus):
            if gpu["ecc_errors"] > 0:
                faults.append((host.name, f"GPU {index}: {gpu['ecc_errors']:.0f} ECC errors"))
            if gpu["used_mib"] > USED_GIB * 1024:
                used = gpu["used_mib"] / 1024
                faults.append((host.name, f"GPU {index}: {used:.1f} GiB taken by somebody else"))
        if abs(host.skew_seconds) > SKEW_SECONDS:
            faults.append((host.name, f"clock off by {host.skew_seconds:+.1f} s"))
        if host.rates.get("disk GB/s") == 0.0:
            faults.append((host.name, "the folder of the run cannot be written"))
    if len(hosts) >= 3:
        faults += _slow(hosts)
    return faults


def _slow(hosts: Sequence[Host]) -> list[tuple[str, str]]:
    faults = []
    for key, share in SHARE.items():
        known = [host.rates[key] for host in hosts if key in host.rates]
        middle = statistics.median(known) if known else math.nan
        faults += [
            (host.name, f"{key} {host.rates[key]:.3g}, the median is {middle:.3g}")
            for host in hosts
            if host.rates.get(key, math.inf) < share * middle
        ]
    clocks = [gpu["clock_mhz"] for host in hosts for gpu in host.gpus]
    if clocks:
        most = statistics.median(clocks)
        faults += [
            (host.name, f"GPU {index}: limited to {gpu['clock_mhz']:.0f} MHz of {most:.0f}")
            for host in hosts
            for index, gpu in enumerate(host.gpus)
            if gpu["clock_mhz"] < 0.95 * most
        ]
    return faults


def table(hosts: Sequence[Host]) -> str:
    """One row a host."""
    keys = [key for key in SHARE if any(key in host.rates for host in hosts)]
    lines = [f"{'host':<20}{'GPUs':>6}{'free GiB':>10}" + "".join(f"{key:>16}" for key in keys)]
    for host in hosts:
        cells = "".join(f"{host.rates.get(key, math.nan):>16.3g}" for key in keys)
        lines.append(f"{host.name:<20}{len(host.gpus):>6}{host.memory_gib:>10.0f}{cells}")
    return "\n".join(lines)


def report(hosts: Sequence[Host]) -> int:
    """Print the table and the faults; the exit code."""
    print(table(hosts))
    faults = find_faults(hosts)
    if not faults:
        print(f"{len(hosts)} host{'s' if len(hosts) > 1 else ''}: nothing wrong")
        return 0
    for name, words in faults:
        print(f"bad: {name}: {words}")
    names = ",".join(sorted({name for name, _ in faults}))
    print(f"leave them out with launch.exclude='{names}'")
    return 1


def measure_together(host: Host, *, rank: int, count: int, megabytes: int) -> list[Host]:
    """Add what needs the other hosts, and gather all of them. Collective."""
    import torch
    import torch.distributed as dist

    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=count, timeout=timedelta(seconds=300))
    try:
        rate = exchange_rate(peers_of(rank, count), rank=rank, megabytes=megabytes)
        host.rates["network GB/s"] = rate
        dist.barrier()
        clocks = [0.0] * count
        dist.all_gather_object(clocks, time.time())
        host.skew_seconds = clocks[rank] - statistics.median(clocks)
        hosts: list[Host] = [host] * count
        dist.all_gather_object(hosts, host)
    finally:
        dist.destroy_process_group()
    return hosts


def main(words: Sequence[str]) -> int:
    """The command. Returns the exit code, the same on every host."""
    parser = argparse.ArgumentParser(prog="launch.preflight", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("."), help="where checkpoints will go")
    parser.add_argument("--megabytes", type=int, default=256, help="to write and to exchange")
    given = parser.parse_args(words)
    values = os.environ
    count = int(values.get("SLURM_NTASKS", values.get("WORLD_SIZE", "1")))
    rank = int(values.get("SLURM_PROCID", values.get("RANK", "0")))
    host = look_at_host(given.output, megabytes=given.megabytes)
    hosts = [host]
    if count > 1 and "MASTER_ADDR" in values:
        hosts = measure_together(host, rank=rank, count=count, megabytes=given.megabytes)
    if rank == 0:
        return report(hosts)
    return 1 if find_faults(hosts) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
