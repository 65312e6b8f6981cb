"""Two regions and a centre over links of 100 Mbit/s: what one stores is found from the other; a cut is survived."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path

import pytest
from tests.faults.conftest import Tally
from tests.faults.hosts import Host, network_hosts

from kvtide.bench.services import free_ports, wait_until
from kvtide.testing.tier_suite import object_bytes, object_id

PORT = 7421
MBIT_S = 100
OBJECTS = 20
OBJECT_BYTES = 500_000
CHAT = "/v1/records/alias/chat"
GENERATION = f"/v1/records/generation/{object_id(0).namespace.hex()}"


class Regions:
    """A centre of ours, and a server on each host. Cables are shaped."""

    def __init__(self, hosts: list[Host], folder: Path, stack: ExitStack) -> None:
        self.hosts = hosts
        self.port = free_ports(1)[0]
        regions = [word for host in hosts for word in ("--region", f"http://{host.address}:{PORT}")]
        self._start(stack, folder / "centre.log", [], "--listen", f"0.0.0.0:{self.port}", *regions)
        for number, host in enumerate(hosts):
            host.shape(MBIT_S)
            place = ["--listen", f"{host.address}:{PORT}", "--central", f"http://{host.gateway}:{self.port}"]
            manifest = ["--manifest", str(folder / f"manifest-{number}")]
            self._start(stack, folder / f"region-{number}.log", host.command(), *place, *manifest)
        for address, port in [("127.0.0.1", self.port), *((host.address, PORT) for host in hosts)]:
            wait_until(lambda place=(address, port): _is_up(*place), f"{address}:{port}", 60)  # type: ignore[misc]

    def _start(self, stack: ExitStack, path: Path, prefix: list[str], *words: str) -> None:
        command = [
            "setpriv",
            "--pdeathsig",
            "KILL",
            *prefix,
            sys.executable,
            "-m",
            "kvtide.cli",
            "serve",
            "--open-to-all",
        ]
        log = stack.enter_context(path.open("wb"))
        process = subprocess.Popen([*command, "--tier", "memory://", *words], stdout=log, stderr=subprocess.STDOUT)
        stack.callback(process.wait)
        stack.callback(process.kill)

    def ask(
        self, region: int, method: str, what: int | str, body: bytes | None = None, **headers: str
    ) -> tuple[HTTPResponse, bytes]:
        return _ask(self.hosts[region].address, PORT, method, what, body, **headers)

    def sent_bytes(self, region: int) -> int:
        """Return how many bytes a host's cable has taken from it so far."""
        words = self.hosts[region].command("cat", "/sys/class/net/eth0/statistics/tx_bytes")
        return int(subprocess.run(words, check=True, capture_output=True).stdout)


def _ask(
    host: str, port: int, method: str, what: int | str, body: bytes | None = None, **headers: str
) -> tuple[HTTPResponse, bytes]:
    name = object_id(what) if isinstance(what, int) else None
    path = f"/v1/{name.namespace.hex()}/{name.key.hex()}" if name else str(what)
    connection = HTTPConnection(host, port, timeout=30)
    try:
        names = {f"Kvtide-{key.replace('_', '-')}": value for key, value in headers.items()}
        connection.request(method, path, body, names)
        answer = connection.getresponse()
        return answer, answer.read()
    finally:
        connection.close()


def _is_up(host: str, port: int) -> bool:
    try:
        return _ask(host, port, "GET", 10**9)[0].status in {404, 503}
    except OSError:
        return False


@pytest.fixture(scope="module")
def regions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Regions]:
    with ExitStack() as stack:
        hosts = list(stack.enter_context(network_hosts(2)))
        yield Regions(hosts, tmp_path_factory.mktemp("regions"), stack)


def test_other_region_finds_the_latest_at_once(regions: Regions, tally: Tally) -> None:
    started = regions.sent_bytes(0)
    for number in range(OBJECTS):
        assert regions.ask(0, "PUT", number, object_bytes(number, OBJECT_BYTES))[0].status == 201
    last = OBJECTS - 1
    answer, content = regions.ask(1, "GET", last, Force_Latest="1")
    wrong = int(answer.status != 200 or content != object_bytes(last, OBJECT_BYTES))
    centre = ("127.0.0.1", regions.port)
    wait_until(lambda: all(_ask(*centre, "HEAD", n)[0].status == 200 for n in range(OBJECTS)), "the centre", 30)
    ratio = (regions.sent_bytes(0) - started) / (OBJECTS * OBJECT_BYTES)
    for number in range(OBJECTS):
        wrong += regions.ask(1, "GET", number)[1] != object_bytes(number, OBJECT_BYTES)
    tally.count("regions", wrong, 0)
    tally.note("regions: bytes on the cable per new byte", ratio)
    assert wrong == 0
    assert ratio <= 1.1, "heads, acknowledgements and the one object that was fetched early included"


def test_other_region_sees_the_latest_record_and_invalidation(regions: Regions, tally: Tally) -> None:
    wrong = 0
    for value in (letter * 64 for letter in "abcdef"):
        assert regions.ask(0, "PUT", CHAT, value.encode())[0].status == 200
        wrong += regions.ask(1, "GET", CHAT, Force_Latest="1")[1].strip().decode() != value
    assert regions.ask(0, "PUT", 50, object_bytes(50, OBJECT_BYTES))[0].status == 201
    assert regions.ask(1, "GET", 50, Force_Latest="1")[0].status == 200
    assert regions.ask(0, "PUT", GENERATION, b"1")[0].status == 200
    wrong += regions.ask(0, "GET", 50)[0].status != 404
    wrong += regions.ask(1, "GET", 50, Force_Latest="1")[0].status != 404
    wrong += regions.ask(1, "GET", 50)[0].status != 404
    tally.count("regions: records", wrong, 0)
    assert wrong == 0


def test_region_without_its_centre_is_honest(regions: Regions, tally: Tally) -> None:
    data = object_bytes(100, OBJECT_BYTES)
    assert regions.ask(0, "PUT", 100, data)[0].status == 201
    host = regions.hosts[0]
    # Only the centre is out of reach: its port is where the region connects to.
    rule = f"tcp dport {regions.port} drop"
    subprocess.run(host.command("nft", "add", "table", "inet", "cut"), check=True)
    subprocess.run(
        host.command("nft", "add", "chain", "inet", "cut", "output", "{ type filter hook output priority 0; }"),
        check=True,
    )
    subprocess.run(host.command("nft", "add", "rule", "inet", "cut", "output", *rule.split()), check=True)
    try:
        cut_s = time.time()
        assert _ask("127.0.0.1", regions.port, "PUT", GENERATION, b"2")[0].status == 200
        time.sleep(1)
        answer, content = regions.ask(0, "GET", 100)
        assert (answer.status, content) == (200, data)
        assert float(answer.getheader("Kvtide-As-Of") or "inf") <= cut_s
        forced, reason = regions.ask(0, "GET", 101, Force_Latest="1")
        assert forced.status == 503 and b"can't be had" in reason
        assert regions.ask(0, "GET", 100, Force_Latest="1")[0].status == 503, "it may have been invalidated"
        assert regions.ask(0, "GET", 100, Max_Staleness="0.5")[0].status == 503
        written, reason = regions.ask(0, "PUT", CHAT, b"f" * 64)
        assert written.status == 503 and b"can't be asked" in reason
    finally:
        host.heal()
    wait_until(lambda: regions.ask(0, "GET", 101, Force_Latest="1")[0].status == 404, "the cable to heal", 30)
    assert regions.ask(0, "GET", 100)[0].status == 404, "invalidated meanwhile"
    assert float(regions.ask(0, "GET", 100)[0].getheader("Kvtide-As-Of") or 0) > cut_s
    tally.count("regions cut off", 0, 0)
