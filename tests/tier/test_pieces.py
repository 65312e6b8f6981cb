"""Objects sent section by section: base first, resumed after any fault, given up in time."""

import math
import random
import socket
import socketserver
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.chaos import ChaosProxy, Fault, Kind
from tests.pieces import Pieces, pieces
from tests.server.worlds import World, ask, metric
from tests.servers import RunningServer, listening, running_server, tier_on
from tests.store.load.sources import made_objects
from tests.stores import opened
from tests.suites.tier_suite import TIER_BYTES, TierSuite, object_bytes, object_id

from kvtide.clock import ManualClock, SystemClock
from kvtide.errors import CorruptPayload, RequestRefused, TierFull, TierUnavailable
from kvtide.server.objects import Uploads
from kvtide.server.settings import ServerLimits
from kvtide.tier import Tier
from kvtide.tier.base import Buffer
from kvtide.tier.breaker import until
from kvtide.tier.http import http_tier
from kvtide.tier.http.peer import Call, HttpAnswer
from kvtide.tier.http.tier import REQUEST_BYTES_MAX, TRIES_MAX, HttpTier, put_in_pieces
from kvtide.types import ObjectId
from kvtide.wire.protocol import PiecesAnswer
from kvtide_lab.bench.services import wait_until
from kvtide_lab.bench.shaped import ShapedProxy

SIZE = 100_000


class Remote:
    """A server in few lines: what it has taken, by whole requests, and faults by the number of a request.

    A request is `lost` on its way, or its `answer` is; `restart` forgets all that has come.
    """

    def __init__(self, faults: dict[int, str]) -> None:
        self._faults = faults
        self._forget()
        self.bodies: list[bytes] = []
        self.taken: list[int] = []

    def _forget(self) -> None:
        self._uploads = Uploads(ServerLimits, ManualClock().monotonic_s)

    def ask(self, body: Buffer) -> HttpAnswer:
        fault = self._faults.get(len(self.bodies))
        self.bodies.append(bytes(body))
        if fault == "lost":
            raise TierUnavailable("cut")
        if fault == "restart":
            self._forget()
        try:
            upload = self._uploads.take(object_id(1), object_id(1), "", memoryview(body), lambda stored: True)
        except RequestRefused as error:
            return HttpAnswer(error.status, {}, 0, b"")
        except CorruptPayload as error:
            raise AssertionError(str(error)) from error
        if fault == "answer":
            raise TierUnavailable("cut")
        missing = upload.receiver.missing()
        return HttpAnswer(202 if missing else 201, {}, 0, msgspec.json.encode(PiecesAnswer(missing)))


def send(ask: Callable[[Buffer], HttpAnswer], what: Pieces) -> HttpAnswer:
    clock = ManualClock()
    return put_in_pieces(ask, what.data, clock, 10.0, clock.advance)


def test_head_goes_first_and_sections_in_stored_order_in_bounded_requests() -> None:
    what, remote = pieces(1, 40, 30_000), Remote({})
    assert send(remote.ask, what).status == 201
    assert remote.bodies[0] == what.head
    assert b"".join(remote.bodies[1:]) == b"".join(what.frames)
    assert all(len(body) <= REQUEST_BYTES_MAX for body in remote.bodies)
    assert len(remote.bodies) <= 2 + 40 * 30_200 // (REQUEST_BYTES_MAX - 30_200)


def test_larger_section_goes_alone() -> None:
    what, remote = pieces(1, 2, REQUEST_BYTES_MAX + 1), Remote({})
    assert send(remote.ask, what).status == 201
    assert len(remote.bodies) == 3


def test_any_faults_end_in_the_object_or_a_fault_and_little_goes_twice() -> None:
    what, ends = pieces(1, 30, SIZE), {True: 0, False: 0}
    for seed in range(200):
        rng = random.Random(seed)
        rate = rng.choice([0.05, 0.2, 0.6])
        faults = {at: rng.choice(["lost", "answer", "restart"]) for at in range(200) if rng.random() < rate}
        remote = Remote(faults)
        try:
            assert send(remote.ask, what).status == 201
            is_there = True
        except TierUnavailable:
            is_there = False
        ends[is_there] += 1
        met = sum(at < len(remote.bodies) for at in faults)
        restarts = sum(kind == "restart" and at < len(remote.bodies) for at, kind in faults.items())
        sent = sum(map(len, remote.bodies))
        # A request for each fault, and its head; all anew after a restart.
        spare = met * (REQUEST_BYTES_MAX + len(what.head)) + restarts * (len(what.data) + REQUEST_BYTES_MAX)
        assert sent <= 1.01 * (len(what.data) + len(what.head)) + spare, seed
        assert is_there or met >= TRIES_MAX // 2, seed
    assert min(ends.values()) > 10


def test_server_that_gets_no_further_is_given_up() -> None:
    what, requests = pieces(1), count()

    def ask(body: Buffer) -> HttpAnswer:
        next(requests)
        return HttpAnswer(202, {}, 0, msgspec.json.encode(PiecesAnswer([3])))

    with pytest.raises(TierUnavailable, match="still lacks 1 sections"):
        send(ask, what)
    assert next(requests) <= TRIES_MAX + 1


@pytest.mark.parametrize("body", [b"", b"[]", b'{"missing":[99]}', b'{"missing": [-1]}', b'{"missing":["a"]}', b"\xff"])
def test_answers_that_make_no_sense_are_faults(body: bytes) -> None:
    with pytest.raises(TierUnavailable):
        send(lambda sent: HttpAnswer(202, {}, 0, body), pieces(1))


client = partial(tier_on, options="?upload=pieces", tries_max=1, faults_max=10**6)


def test_upload_goes_on_after_cuts_where_it_was() -> None:
    what, numbers = pieces(1, 30, SIZE), count()
    cuts = [900_000, 100_000, 500_000, 300_000, 700_000]

    def choose() -> Fault:
        number = next(numbers)
        return Fault(Kind.RESET, False, cuts[number]) if number < len(cuts) else Fault(Kind.NOTHING, False, 0)

    with running_server() as server, ChaosProxy(server.address, choose) as proxy, opened(client(proxy)) as tier:
        assert tier.put_from(object_id(1), what.data)
        assert proxy.connections > len(cuts)
        assert tier.put_from(object_id(1), what.data), "what is there costs its head"
        assert ask(server, "GET", 1)[1] == what.data
        heads = 2 * (len(cuts) + 1) * len(what.head)
        assert metric(server, "kvtide_received_bytes_total{") <= 1.01 * len(what.data) + heads


def test_next_server_gets_all_when_the_first_breaks_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtide.tier.http.tier._RETRY_S", 0.001)
    what, numbers = pieces(1, 30, SIZE), count()

    def choose() -> Fault:
        return Fault(Kind.RESET, False, 900_000 if next(numbers) == 0 else 10)

    with running_server() as west, running_server() as east:
        with ChaosProxy(west.address, choose) as proxy, opened(client(proxy, east)) as tier:
            assert tier.put_from(object_id(1), what.data)
        assert ask(west, "HEAD", 1)[0].status == 404
        assert ask(east, "GET", 1)[1] == what.data


def test_callers_deadline_holds_on_a_silent_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}?upload=pieces"
        with opened(http_tier(url, SystemClock())) as tier:
            started_s = time.monotonic()
            with until(started_s + 0.3), pytest.raises(TierUnavailable):
                tier.put_from(object_id(1), pieces(1).data)
            assert time.monotonic() - started_s < 5.0


def test_refusals_are_those_of_a_whole_object() -> None:
    what = pieces(1)
    limits = ServerLimits(uploads_bytes_max=1000, tenant_uploads_bytes_max=1000)
    with running_server(limits=limits) as server, opened(client(server)) as tier:
        with pytest.raises(TierFull):
            tier.put_from(object_id(1), what.data)
        with pytest.raises(TierUnavailable, match="can't be sent in pieces"):
            tier.put_from(object_id(1), b"no object")


def test_without_the_option_an_object_goes_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    send = Call.send

    def noted(call: Call, *arguments: Any) -> HttpAnswer:
        sent.append(call.method)
        return send(call, *arguments)

    monkeypatch.setattr(Call, "send", noted)
    with running_server() as server:
        for option, methods in (("", ["PUT"]), ("?upload=whole", ["PUT"]), ("?upload=pieces", ["POST", "POST"])):
            with opened(http_tier(f"{server.url}{option}", SystemClock())) as tier:
                sent.clear()
                assert tier.put_from(object_id(len(option)), object_bytes(len(option), 5000))
                assert sent == methods
        with pytest.raises(ValueError, match="upload is whole or pieces"):
            http_tier(f"{server.url}?upload=parts", SystemClock())


def test_regions_send_on_what_came_in_pieces(tmp_path: Path, stack: ExitStack) -> None:
    world, what = World(tmp_path, stack, options=("", "?upload=pieces")), pieces(1, 8, SIZE)
    with opened(client(world.regions[0])) as tier:
        assert tier.put_from(object_id(1), what.data)
    wait_until(lambda: ask(world.centre, "GET", 1)[1] == what.data, "the centre to have it")
    assert ask(world.regions[1], "GET", 1)[1] == what.data


def test_clients_that_send_one_object_at_once_all_succeed() -> None:
    with running_server() as server, ThreadPoolExecutor(4) as threads:
        for number in range(5):
            what = pieces(number, 30, 20_000)
            with ExitStack() as stack:
                tiers = [stack.enter_context(opened(client(server))) for _ in range(4)]
                sent = [threads.submit(tier.put_from, object_id(number), what.data) for tier in tiers]
                assert [each.result(30) for each in sent] == [True] * 4
            assert ask(server, "GET", number)[1] == what.data


OBJECTS = made_objects(2, (200_000,))
OBJECT_ID, DATA = next(iter(OBJECTS.items()))
CLOCK = SystemClock()


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(tiers=("memory://",)) as found:
        with opened(http_tier(found.url, CLOCK)) as tier:
            for object_id, data in OBJECTS.items():
                assert tier.put_from(object_id, data)
        yield found


def collected(source: HttpTier, start: int, stop: int, wait_s: float = 20.0) -> tuple[bytes, bool]:
    data = bytearray()
    with until(CLOCK.monotonic_s() + wait_s):
        is_there = source.read_range(OBJECT_ID, start, stop, lambda part: data.extend(part) is None)
    return bytes(data), is_there


def test_range_comes_whole_over_one_connection(server: RunningServer) -> None:
    with opened(http_tier(server.url, CLOCK)) as source:
        assert collected(source, 100, 150_000) == (DATA[100:150_000], True)
        assert collected(source, 0, 1) == (DATA[:1], True)
        assert len(source._peers[0]._idle) == 1
    with pytest.raises(TierUnavailable, match="closed"):
        collected(source, 0, 1)


def test_absent_objects_and_bytes_are_told(server: RunningServer) -> None:
    with opened(http_tier(server.url, CLOCK)) as source:
        absent = ObjectId(OBJECT_ID.namespace, type(OBJECT_ID.key)(bytes(32)))
        assert not source.read_range(absent, 0, 10, lambda part: True)
        assert not source.read_range(OBJECT_ID, len(DATA) + 5, len(DATA) + 9, lambda part: True)
        assert collected(source, len(DATA) - 5, len(DATA) + 5) == (DATA[-5:], False)


@pytest.mark.parametrize("head", ["404 Not Found", "503 Busy", "200 OK", "206 Part\r\nContent-Range: bytes 9-28/50"])
def test_only_the_bytes_asked_for_are_handed_over(head: str) -> None:
    class Slow(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(1 << 16)
            self.request.sendall(f"HTTP/1.1 {head}\r\nContent-Length: 20\r\n\r\n0123456789".encode())
            time.sleep(0.3)
            self.request.sendall(b"0123456789")

    data = bytearray()
    with (
        listening(Slow) as port,
        opened(http_tier(f"http://127.0.0.1:{port}", CLOCK)) as source,
        suppress(TierUnavailable),
    ):
        assert not source.read_range(OBJECT_ID, 10, 50, lambda part: data.extend(part) is None)
    assert not data


def shaped(server: RunningServer, bytes_per_s: float, bytes_max: float = math.inf) -> ShapedProxy:
    """A link of a rate that stands still after so many bytes, however late its reader comes."""
    place = (server.address.host, server.address.port)
    return ShapedProxy(place, lambda seconds: min(bytes_max, bytes_per_s * seconds))


def test_reading_ends_when_no_more_is_wanted(server: RunningServer) -> None:
    with shaped(server, 1e5, 100_000) as proxy, opened(http_tier(f"http://127.0.0.1:{proxy.port}", CLOCK)) as source:
        calls: list[int] = []

        def take(part: memoryview) -> bool:
            calls.append(len(part))
            return sum(calls) < 30_000

        assert source.read_range(OBJECT_ID, 0, len(DATA), take)
        assert 30_000 <= sum(calls) < len(DATA)


def test_deadline_ends_a_read(server: RunningServer) -> None:
    with (
        shaped(server, 1e4) as proxy,
        opened(http_tier(f"http://127.0.0.1:{proxy.port}", CLOCK)) as source,
        pytest.raises(TierUnavailable),
    ):
        collected(source, 0, len(DATA), wait_s=0.3)


class TestHttp(TierSuite):
    @pytest.fixture
    def tier(self, local_url: str) -> Iterator[Tier]:
        limits = ServerLimits(memory_bytes_max=TIER_BYTES, disk_bytes_max=TIER_BYTES)
        with running_server(tiers=(local_url,), limits=limits) as server, opened(http_tier(server.url, CLOCK)) as tier:
            yield tier
