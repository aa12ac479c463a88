"""One run folder, one run: a second process is told so instead of writing into it."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from megatron_ext.errors import ConfigError
from megatron_ext.train.run_folder import hold


def test_a_folder_is_held_by_one_process_until_that_ends(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    held, end = context.Event(), context.Event()

    def other() -> None:
        hold(tmp_path)
        held.set()
        end.wait(60)

    process = context.Process(target=other)
    process.start()
    try:
        assert held.wait(60)
        with pytest.raises(ConfigError, match="another process is training in it"):
            hold(tmp_path, wait_seconds=0.3)
    finally:
        process.kill()
        process.join()
    hold(tmp_path, wait_seconds=0.0)
    hold(tmp_path, wait_seconds=0.0)  # again, by the same process
