"""Runs `pretrain.py` commands in a fraction of the time: imports once, forks for every command.

Most of a short run is the import of torch and megatron-core. `Launcher` starts a server process
that has them imported and does nothing else; each command is a fork of it that calls
`pretrain.main`, with its own process group, working directory and environment, as a shell would.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

ROOT = Path(__file__).resolve().parents[2]
QUIET = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "WANDB_SILENT": "true"}
PAUSE = 0.01


class Run:
    """One command that was started; `output` is its file of standard output and error."""

    def __init__(self, launcher: Launcher, pid: int, output: Path) -> None:
        self._launcher, self.pid, self.output = launcher, pid, output
        self._code: int | None = None

    @property
    def text(self) -> str:
        return self.output.read_text()

    def wait(self) -> int:
        """Exit code; negative: the signal that ended it."""
        if self._code is None:
            self._code = self._launcher.request({"wait": self.pid})
        return self._code

    def signal_when(self, moment: Callable[[], bool], number: int) -> None:
        """Send a signal the first time that `moment` is true; nothing if the run has ended."""
        me = psutil.Process(self.pid)
        while not moment() and me.status() != psutil.STATUS_ZOMBIE:
            time.sleep(PAUSE)
        os.kill(self.pid, number)

    def kill_when(self, moment: Callable[[], bool], *, after: float, whole_group: bool) -> int:
        """SIGKILL `after` seconds past the first time that `moment` is true. Returns the code.

        Args:
            whole_group: kill the writer of an asynchronous save too, as a cluster does; else it
                outlives the run, as after the kernel's out-of-memory killer.
        """
        me = psutil.Process(self.pid)
        while not moment() and me.status() != psutil.STATUS_ZOMBIE:
            time.sleep(PAUSE)
        time.sleep(after)
        if whole_group:
            os.killpg(self.pid, signal.SIGKILL)
        else:
            os.kill(self.pid, signal.SIGKILL)
        return self.wait()


class Launcher:
    """Context manager around the server process."""

    def __enter__(self) -> Self:
        self._server = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.support.runs"],
            cwd=ROOT,
            env={**os.environ, **QUIET},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(timeout=60)

    def request(self, what: Mapping[str, Any]) -> int:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(what) + "\n")
        self._server.stdin.flush()
        return int(self._server.stdout.readline())

    def start(
        self,
        words: Sequence[str],
        *,
        output: Path,
        cwd: Path = ROOT,
        env: Mapping[str, str] | None = None,
        before: str = "",
    ) -> Run:
        """Start `python pretrain.py WORDS` and return at once.

        Args:
            before: `module:function:argument`, called in the command's process first.
        """
        command = {
            "words": list(words),
            "output": str(output),
            "cwd": str(cwd),
            "env": dict(env or {}),
            "before": before,
        }
        return Run(self, self.request(command), output)

    def start_ranks(
        self, words: Sequence[str], *, ranks: int, output: Path, before: str = ""
    ) -> list[Run]:
        """The ranks that torchrun would start, without torchrun, its seconds and its signals."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        common = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        return [
            self.start(
                words,
                output=output.with_suffix(f".{rank}"),
                env={
                    key: str(value)
                    for key, value in ({"RANK": rank, "LOCAL_RANK": rank} | common).items()
                },
                before=before,
            )
            for rank in range(ranks)
        ]


def torchrun(words: Sequence[str], *, ranks: int, output: Path) -> subprocess.Popen[bytes]:
    """Start the real thing over several ranks; `kill_tree` ends it."""
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), "pretrain.py", *words]
    with output.open("wb") as file:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **QUIET},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL for a process and everything it has started: torchrun gives ranks own groups.

    Nothing if the process has ended."""
    if process.poll() is not None:
        return
    family = psutil.Process(process.pid)
    # Stopped first, lest torchrun sees a dead rank before it is itself killed.
    family.suspend()
    for member in [*family.children(recursive=True), family]:
        member.kill()
    process.wait()


def _serve() -> None:
    """Read commands, one JSON object a line, and answer each with one number."""
    import importlib

    import pretrain

    importlib.import_module("megatron_ext.parallel.runtime").quiet()
    for module, _ in pretrain.COMMANDS.values():
        importlib.import_module(module)
    # Commands then neither look through what the imports left nor copy its pages.
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        what = json.loads(line)
        if "wait" in what:
            status = os.waitpid(what["wait"], 0)[1]
            print(os.waitstatus_to_exitcode(status), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            _become(what)
            code = 1
            try:
                if what["before"]:
                    module, function, argument = what["before"].split(":")
                    getattr(importlib.import_module(module), function)(argument)
                code = pretrain.main(what["words"])
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
            sys.exit(code)
        print(pid, flush=True)


def _become(what: dict[str, Any]) -> None:
    """Make the forked child look like a command that a shell has started."""
    os.setpgid(0, 0)
    os.chdir(what["cwd"])
    os.environ.update(what["env"])
    file = os.open(what["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (file, 1), (file, 2)):
        os.dup2(source, target)
    sys.argv = ["pretrain.py", *what["words"]]


if __name__ == "__main__":
    _serve()
