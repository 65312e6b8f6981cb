"""Fixtures of the doors."""

import pytest
from tests.doors.page import summary


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say at the end of a run that had doors how many are left."""
    terminalreporter.write_line(summary())
