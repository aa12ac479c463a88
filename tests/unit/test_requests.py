"""Request files in the run folder: whose they are, and that none is lost between two stages."""

from __future__ import annotations

from pathlib import Path

from megatron_ext.resilience.requests import STOP_FILE, Request, Requests


def test_files_of_an_earlier_launch_are_removed_and_later_ones_are_seen(tmp_path: Path) -> None:
    (tmp_path / "stop").touch()
    (tmp_path / "save").touch()
    with Requests() as requests:
        requests.watch(tmp_path)
        assert requests.pending() == Request(stop=0, save=0)
        (tmp_path / "stop").touch()
        assert requests.pending() == Request(stop=STOP_FILE, save=0)


def test_a_file_that_comes_between_two_stages_of_one_run_is_obeyed(tmp_path: Path) -> None:
    with Requests() as requests:
        requests.watch(tmp_path)
        (tmp_path / "stop").touch()
        requests.watch(tmp_path)  # the next stage begins
        assert requests.pending().stop == STOP_FILE
