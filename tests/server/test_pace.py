"""The rate at which the server fills its link."""

from __future__ import annotations

import threading
import time

from tests.server.worlds import ask
from tests.servers import running_server

from kvtide.server.scheduler import SchedulerSettings
from kvtide.testing.tier_suite import object_bytes


def test_body_goes_on_when_the_link_has_room_again() -> None:
    # Twenty slices of 50 kB at 2.5 MB/s: 0.4 s, two slices of which are granted ahead. Nothing else wakes the server.
    sending = SchedulerSettings(slice_bytes=50_000, link_bits_s=2e7)
    with running_server(sending=sending) as server:
        data = object_bytes(1, 1_000_000)
        assert ask(server, "PUT", 1, data)[0].status == 201
        started_s = time.monotonic()
        answer, content = ask(server, "GET", 1)
        took_s = time.monotonic() - started_s
    assert (answer.status, content) == (200, data)
    assert took_s >= 0.3


def test_clients_of_a_slow_link_all_get_their_bodies() -> None:
    sending = SchedulerSettings(slots=2, slice_bytes=20_000, link_bits_s=2e7)
    got: list[bool] = []
    with running_server(sending=sending) as server:
        data = object_bytes(1, 200_000)
        assert ask(server, "PUT", 1, data)[0].status == 201

        def asking() -> None:
            got.append(ask(server, "GET", 1)[1] == data)

        threads = [threading.Thread(target=asking) for _ in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert got == [True] * 5
