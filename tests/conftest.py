"""Fixtures of the whole suite."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.runs import Launcher


@pytest.fixture(scope="session")
def launcher() -> Iterator[Launcher]:
    """Starts commands without the seconds of their imports; each is a process of its own."""
    with Launcher() as server:
        yield server
