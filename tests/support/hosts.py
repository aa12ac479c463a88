"""Two hosts in one: network namespaces with addresses of their own, joined by a virtual cable."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ADDRESSES = ("10.213.77.1", "10.213.77.2")
INTERFACE = "cable"


def missing() -> str:
    """Why there can be no two hosts here; empty if there can."""
    if shutil.which("ip") is None:
        return "needs ip (apt install iproute2)"
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    name = f"probe{os.getpid()}"
    done = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if done.returncode:
        return f"ip netns add: {done.stderr.strip()}"
    _ip("netns", "del", name)
    return ""


@contextmanager
def two_hosts() -> Iterator[list[str]]:
    """Names of two namespaces that reach each other at `ADDRESSES`; gone afterwards."""
    names = [f"host{number}-{os.getpid()}" for number in (1, 2)]
    for name in names:
        _ip("netns", "add", name)
    try:
        _ip(
            *("link", "add", INTERFACE, "netns", names[0], "type", "veth"),
            *("peer", "name", INTERFACE, "netns", names[1]),
        )
        for name, address in zip(names, ADDRESSES, strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", INTERFACE)
            for device in (INTERFACE, "lo"):
                _ip("-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name in names:
            _ip("netns", "del", name)


def start_on(name: str, command: Sequence[str], *, output: Path) -> subprocess.Popen[bytes]:
    """Start a command on one of the hosts, in a session of its own."""
    environment = {
        **os.environ,
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    with output.open("ab") as file:
        return subprocess.Popen(
            ["ip", "netns", "exec", name, *command],
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
