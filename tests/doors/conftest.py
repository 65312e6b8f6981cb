"""Fixtures of the doors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from tests.doors.page import summary

if TYPE_CHECKING:
    from tests.doors.user import Regions


@pytest.fixture(scope="session")
def regions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Regions]:
    # Here, as the lane without torch imports this file too.
    from tests.doors.user import Regions, status
    from tests.server.worlds import put, region_processes

    from kvtide_lab.bench.services import wait_until

    folder = tmp_path_factory.mktemp("regions")
    (folder / "kvtide.toml").write_text("sync_bytes_s_max = 1")
    with region_processes(folder, "--config", str(folder / "kvtide.toml")) as servers:
        made = Regions(*servers)
        # A first object goes at once, whatever the rate.
        put(made.slow, 0)
        wait_until(lambda: status(made.centre, "GET", 0, Local="1") == 200, "the first object to be synchronised")
        yield made


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say at the end of a run that had doors how many are left."""
    terminalreporter.write_line(summary())
