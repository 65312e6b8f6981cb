"""Requests without pause: each owner gets its turns, whoever else asks how often."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from tests.attacks.floods import GRANTS, ask, flood, head
from tests.server.worlds import path_of
from tests.servers import running_server

from kvtide.testing.tier_suite import object_bytes

OBJECT = path_of(1)


@pytest.mark.parametrize("path", ["/v1", "/healthz", "/v1/nothing"])
def test_requests_without_pause_leave_the_others_their_turns(path: str) -> None:
    with running_server(grants=GRANTS) as server:
        assert ask(server, "PUT", OBJECT, body=object_bytes(1))[0].status == 201
        with flood(server, head("GET", path)):
            for _ in range(3):
                assert ask(server, "GET", OBJECT)[1] == object_bytes(1)


def test_server_ends_while_somebody_asks_without_pause(tmp_path: Path) -> None:
    with running_server(grants=GRANTS) as server, flood(server, head("GET", "/v1")):
        stopping = threading.Thread(target=server.stop)
        stopping.start()
        stopping.join(15)
        assert not stopping.is_alive()
