"""A read whose connection ends goes on where it was, at the same server or at another one."""

import socket
import time
from itertools import count

import pytest
from tests.chaos import ChaosProxy, Fault, Kind
from tests.server.worlds import Place
from tests.servers import RunningServer, counted, running_server, tier_on
from tests.stores import opened
from tests.suites.tier_suite import made_object, object_bytes, object_id, read_all

from kvtide.server.settings import ListenAddress
from kvtide.tier.breaker import until

SIZE = 2_000_000
CUT_AT = 1_500_000


def cut_once(server: RunningServer, kind: Kind = Kind.RESET) -> ChaosProxy:
    """Put a proxy in front that ends its first connection in the middle of a body."""
    numbers = count()
    return ChaosProxy(server.address, lambda: Fault(kind if next(numbers) == 0 else Kind.NOTHING, True, CUT_AT))


def test_other_region_sends_only_the_rest() -> None:
    data = object_bytes(1, SIZE)
    with running_server() as east, running_server() as west:
        for server in (east, west):
            assert server.store.put_from(object_id(1), data)
        with cut_once(east, Kind.TRUNCATE) as proxy, opened(tier_on(proxy, west, tries_max=1)) as tier:
            assert read_all(tier, 1, SIZE + 1) == data
        assert 0 < counted(west, "kvtide_sent_bytes_total") <= SIZE - CUT_AT + 1000


def test_range_goes_on_where_it_was_at_the_same_server() -> None:
    data, buffer = object_bytes(1, SIZE), memoryview(bytearray(SIZE))
    with running_server() as east, cut_once(east, Kind.TRUNCATE) as proxy, opened(tier_on(proxy, tries_max=3)) as tier:
        assert east.store.put_from(object_id(1), data)
        assert tier.get_into(object_id(1), buffer, 1000) == SIZE - 1000
        assert buffer[: SIZE - 1000] == data[1000:]


def test_range_waits_for_a_connection_that_takes_a_long_round_trip(monkeypatch: pytest.MonkeyPatch) -> None:
    connect, look_up = socket.create_connection, socket.getaddrinfo

    def far(place: tuple[str, int], wait_s: float) -> socket.socket:
        if not 0.3 < wait_s <= 20 / 2:
            raise TimeoutError("timed out")
        return connect(place, wait_s)

    monkeypatch.setattr(socket, "create_connection", far)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *place, **more: 2 * look_up(*place, **more))
    came = bytearray()
    with running_server() as server, opened(tier_on(server)) as tier:
        assert server.store.put_from(object_id(1), object_bytes(1))
        assert tier.read_range(object_id(1), 0, 100, lambda part: came.extend(part) is None)
        assert came == object_bytes(1)[:100]


def test_another_object_under_the_key_is_read_from_the_beginning() -> None:
    """Two codecs may have made different objects of one block: halves of them are never put together."""
    other = made_object(object_id(1), bytes(SIZE - 500))
    with running_server() as east, running_server() as west:
        assert east.store.put_from(object_id(1), object_bytes(1, SIZE))
        assert west.store.put_from(object_id(1), other)
        with cut_once(east) as proxy, opened(tier_on(proxy, west, tries_max=2)) as tier:
            assert read_all(tier, 1, SIZE + 1) in {object_bytes(1, SIZE), other}


def test_other_region_without_the_object_is_a_miss() -> None:
    with running_server() as east, running_server() as west:
        assert east.store.put_from(object_id(1), object_bytes(1, SIZE))
        with cut_once(east) as proxy, opened(tier_on(proxy, west, tries_max=1)) as tier:
            assert read_all(tier, 1, SIZE + 1) is None


@pytest.mark.real_time
def test_silent_server_is_left_for_the_other_one_in_time() -> None:
    with running_server() as west, socket.create_server(("127.0.0.1", 0)) as silent:
        assert west.store.put_from(object_id(1), object_bytes(1))
        place = Place(ListenAddress(*silent.getsockname()))
        with opened(tier_on(place, west, tries_max=1, operation_s_max=12.0)) as tier:
            started_s = time.monotonic()
            with until(started_s + 10):
                assert read_all(tier, 1) == object_bytes(1)
            assert time.monotonic() - started_s < 8


@pytest.mark.real_time
@pytest.mark.parametrize(("wait_s", "is_left_alone"), [(1.2, True), (0.4, False)], ids=["silent", "maybe only far"])
def test_silent_server_is_not_asked_for_each_look_up(wait_s: float, is_left_alone: bool) -> None:
    with running_server() as west, socket.create_server(("127.0.0.1", 0)) as silent:
        assert west.store.put_from(object_id(1), object_bytes(1))
        with opened(tier_on(Place(ListenAddress(*silent.getsockname())), west, faults_max=2)) as tier:
            for _ in range(2):
                with until(time.monotonic() + wait_s):
                    assert tier.contains(object_id(1))
            assert tier._peers[0].breaker.is_open == is_left_alone
