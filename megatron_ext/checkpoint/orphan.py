"""Helper processes of a save: they end with the run, and not before it. No torch here."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from multiprocessing import resource_tracker

_PR_SET_PDEATHSIG = 1  # from <sys/prctl.h>


def end_with_parent() -> bool:
    """Let the kernel kill this process when its parent dies.

    Saving starts one helper process a rank (megatron-core's queue of write results), which imports
    the script that was started under the name `__mp_main__`. When the run is killed by SIGKILL, the
    helper would stay, with 0.5 GB, and hold the terminal's pipe. So a script that saves says

        if __name__ == "__mp_main__":
            end_with_parent()

    Returns:
        Whether the system can do it (Linux only).
    """
    if not sys.platform.startswith("linux"):
        return False
    parent = os.getppid()
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        return False
    if os.getppid() != parent:  # it died just before
        os._exit(1)
    return True


@contextlib.contextmanager
def helpers_shielded() -> Iterator[None]:
    """Processes started here never see the signals that ask a run to stop.

    SLURM and torchrun signal every process of a job, and a new one dies of them by default: the
    helper, and with it the save that the signal asked for. What is blocked here stays blocked in
    it; this process gets what came meanwhile at the end of the block.
    """
    # Its start, which comes with that of the first helper, would lift the block.
    resource_tracker.ensure_running()
    blocked = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
