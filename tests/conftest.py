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


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the tables that tests recorded, also those that ran in a worker process."""
    for reports in terminalreporter.stats.values():
        for report in reports:
            called = getattr(report, "when", "") == "call"
            for name, text in report.user_properties if called else ():
                if name == "table":
                    terminalreporter.write_line(f"\n{report.nodeid}\n{text}")
