"""A read whose connection ends goes on where it was, at the same server or at another one."""

import socket
import time
from collections.abc import Iterator
from itertools import count

import pytest
from tests.chaos import ChaosProxy, Fault, Kind
from tests.servers import RunningServer, counted, running_server
from tests.suites.tier_suite import object_bytes, object_id, read_all

from kvtide.block import BlockLayout, BlockMeta, KVDtype
from kvtide.clock import SystemClock
from kvtide.tier.breaker import until
from kvtide.tier.http.peer import Endpoint, Peer, PeerSettings
from kvtide.tier.http.tier import HttpTier
from kvtide.types import BlockKey, Section, SectionId, SectionKind
from kvtide.wire import pack_object

SIZE = 2_000_000
CUT_AT = 1_500_000


@pytest.fixture
def east() -> Iterator[RunningServer]:
    with running_server() as server:
        yield server


@pytest.fixture
def west() -> Iterator[RunningServer]:
    with running_server() as server:
        yield server


def tier_of(*places: tuple[str, int], tries: int = 1, operation_s_max: float = 10.0) -> HttpTier:
    settings = PeerSettings(tries_max=tries)
    peers = [Peer(Endpoint(host, port), [], settings, SystemClock(), time.sleep) for host, port in places]
    tier = HttpTier(peers, SystemClock(), operation_s_max)
    tier.open()
    return tier


def place_of(server: RunningServer) -> tuple[str, int]:
    return server.address.host, server.address.port


def cut_once(server: RunningServer, kind: Kind = Kind.RESET) -> ChaosProxy:
    """Put a proxy in front that ends its first connection in the middle of a body."""
    numbers = count()
    return ChaosProxy(place_of(server), lambda: Fault(kind if next(numbers) == 0 else Kind.NOTHING, True, CUT_AT))


def proxy_place(proxy: ChaosProxy) -> tuple[str, int]:
    host, _, port = proxy.url.removeprefix("http://").rpartition(":")
    return host, int(port)


def sent_bytes(server: RunningServer) -> float:
    return counted(server, "kvtide_sent_bytes_total")


def test_other_region_sends_only_the_rest(east: RunningServer, west: RunningServer) -> None:
    data = object_bytes(1, SIZE)
    for server in (east, west):
        assert server.store.put_from(object_id(1), data)
    with cut_once(east, Kind.TRUNCATE) as proxy:
        tier = tier_of(proxy_place(proxy), place_of(west))
        buffer = memoryview(bytearray(SIZE + 1))
        assert tier.get_into(object_id(1), buffer) == SIZE
        assert buffer[:SIZE] == data
        tier.close()
    assert 0 < sent_bytes(west) <= SIZE - CUT_AT + 1000


def test_range_goes_on_where_it_was_at_the_same_server(east: RunningServer) -> None:
    data = object_bytes(1, SIZE)
    assert east.store.put_from(object_id(1), data)
    with cut_once(east, Kind.TRUNCATE) as proxy:
        tier = tier_of(proxy_place(proxy), tries=3)
        buffer = memoryview(bytearray(SIZE))
        assert tier.get_into(object_id(1), buffer, 1000) == SIZE - 1000
        assert buffer[: SIZE - 1000] == data[1000:]
        tier.close()


def test_another_object_under_the_key_is_read_from_the_beginning(east: RunningServer, west: RunningServer) -> None:
    """Two codecs may have made different objects of one block: halves of them are never put together."""
    name = object_id(1)
    meta = BlockMeta(name, BlockKey(name.namespace), 0, BlockLayout(1, 1, 1, 1, KVDtype.FLOAT16), "made up")
    other = bytes(pack_object(meta, "raw-1", [Section(SectionId(SectionKind.DATA, 0, 0, 1), bytes(SIZE - 500))]))
    assert east.store.put_from(name, object_bytes(1, SIZE))
    assert west.store.put_from(name, other)
    with cut_once(east) as proxy:
        tier = tier_of(proxy_place(proxy), place_of(west), tries=2)
        buffer = memoryview(bytearray(SIZE + 1))
        size = tier.get_into(name, buffer)
        assert size is not None
        assert bytes(buffer[:size]) in {object_bytes(1, SIZE), other}
        tier.close()


def test_other_region_without_the_object_is_a_miss(east: RunningServer, west: RunningServer) -> None:
    assert east.store.put_from(object_id(1), object_bytes(1, SIZE))
    with cut_once(east) as proxy:
        tier = tier_of(proxy_place(proxy), place_of(west))
        assert tier.get_into(object_id(1), memoryview(bytearray(SIZE + 1))) is None
        tier.close()


@pytest.mark.real_time
def test_silent_server_is_left_for_the_other_one_in_time(west: RunningServer) -> None:
    assert west.store.put_from(object_id(1), object_bytes(1))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        tier = tier_of(silent.getsockname(), place_of(west), operation_s_max=4.0)
        started_s = time.monotonic()
        with until(started_s + 10):
            assert read_all(tier, 1) == object_bytes(1)
            assert tier.contains(object_id(1))
        assert time.monotonic() - started_s < 8
        tier.close()
