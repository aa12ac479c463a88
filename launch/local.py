"""Start the ranks of this host, pass on requests to stop, and start them again after a crash or a
hang. `launch/local.sh` is the command; docs/launching.md says more.

`run.fresh=true` holds for the first start only, and what a person stopped stays stopped.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import psutil

from launch.command import (
    host_ranks,
    is_this_host,
    job_folder,
    rank_command,
    rank_environment,
    world_size,
)
from launch.ending import EXIT, judge
from megatron_ext.config.compose import compose
from megatron_ext.config.schema import Mode, RunConfig
from megatron_ext.errors import ConfigError

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
PAUSE_SECONDS = 0.1


class Child:
    """The process that the ranks of this host are children of, or that is the only rank.

    It has a session of its own, so that Ctrl-C reaches the launcher alone, which asks the ranks to
    save. torchrun is not asked: it would give them 30 seconds.
    """

    def __init__(self, command: Sequence[str], environment: dict[str, str], *, alone: bool) -> None:
        self._alone = alone
        self._asked_at: float | None = None
        self._process = subprocess.Popen(command, env=environment, start_new_session=True)

    def ask(self) -> None:
        """Ask every rank to save and stop."""
        self._asked_at = self._asked_at or time.monotonic()
        for rank in self._ranks():
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.send_signal(signal.SIGUSR1)

    def kill(self) -> None:
        """End everything at once."""
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(self._process.pid)
            family = [*parent.children(recursive=True), parent]
            for member in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()

    def wait(self, *, stop_seconds: float) -> int:
        """The exit code; ranks that were asked to stop and do not are killed."""
        while (code := self._process.poll()) is None:
            time.sleep(PAUSE_SECONDS)
            if self._asked_at and time.monotonic() - self._asked_at > stop_seconds:
                print(f"launch: not stopped after {stop_seconds:g} s, killed", file=sys.stderr)
                self.kill()
                self._asked_at = None
        return code

    def _ranks(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self._process.pid)
            return [process] if self._alone else process.children()
        return []


class Launcher:
    """One launch on one host: a loop of starts, until an ending that stays.

    Args:
        config: of the run.
        words: Hydra words, handed on as they are.
    """

    def __init__(self, config: RunConfig, words: Sequence[str]) -> None:
        options = config.launch
        self._config = config
        self._folder = Path(str(config.run.dir))
        self._launch = options.id or (
            config.run.name if options.nodes > 1 else f"{config.run.name}-{secrets.token_hex(4)}"
        )
        self._ranks = host_ranks(config)
        self._command = rank_command(
            config,
            words,
            ranks=self._ranks,
            launch=self._launch,
            # Beside the run folder, which `run.fresh=true` moves away.
            folder=job_folder(config) / self._launch,
        )
        self._child: Child | None = None
        self._asked = 0

    def run(self) -> int:
        """Returns the exit code of the run."""
        options = self._config.launch
        first = options.nodes == 1 or is_this_host(
            str(options.host).partition(":")[0], options.address
        )
        alone = self._ranks == 1 and options.nodes == 1
        environment = rank_environment(os.environ, launch=self._launch)
        for number in SIGNALS:
            signal.signal(number, self._note)
        if first:
            # Of an earlier launch; the run removes it too, but may not come so far. Not before a
            # restart: the launchers of other hosts may not have read yet how this start ended.
            (self._folder / EXIT).unlink(missing_ok=True)
        while True:
            self._child = Child(self._command, environment, alone=alone)
            code = self._child.wait(stop_seconds=options.stop_seconds)
            if self._config.run.mode is not Mode.train:
                return code
            if not self._folder.is_dir():
                return code or 1  # it could not even be made
            verdict = judge(
                self._folder,
                launch=self._launch,
                asked=self._asked > 0,
                resume=False,
                limit=options.stalled_restarts,
                host=os.uname().nodename if options.nodes > 1 else "",
            )
            if verdict.code or verdict.again:
                print(f"launch: {verdict.why}", file=sys.stderr, flush=True)
            if not verdict.again:
                return verdict.code

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._asked += 1
        if self._child is None:
            return
        if number == signal.SIGINT and self._asked > 1:
            self._child.kill()
        else:
            self._child.ask()


def main(words: Sequence[str]) -> int:
    """The command `launch/local.sh`. Returns the exit code of `megatron_ext.errors`."""
    try:
        config = compose(words, world_size=world_size)
        if config.launch.nodes > 1 and config.run.fresh and config.launch.id is None:
            raise ConfigError(
                "run.fresh=true: with launch.nodes > 1 needs launch.id=NAME, a new name each time "
                "and the same on all hosts, to tell a restart from a new launch"
            )
        launcher = Launcher(config, words)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return launcher.run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
