"""A helper of a save does not see the signals that ask the run to stop."""

from __future__ import annotations

import subprocess
import sys

# In a process of its own: the block must hold for the first helper that a process ever starts.
SCRIPT = """
import multiprocessing, signal
from megatron_ext.checkpoint.orphan import helpers_shielded

with helpers_shielded():
    pool = multiprocessing.get_context("spawn").Pool(1)
blocked = pool.apply(signal.pthread_sigmask, (signal.SIG_BLOCK, ()))
print(*sorted(signal.Signals(number).name for number in blocked))
print(*signal.pthread_sigmask(signal.SIG_BLOCK, ()))
pool.close()
pool.join()
"""


def test_the_first_helper_is_shielded() -> None:
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.stdout.splitlines() == ["SIGINT SIGTERM SIGUSR1", ""], result.stderr
