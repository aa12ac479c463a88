"""The command that starts the ranks of one host."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_ext.config.schema import Device, RunConfig
from megatron_ext.errors import ConfigError

REPOSITORY = Path(__file__).resolve().parents[1]
PORT = 29400


def host_ranks(config: RunConfig) -> int:
    """Ranks of one host: as configured, else one a GPU, else one."""
    given = config.launch.ranks_per_node or config.launch.gpus_per_node
    if given is not None:
        return given
    if config.run.device is Device.cpu:
        return 1
    return max(1, count_gpus(os.environ, Path("/dev")))


def world_size(config: RunConfig) -> int:
    """Ranks of the job."""
    return host_ranks(config) * config.launch.nodes


def job_folder(config: RunConfig) -> Path:
    """Where scripts, code and output of the launches of a run go: beside its folder, since
    `run.fresh=true` moves that away."""
    folder = Path(str(config.run.dir))
    return folder.with_name(f"{folder.name}.jobs")


def count_gpus(environment: Mapping[str, str], devices: Path) -> int:
    """GPUs that this process may use, without torch: what `CUDA_VISIBLE_DEVICES` leaves of the
    device files."""
    found = sum(re.fullmatch(r"nvidia\d+", path.name) is not None for path in devices.iterdir())
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return found
    return min(found, len([name for name in visible.split(",") if name.strip()]))


def rank_command(
    config: RunConfig, words: Sequence[str], *, ranks: int, launch: str, folder: Path
) -> list[str]:
    """The command line for the ranks of this host.

    One rank on one host is a plain process; more are torchrun's. On one host torchrun restarts
    nothing, since the launcher does and looks at `exit.json` first. Hosts of a job find each other
    at `launch.host`, and there torchrun restarts in place: a host that fails is waited for.

    Args:
        config: of the run.
        words: Hydra words, handed on as they are.
        ranks: of this host.
        launch: name of the launch, where hosts meet under.
        folder: for the output of all ranks but the first of a host.
    """
    options = config.launch
    python = options.python or sys.executable
    program = [str(REPOSITORY / "pretrain.py"), *words]
    if ranks == 1 and options.nodes == 1:
        return [python, "-u", *program]
    command = [python, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    if ranks > 1:
        quiet = ",".join(f"{rank}:3" for rank in range(1, ranks))
        command += ["--log-dir", str(folder), "--redirects", quiet]
    if options.nodes == 1:
        return [*command, "--standalone", *program]
    if options.host is None:
        raise ConfigError(
            "launch.host=null: must be given with launch.nodes > 1 (launch.host=HOST or HOST:PORT, "
            "the same on all hosts)"
        )
    host, _, port = options.host.partition(":")
    first = is_this_host(host, options.address)
    conf = f"is_host={int(first)},join_timeout=1800"
    command += ["--nnodes", str(options.nodes), "--rdzv-backend", "c10d", "--rdzv-conf", conf]
    command += ["--rdzv-endpoint", f"{host}:{port or PORT}", "--rdzv-id", launch]
    command += ["--max-restarts", str(options.node_restarts)]
    if options.address is not None:
        command += ["--local-addr", options.address]
    return [*command, *program]


def is_this_host(host: str, address: str | None) -> bool:
    """Whether a name or address is this host's, which then holds the store where hosts meet."""
    if host in {address, "localhost", "127.0.0.1", socket.gethostname(), socket.getfqdn()}:
        return True
    if address is not None:
        return False
    try:
        theirs = {info[4][0] for info in socket.getaddrinfo(host, None)}
        ours = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None)}
    except OSError:
        return False
    return bool(theirs & ours)


def rank_environment(environment: Mapping[str, str], *, launch: str) -> dict[str, str]:
    """What the ranks of a host are started with beside our own environment."""
    return {
        "OMP_NUM_THREADS": "1",  # as torchrun does, but it warns
        # Else one store serves all restarts, and a rank may read where another one listened before
        # it was started again (torch 2.13): hosts then take turns in failing to connect.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        **environment,
        "MEGATRON_EXT_LAUNCH": launch,
    }
