import hashlib
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.tier.pool.membership import FileMembership
from kvtide.tier.pool.placement import Placement, PlacementKind, PoolMap, PoolServer, mix
from kvtide.types import BlockKey
from kvtide_lab.sim.pool import moved_share, next_map

HEADS = np.random.default_rng(1).integers(0, 1 << 64, 200_000, np.uint64)


def server(number: int, weight: float = 1.0) -> PoolServer:
    return PoolServer(f"server-{number}", f"10.0.0.{number}:7421", weight)


def pool(count: int, replicas: int = 2, kind: PlacementKind = PlacementKind.RENDEZVOUS) -> PoolMap:
    return PoolMap(1, tuple(server(number) for number in range(count)), replicas, kind=kind)


def key(number: int) -> BlockKey:
    return BlockKey(hashlib.sha256(b"%d" % number).digest())


def shares(placement: Placement) -> np.ndarray:
    counts = np.bincount(placement.owners_of(HEADS).ravel(), minlength=len(placement.map.servers))
    return counts / counts.sum()


def test_map_of_one_epoch_is_the_same_everywhere() -> None:
    """Golden: a client of another version must find the same servers."""
    placement = Placement(pool(5))
    assert [placement.slot(key(number)) for number in range(4)] == [3206, 6092, 12556, 5359]
    assert [placement.owners(key(number)) for number in range(6)] == [(4, 1), (3, 4), (0, 3), (3, 0), (4, 1), (2, 1)]


def test_one_key_and_many_find_the_same_servers() -> None:
    placement = Placement(pool(7))
    heads = np.array([int.from_bytes(key(number)[:8], "little") for number in range(500)], np.uint64)
    assert [placement.owners(key(number)) for number in range(500)] == list(map(tuple, placement.owners_of(heads)))


def test_order_of_servers_does_not_matter() -> None:
    one, other = Placement(pool(5)), Placement(PoolMap(1, pool(5).servers[::-1]))
    for number in range(100):
        assert list(one.owners(key(number))) == [4 - position for position in other.owners(key(number))]


@given(st.binary(min_size=32, max_size=32), st.integers(1, 20), st.integers(1, 4), st.sampled_from(PlacementKind))
def test_owners_are_different_and_as_many_as_can_be(
    data: bytes, count: int, replicas: int, kind: PlacementKind
) -> None:
    # Few slots: tables are made quickly.
    placement = Placement(PoolMap(1, pool(count).servers, replicas, 64, kind))
    owners = placement.owners(BlockKey(data))
    assert len(set(owners)) == len(owners) == min(count, replicas)
    assert max(owners) < count


@pytest.mark.parametrize("count", [4, 13])
def test_join_and_leave_move_what_they_must(count: int) -> None:
    before = Placement(pool(count))
    servers = before.map.servers
    joined = Placement(next_map(before.map, [*servers, server(count)]))
    left = Placement(next_map(before.map, [servers[0], *servers[2:]]))
    assert moved_share(before, joined, HEADS) <= 1.15 / (count + 1)
    assert moved_share(before, left, HEADS) <= 1.15 / count
    assert moved_share(before, before, HEADS) == 0.0


def test_new_server_takes_only_for_itself() -> None:
    before = Placement(pool(5))
    after = Placement(next_map(before.map, [*before.map.servers, server(5)]))
    for old, new in zip(before.owners_of(HEADS[:5000]), after.owners_of(HEADS[:5000]), strict=True):
        assert set(new) - set(old) <= {5}


def test_replaced_server_keeps_its_blocks() -> None:
    before = pool(5)
    after = next_map(before, [*before.servers[:2], PoolServer("server-2", "10.9.9.9:1"), *before.servers[3:]])
    assert moved_share(Placement(before), Placement(after), HEADS) == 0.0


def test_weights_are_shares() -> None:
    placement = Placement(PoolMap(1, (server(0), server(1), server(2, 2.0)), replicas=1))
    assert shares(placement) == pytest.approx([0.25, 0.25, 0.5], abs=0.02)


@pytest.mark.parametrize(("count", "bound"), [(8, 1.05), (13, 1.08), (100, 1.35)])
def test_servers_get_about_the_same(count: int, bound: float) -> None:
    assert shares(Placement(pool(count, 1))).max() * count < bound


def test_mix_is_one_to_one_on_structured_words() -> None:
    words = np.arange(100_000, dtype=np.uint64) * np.uint64(8)
    mixed = mix(words)
    assert len(np.unique(mixed)) == len(words)
    assert np.bincount((mixed % np.uint64(8)).astype(int)).max() < 1.03 * len(words) / 8


def test_map_survives_json(tmp_path: Path) -> None:
    full = PoolMap(7, (PoolServer("a", "h:1", 2.0, "host", "/run/kv"), server(1)), 1, 1024, PlacementKind.MOD)
    assert read(tmp_path, msgspec.json.encode(full)) == full


def read(folder: Path, data: bytes) -> PoolMap:
    (folder / "map").write_bytes(data)
    return FileMembership(folder / "map").read()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[]",
        b'{"epoch":-1,"servers":[{"name":"a","address":"b"}]}',
        b'{"epoch":1,"servers":[]}',
        b'{"epoch":1,"servers":[{"name":"","address":"b"}]}',
        b'{"epoch":1,"servers":[{"name":"a","address":"b"},{"name":"a","address":"c"}]}',
        b'{"epoch":1,"servers":[{"name":"a","address":"b","weight":0}]}',
        b'{"epoch":1,"servers":[{"name":"a","address":"b"}],"slots":1000}',
        b'{"epoch":1,"servers":[{"name":"a","address":"b"}],"slots":8388608}',
        b'{"epoch":1,"servers":[{"name":"a","address":"b"}],"replicas":0}',
        b'{"epoch":1,"servers":[{"name":"a","address":"b"}],"kind":"ring"}',
        b'{"epoch":1,"servers":[{"name":"a","address":"b"}],"extra":1}',
        b" " * (9 << 20),
    ],
)
def test_bad_map_is_refused(data: bytes, tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        read(tmp_path, data)
