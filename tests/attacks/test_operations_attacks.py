"""What an operator needs while clients, files and disks are not on his side: real servers over loopback."""

from __future__ import annotations

import json
import threading
from http.client import HTTPConnection
from typing import Any

import pytest
from tests.servers import RunningServer, running_server

from kvtide.bench.services import wait_until
from kvtide.server.doors import address_of
from kvtide.server.scheduler import SchedulerSettings
from kvtide.testing.tier_suite import object_bytes, object_id


def connect(server: RunningServer, address: str = "127.0.0.1") -> HTTPConnection:
    """Connect as a client of another address would."""
    return HTTPConnection(server.address.host, server.address.port, timeout=30, source_address=(address, 0))


def status_of(server: RunningServer) -> Any:
    """Return the server's status, as JSON says it."""
    connection = connect(server)
    connection.request("GET", "/v1/status")
    status = json.loads(connection.getresponse().read())
    connection.close()
    return status


def path_of(number: int) -> str:
    name = object_id(number)
    return f"/v1/{name.namespace.hex()}/{name.key.hex()}"


@pytest.mark.parametrize("policy", ["lottery", "vtc"])
def test_small_object_passes_many_large_ones_of_another_address_on_an_open_server(policy: str) -> None:
    # 20 MiB at 12 MB/s by one slot; drawn by addresses the small one waits for a few, with one queue for all 20.
    sending = SchedulerSettings(policy=policy, slots=1, tenant_slots_max=1, link_bits_s=1e8)
    finished: list[str] = []

    def read(server: RunningServer, number: int, address: str) -> None:
        connection = connect(server, address)
        connection.request("GET", path_of(number))
        assert len(connection.getresponse().read()) > 0
        finished.append(address)
        connection.close()

    with running_server(sending=sending) as server:
        connection = connect(server)
        for number, size in ((1, 1 << 20), (2, 50_000)):
            connection.request("PUT", path_of(number), object_bytes(number, size))
            assert connection.getresponse().read() == b""
        connection.close()
        greedy = [threading.Thread(target=read, args=(server, 1, "127.0.0.2")) for _ in range(20)]
        for thread in greedy:
            thread.start()
        wait_until(lambda: sum(each["waiting_sends"] for each in status_of(server)["tenants"]) >= 15, "bodies")
        read(server, 2, "127.0.0.3")
        for thread in greedy:
            thread.join(30)
    assert len(finished) == 21
    assert finished.index("127.0.0.3") < 18


def test_accounts_of_addresses_are_those_that_tell_clients_apart() -> None:
    # A listener on `::` sees IPv4 clients in IPv6 clothes: one account for all of them would be nobody's share.
    assert [address_of((host, 1)) for host in ("::ffff:10.0.0.1", "10.0.0.1", "2001:db8::5:1", "2001:db8::6:1")] == [
        "@10.0.0.1",
        "@10.0.0.1",
        "@2001:db8::",
        "@2001:db8::",
    ]
    assert address_of("") == "@unix"
