"""Fixtures of the doors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest
from tests.doors.page import summary

if TYPE_CHECKING:
    from tests.doors.user import Regions


@pytest.fixture(scope="session")
def regions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Regions]:
    # Here, as the lane without torch imports this file too.
    from tests.doors.user import Regions, serving, status
    from tests.server.worlds import put

    from kvtide_lab.bench.services import free_ports, wait_until

    ports = free_ports(3)
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    folders = [tmp_path_factory.mktemp(name) for name in ("centre", "quick", "slow")]
    settings = [f'regions = ["{urls[1]}", "{urls[2]}"]', "", "sync_bytes_s_max = 1"]
    flags = [[], *(["--central", urls[0], "--manifest", str(folder / "manifest")] for folder in folders[1:])]
    with ExitStack() as stack:
        places = zip(folders, settings, flags, ports, strict=True)
        made = Regions(*(stack.enter_context(serving(f, s, *words, port=port)) for f, s, words, port in places))
        # A first object goes at once, whatever the rate.
        put(made.slow, 0)
        wait_until(lambda: status(made.centre, "GET", 0, Local="1") == 200, "the first object to be synchronised")
        # A centre that has just begun answers 503, and a region leaves alone for two seconds who fails five times.
        wait_until(
            lambda: all(status(each, "GET", 0, Force_Latest="1") == 200 for each in made[1:]),
            "the regions to reach the centre",
        )
        yield made


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say at the end of a run that had doors how many are left."""
    terminalreporter.write_line(summary())
