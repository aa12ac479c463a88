"""A whole SLURM on this machine, for as long as a test: its own munge, controller and one host.

Nothing of it is installed or started by the system: every file is in one folder, every port free.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

COMMANDS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue")
CONFIGURATION = """
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmUser=root
SlurmctldPort={controller}
SlurmdPort={host}
AuthType=auth/munge
CredType=cred/munge
# A job that is put back waits for its old credential to expire: 121 s by default.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
SlurmdParameters=config_overrides
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
KillWait=30
SchedulerParameters=sched_min_interval=100000,batch_sched_delay=1
NodeName=localhost NodeAddr=127.0.0.1 CPUs=4 State=UNKNOWN
PartitionName=all Nodes=localhost Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Why there can be no SLURM here; empty if there can."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    absent = [name for name in COMMANDS if shutil.which(name, path=path) is None]
    if absent:
        return f"SLURM is not installed: {', '.join(absent)} missing (apt install slurm-wlm munge)"
    if os.geteuid() != 0:
        return "the daemons of SLURM are started as root"
    return ""


class Cluster:
    """Runs SLURM's commands against the cluster of this test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {
            **os.environ,
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin",
        }

    def __call__(self, *words: str) -> str:
        """Standard output of a command."""
        done = subprocess.run(
            words, env=self.environment, capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """What `scontrol show job` says, by key."""
        text = self("scontrol", "show", "job", number, "--oneliner")
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def wait(self, number: str, *states: str, seconds: float = 240) -> dict[str, str]:
        """Wait until the job is in one of the states."""
        end = time.monotonic() + seconds
        while (job := self.job(number))["JobState"] not in states:
            assert time.monotonic() < end, f"{job['JobState']}, not {states}"
            time.sleep(0.2)
        return job


@contextmanager
def slurm(folder: Path) -> Iterator[Cluster]:
    """Start the daemons, wait until the host is idle, and end them afterwards."""
    folder.mkdir()
    for name in ("state", "spool"):
        (folder / name).mkdir()
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o400)
    ports = {"controller": _free_port(), "host": _free_port()}
    text = CONFIGURATION.format(folder=folder, **ports)
    (folder / "slurm.conf").write_text(text)
    cluster = Cluster(folder)
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        files = {"key": "munge.key", "socket": "munge.socket", "pid": "munge.pid"}
        words = [f"--{key}-file={folder / name}" for key, name in files.items() if key != "socket"]
        words += [f"--socket={folder / 'munge.socket'}", f"--log-file={folder / 'munge.log'}"]
        words += [f"--seed-file={folder / 'munge.seed'}"]
        # The folders above are anybody's, which munge dislikes.
        daemons.append(_start(cluster, ["munged", "--foreground", "--force", *words]))
        _until(lambda: (folder / "munge.socket").exists(), daemons)
        daemons.append(_start(cluster, ["slurmctld", "-D", "-i"]))
        daemons.append(_start(cluster, ["slurmd", "-D", "-N", "localhost"]))
        _until(lambda: _state(cluster).startswith("idle"), daemons)
        yield cluster
    finally:
        if len(daemons) > 2:
            subprocess.run(["scancel", "--user=root"], env=cluster.environment, check=False)
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            try:
                daemon.wait(timeout=20)
            except subprocess.TimeoutExpired:
                daemon.kill()


def _state(cluster: Cluster) -> str:
    done = subprocess.run(
        ["sinfo", "--noheader", "--format=%T"],
        env=cluster.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip()


def _start(cluster: Cluster, words: Sequence[str]) -> subprocess.Popen[bytes]:
    with (cluster.folder / f"{words[0]}.out").open("wb") as file:
        return subprocess.Popen(
            words, env=cluster.environment, stdout=file, stderr=subprocess.STDOUT
        )


def _until(moment: object, daemons: Sequence[subprocess.Popen[bytes]]) -> None:
    end = time.monotonic() + 60
    while not moment():  # type: ignore[operator]
        dead = [daemon.args for daemon in daemons if daemon.poll() is not None]
        assert not dead, f"ended at once: {dead}"
        assert time.monotonic() < end, "SLURM does not come up"
        time.sleep(0.1)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
