"""What falls out of the local tiers goes to the remote one, within a bound, and comes back from there."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from tests.servers import running_server
from tests.tier.test_tiers import nothing_pinned

from kvtide.clock import ManualClock
from kvtide.config import Limits
from kvtide.testing.tier_suite import object_bytes, object_id
from kvtide.tier import Tier, stack_of
from kvtide.tier.background import Demoter
from kvtide.tier.disk import DiskTier
from kvtide.tier.ram import MemoryTier
from kvtide.tier.stack import TierStack


def read(stack: TierStack, number: int, size: int) -> bytes | None:
    buffer = bytearray(size + 1)
    came = stack.get_into(object_id(number), memoryview(buffer))
    return None if came is None else bytes(buffer[:came])


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_evicted_objects_go_to_the_slower_tier_alone(kind: str, tmp_path: Path, clock: ManualClock) -> None:
    local: Tier = (
        MemoryTier(400_000, clock, nothing_pinned)
        if kind == "memory"
        else DiskTier(tmp_path, 400_000, clock, nothing_pinned)
    )
    remote = MemoryTier(10 << 20, clock, nothing_pinned)
    remote.name = "remote"
    stack = TierStack([local, remote], demote_to=[remote])
    stack.open()
    for number in range(20):
        assert stack.put_from(object_id(number), object_bytes(number, 50_000))
    assert stack.demoter.flush(10)
    stack.demoter.check()
    evicted = {number for number in range(20) if not local.contains(object_id(number))}
    assert evicted and all(remote.contains(object_id(number)) for number in evicted)
    assert stack.demoter.demoted == len(list(remote.objects())) and not stack.demoter.dropped
    for number in range(20):
        # What the copy of the one before has pushed out is on its way.
        assert stack.demoter.flush(20)
        assert read(stack, number, 50_000) == object_bytes(number, 50_000)
    stack.close()


def test_what_finds_no_room_is_dropped_and_counted() -> None:
    go_on, sent = threading.Event(), []

    def put(name: object, data: bytearray) -> None:
        assert go_on.wait(10)
        sent.append(len(data))

    demoter = Demoter(put, bytes_max=1000)
    demoter.open()
    for number in range(5):
        demoter.offer(object_id(number), 400, lambda buffer: True)
    assert (demoter.demoted, demoter.dropped) == (0, 3)
    go_on.set()
    assert demoter.flush(10)
    assert (sent, demoter.demoted) == ([400, 400], 2)
    demoter.close(1)
    demoter.offer(object_id(9), 1, lambda buffer: True)
    assert demoter.dropped == 4
    demoter.check()


@pytest.mark.parametrize("scheme", ["http", "pool"])
def test_engine_keeps_locally_and_demotes_to_servers(scheme: str, tmp_path: Path, clock: ManualClock) -> None:
    with running_server() as server:
        limits = Limits(memory_bytes_max=200_000, disk_bytes_max=400_000)
        url = f"disk://{tmp_path} {scheme}://{server.address}?write=evicted"
        stack = stack_of(url, limits, clock, nothing_pinned)
        stack.open()
        assert stack.tier_names == ["memory", "disk", scheme]
        stack.put_from(object_id(0), object_bytes(0, 50_000))
        assert server.store.stats().objects == 0
        for number in range(1, 20):
            stack.put_from(object_id(number), object_bytes(number, 50_000))
        assert stack.demoter.flush(10)
        assert server.store.contains(object_id(0))
        assert read(stack, 0, 50_000) == object_bytes(0, 50_000)
        stack.close()


@pytest.mark.parametrize(
    "url",
    [
        "http://",
        "http://host",
        "http://host:0",
        "http://host:99999",
        "http://host:1/path",
        "http://user@host:1",
        "http://host:1?x=1",
        "http://host:1?write=some",
        "pool://host:1?write=some",
        "http://host:1?token_file=/absent",
        "https://host:1?ca_file=/absent",
        "http+unix://host/path",
        "http://a:1,b",
    ],
)
def test_bad_remote_url_is_refused(url: str, clock: ManualClock) -> None:
    with pytest.raises(ValueError, match=r"store|write|token|unix"):
        stack_of(url, Limits(), clock, nothing_pinned)
