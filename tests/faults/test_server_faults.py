"""Damaged connections and killed processes between client and server: misses, never wrong bytes, nothing leaked."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.chaos import ChaosProxy, Fault, Kind
from tests.faults.conftest import Tally
from tests.faults.writers import use_server, writing
from tests.servers import RunningServer, ServerProcess, running_server

from kvtide.clock import SystemClock
from kvtide.errors import CorruptPayload, TierUnavailable
from kvtide.testing.tier_suite import object_bytes, object_id
from kvtide.tier import Tier
from kvtide.tier.http.peer import Endpoint, Peer, PeerSettings
from kvtide.tier.http.tier import HttpTier
from kvtide.wire import parse_object
from kvtide_lab.bench.services import wait_until

SEED = 20260311
SIZE = 200_000
FAULTS = {
    Kind.DELAY: 4,
    Kind.RESET: 12,
    Kind.HALF_CLOSE: 6,
    Kind.TRICKLE: 2,
    Kind.FLIP: 60,
    Kind.TRUNCATE: 12,
    Kind.LENGTH: 6,
}
KILLS = 4


@pytest.fixture(params=["memory", "disk"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RunningServer]:
    url = "memory://" if request.param == "memory" else f"disk://{tmp_path}"
    with running_server(tiers=(url,)) as running:
        yield running


def verified(tier: Tier, number: int, size: int = SIZE) -> bytes | None:
    """Read an object as a consumer does: what fails a check is a miss."""
    buffer = bytearray(size + 1)
    try:
        came = tier.get_into(object_id(number), memoryview(buffer))
        if came is None:
            return None
        parse_object(memoryview(buffer)[:came], object_id(number)).sections()
    except (TierUnavailable, CorruptPayload):
        return None
    return bytes(buffer[:came])


def client(url: str, tries_max: int = 1, operation_s_max: float = 20.0) -> HttpTier:
    host, port = url.removeprefix("http://").split(":")
    settings = PeerSettings(tries_max=tries_max, faults_max=10**6)
    peers = [Peer(Endpoint(host, int(port)), [], settings, SystemClock(), time.sleep)]
    tier = HttpTier(peers, SystemClock(), operation_s_max)
    tier.open()
    return tier


@pytest.mark.parametrize("kind", FAULTS)
def test_damaged_answer_is_a_miss_or_right(server: RunningServer, kind: Kind, tally: Tally, fault_factor: int) -> None:
    rng = random.Random(SEED)
    direct = client(server.url)
    assert direct.put_from(object_id(1), object_bytes(1, SIZE))
    # The answer's head is some 200 bytes.
    reach = 200 if kind is Kind.LENGTH else SIZE + 200
    with ChaosProxy(
        (server.address.host, server.address.port), lambda: Fault(kind, True, rng.randrange(reach))
    ) as proxy:
        for _ in range(FAULTS[kind] * fault_factor):
            through = client(proxy.url, operation_s_max=1.0)
            found = verified(through, 1)
            tally.count(f"get {kind.value}", found not in (None, object_bytes(1, SIZE)), lost_committed=0)
            assert found in (None, object_bytes(1, SIZE))
            through.check()
            through.close()
        assert proxy.connections >= FAULTS[kind]
    assert verified(direct, 1) == object_bytes(1, SIZE)
    direct.close()


@pytest.mark.parametrize("kind", FAULTS)
def test_damaged_upload_is_stored_whole_or_not_at_all(
    server: RunningServer, kind: Kind, tally: Tally, fault_factor: int
) -> None:
    rng = random.Random(SEED)
    direct = client(server.url)
    reach = 200 if kind is Kind.LENGTH else SIZE + 200
    with ChaosProxy(
        (server.address.host, server.address.port), lambda: Fault(kind, False, rng.randrange(reach))
    ) as proxy:
        for number in range(FAULTS[kind] * fault_factor):
            through = client(proxy.url, operation_s_max=1.0)
            try:
                is_stored = through.put_from(object_id(number), object_bytes(number, SIZE))
            except TierUnavailable:
                is_stored = False
            found = verified(direct, number)
            tally.count(f"put {kind.value}", found not in (None, object_bytes(number, SIZE)), is_stored and not found)
            assert found in (None, object_bytes(number, SIZE))
            assert not is_stored or found
            through.check()
            through.close()
    direct.close()


def test_retries_get_through_a_bad_connection(server: RunningServer) -> None:
    faults = iter([Fault(Kind.RESET, True, 50_000), Fault(Kind.FLIP, False, 100_000), Fault(Kind.TRUNCATE, False, 9)])
    with ChaosProxy(
        (server.address.host, server.address.port), lambda: next(faults, Fault(Kind.NOTHING, True, 0))
    ) as proxy:
        tier = client(proxy.url, tries_max=4)
        assert tier.put_from(object_id(1), object_bytes(1, SIZE))
        assert verified(tier, 1) == object_bytes(1, SIZE)
        tier.close()


def test_killed_server_never_shows_a_partial_object(tmp_path: Path, tally: Tally, fault_factor: int) -> None:
    rng = random.Random(SEED)
    for _ in range(KILLS * fault_factor):
        server = ServerProcess("--tier", f"disk://{tmp_path}")
        tier = client(server.url)
        committed: list[int] = []

        def work(tier: HttpTier = tier, committed: list[int] = committed) -> None:
            try:
                for number in range(200):
                    if tier.put_from(object_id(number), object_bytes(number, SIZE)):
                        committed.append(number)
                    found = verified(tier, number)
                    assert found in (None, object_bytes(number, SIZE))
            except TierUnavailable:
                return

        worker = threading.Thread(target=work)
        worker.start()
        time.sleep(rng.uniform(0.0, 0.3))
        server.kill()
        worker.join()
        tier.check()
        tier.close()
        again = ServerProcess("--tier", f"disk://{tmp_path}")
        reader = client(again.url)
        found = {number: verified(reader, number) for number in range(200)}
        wrong = sum(data not in (None, object_bytes(number, SIZE)) for number, data in found.items())
        lost = sum(found[number] is None for number in committed)
        tally.count("kill server", wrong, lost)
        assert wrong == lost == 0
        for number in range(200):
            reader.delete(object_id(number), "removed")
        reader.close()
        assert again.terminate() == 0


def check_when_settled(server: RunningServer) -> None:
    """Check that nothing is lent. A connection of a killed client may not even have been accepted yet."""

    def is_settled() -> bool:
        try:
            server.service.check()
        except AssertionError:
            return False
        return server.service.connections <= 1

    wait_until(is_settled, "what the client had to be given back")


def test_killed_client_leaves_no_buffer_slot_or_socket(server: RunningServer, tally: Tally, fault_factor: int) -> None:
    rng = random.Random(SEED)
    direct = client(server.url)
    for _ in range(KILLS * fault_factor):
        with writing(use_server, server.url):
            time.sleep(rng.uniform(0.0, 0.2))
        check_when_settled(server)
        found = {number: verified(direct, number, 900_000) for number in range(8)}
        wrong = sum(data not in (None, object_bytes(number, 900_000)) for number, data in found.items())
        tally.count("kill client", wrong, lost_committed=0)
        assert wrong == 0
    direct.close()


def test_stale_pooled_connection_is_no_fault(tmp_path: Path) -> None:
    first = ServerProcess("--tier", f"disk://{tmp_path}")
    tier = client(first.url)
    assert tier.put_from(object_id(1), object_bytes(1))
    assert first.terminate() == 0
    again = ServerProcess("--tier", f"disk://{tmp_path}", port=first.port)
    assert verified(tier, 1) == object_bytes(1)
    tier.close()
    assert again.terminate() == 0


def test_server_that_is_down_opens_the_breaker_and_is_found_again(tmp_path: Path) -> None:
    first = ServerProcess("--tier", f"disk://{tmp_path}")
    settings = PeerSettings(tries_max=1, faults_max=2, open_s=0.2)
    peer = Peer(Endpoint("127.0.0.1", first.port), [], settings, SystemClock(), time.sleep)
    tier = HttpTier([peer], SystemClock())
    tier.open()
    assert tier.put_from(object_id(1), object_bytes(1))
    first.kill()
    for _ in range(3):
        with pytest.raises(TierUnavailable):
            tier.contains(object_id(1))
    assert peer.breaker.is_open
    again = ServerProcess("--tier", f"disk://{tmp_path}", port=first.port)
    time.sleep(0.25)
    assert verified(tier, 1) == object_bytes(1)
    assert not peer.breaker.is_open
    tier.close()
    again.terminate()
