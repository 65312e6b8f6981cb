"""Liveness and readiness on a port of their own, and a shutdown that balancers can follow."""

import json
import socket
import threading
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from tests.server.worlds import Place
from tests.server.worlds import ask as ask_world
from tests.servers import RunningServer, ServerProcess, running_server

from kvtide.server.settings import ListenAddress, ServerLimits
from kvtide.tier.pool import Member
from kvtide.tier.pool.membership import FileMembership
from kvtide.tier.pool.placement import PoolServer
from kvtide_lab.bench.services import free_ports, wait_until

HEALTH = "127.0.0.1:0"


def ask(port: int, path: str) -> tuple[int, Any]:
    answer, body = ask_world(Place(ListenAddress("127.0.0.1", port)), "GET", path)
    return answer.status, json.loads(body)


def is_ready(server: RunningServer) -> tuple[int, Any]:
    return ask(server.service.health_port, "/readyz")


def test_health_answers_when_every_connection_is_taken() -> None:
    limits = ServerLimits(connections_max=2, tenant_connections_max=1)
    with running_server(health=HEALTH, limits=limits) as server:
        crowd = [server.connect() for _ in range(4)]
        assert ask(server.service.health_port, "/livez") == (200, {"is_alive": True})
        parts = {"is_ready": True, "is_draining": False, "parts": {"tier memory": True}}
        assert is_ready(server) == (200, parts)
        assert ask(server.service.health_port, "/metrics")[0] == 404
        for each in crowd:
            each.close()


def test_tier_that_cannot_be_opened_or_does_not_answer_is_named(tmp_path: Path) -> None:
    silent = socket.create_server(("127.0.0.1", 0))
    tiers = ("memory://", f"disk://{tmp_path}", f"http://127.0.0.1:{silent.getsockname()[1]}")
    with running_server(health=HEALTH, tiers=tiers) as server:
        # As if the disk had not been there at the start.
        server.store._open = [each for each in server.store._open if each.label != "disk"]
        status, found = is_ready(server)
        assert (status, found["parts"]) == (503, {"tier memory": False, "tier disk": False, "tier http": False})
        assert ask(server.service.health_port, "/livez")[0] == 200
        silent.close()
        wait_until(lambda: is_ready(server)[1]["parts"]["tier memory"], "the tiers that do answer")
        assert is_ready(server)[1]["parts"] == {"tier memory": True, "tier disk": False, "tier http": False}


def test_region_is_ready_when_its_centre_is_known(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    central = f"http://127.0.0.1:{port}"
    with running_server(health=HEALTH, central=central, manifest=tmp_path / "manifest") as region:
        status, found = is_ready(region)
        assert (status, found["parts"]["centre"]) == (503, False)
        centre = ServerProcess(port=port)
        wait_until(lambda: is_ready(region)[0] == 200, "the centre")
        assert centre.terminate() == 0
        # What was known stays known: the region goes on with it.
        assert is_ready(region)[0] == 200


def test_server_of_a_pool_is_ready_when_it_has_the_map(tmp_path: Path) -> None:
    member = Member(PoolServer("a", "unused:1"), FileMembership(tmp_path / "pool.json"))
    with running_server(member, health=HEALTH) as server:
        assert is_ready(server)[1]["parts"] == {"tier memory": True, "pool": False}


def test_silent_and_greedy_health_checks_keep_nobody_out() -> None:
    with running_server(health=HEALTH) as server:
        crowd = [socket.create_connection(("127.0.0.1", server.service.health_port), 10) for _ in range(100)]
        crowd[0].sendall(b"x" * 20_000)
        assert ask(server.service.health_port, "/livez")[0] == 200
        for each in crowd:
            each.close()


def test_shutdown_says_not_ready_while_requests_are_still_taken() -> None:
    with running_server(health=HEALTH, drain_delay_s=2.0) as server:
        stopping = threading.Thread(target=server.stop)
        stopping.start()
        wait_until(lambda: is_ready(server)[0] == 503, "the end")
        assert is_ready(server)[1]["is_draining"]
        assert [ask(server.service.health_port, path)[0] for path in ("/healthz", "/livez")] == [503, 200]
        # New connections, and more than one request on each.
        connection = HTTPConnection("127.0.0.1", server.address.port, timeout=20)
        for path, status in (("/metrics", 200), ("/healthz", 503), ("/metrics", 200)):
            connection.request("GET", path)
            answer = connection.getresponse()
            answer.read()
            assert answer.status == status
        connection.close()
        stopping.join(20)
        assert not stopping.is_alive()
