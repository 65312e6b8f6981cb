from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
from tests.servers import RunningServer, running_server
from tests.store.load.sources import made_objects
from tests.stores import opened

from kvtide.clock import SystemClock
from kvtide.errors import TierUnavailable
from kvtide.tier.breaker import until
from kvtide.tier.http.tier import HttpTier, http_tier
from kvtide.types import ObjectId
from kvtide_lab.bench.shaped import ShapedProxy

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

    def take(part: memoryview) -> bool:
        data.extend(part)
        return True

    with until(CLOCK.monotonic_s() + wait_s):
        is_there = source.read_range(OBJECT_ID, start, stop, take)
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


def shaped(server: RunningServer, bytes_per_s: float, bytes_max: float = math.inf) -> ShapedProxy:
    """A link of a rate that stands still after so many bytes, however late its reader comes."""
    place = (server.address.host, server.address.port)
    return ShapedProxy(place, lambda seconds: min(bytes_max, bytes_per_s * seconds))


def test_bytes_before_a_cut_count_and_none_is_lost_or_repeated(server: RunningServer) -> None:
    with shaped(server, 4e5, 120_000) as proxy, opened(http_tier(f"http://127.0.0.1:{proxy.port}", CLOCK)) as source:
        data = bytearray()

        def take(part: memoryview) -> bool:
            data.extend(part)
            if len(data) > 50_000:
                proxy.cut()
            return True

        with pytest.raises(TierUnavailable):
            source.read_range(OBJECT_ID, 0, len(DATA), take)
        assert 50_000 < len(data) < len(DATA)
        with pytest.raises(TierUnavailable):
            collected(source, len(data), len(DATA))
        proxy.mend()
        proxy.restart(lambda seconds: 4e5 * seconds)
        rest, is_there = collected(source, len(data), len(DATA))
        assert (bytes(data) + rest, is_there) == (DATA, True)


def test_reading_ends_when_no_more_is_wanted(server: RunningServer) -> None:
    with shaped(server, 1e6, 100_000) as proxy, opened(http_tier(f"http://127.0.0.1:{proxy.port}", CLOCK)) as source:
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
