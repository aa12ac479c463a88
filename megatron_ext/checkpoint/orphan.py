"""Helper processes that end with the run. No torch here."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

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
