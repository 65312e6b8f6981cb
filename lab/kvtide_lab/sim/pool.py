"""Load of a pool's servers, and how much moves when one joins or leaves, for each way to place blocks.

The placement is the one that clients and servers run; keys and requests are made up, seeded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvtide.tier.pool.placement import SLOTS, Placement, PlacementKind, PoolMap, PoolServer, Words

SERVERS = (8, 12, 13, 16, 100)
SERVERS_MANY = (1000, 4000)
# A map for thousands of servers has more slots, so that each server has some.
SLOTS_PER_SERVER_MIN = 16
KEYS = 1_000_000
KEYS_QUICK = 100_000
MOVED_SAMPLE = 200_000


class PoolRow(msgspec.Struct, frozen=True):
    """One number of servers and one distribution of keys and requests; what is not a share is max/mean over servers.

    `mod` and `rendezvous` read each block at its one server. `less_loaded` keeps it on two and reads at the one that
    has sent less so far; `stored` is what two copies make of the space.
    """

    servers: int
    distribution: str
    mod: float
    rendezvous: float
    less_loaded: float
    stored: float
    join_moved: float
    join_moved_of_ideal: float
    leave_moved: float
    leave_moved_of_ideal: float
    join_moved_mod: float


class PoolReport(msgspec.Struct, frozen=True):
    """All rows. `moved_of_ideal_max`: the most that a join or a leave moved, of what it had to (1 / servers)."""

    keys: int
    seed: int
    moved_of_ideal_max: float
    rows: list[PoolRow]


class _Traffic(NamedTuple):
    """Keys, and how the requests go over them."""

    name: str
    heads: Words
    requested: NDArray[np.intp]


def run_pool(seed: int, counts: Sequence[int] = SERVERS + SERVERS_MANY, keys: int = KEYS) -> PoolReport:
    """Simulate pools of so many servers, with as many requests as keys. ValueError for less than 2 servers or a key."""
    if keys <= 0 or not counts or min(counts) < 2:
        raise ValueError(f"expected keys, and pools of at least 2 servers, got {keys} and {list(counts)}")
    rng = np.random.default_rng(seed)
    traffic = _traffic(rng, keys)
    rows = [row for count in counts for row in _rows(count, traffic)]
    worst = max(max(row.join_moved_of_ideal, row.leave_moved_of_ideal) for row in rows)
    return PoolReport(keys, seed, worst, rows)


def _traffic(rng: np.random.Generator, keys: int) -> list[_Traffic]:
    hashed = rng.integers(0, 1 << 64, keys, np.uint64)
    popularity = 1.0 / np.arange(1, keys + 1)
    zipf = rng.choice(keys, keys, p=popularity / popularity.sum())
    uniform = rng.integers(0, keys, keys)
    # Not what kvtide's keys are: numbers with a step, as from a naive hash or an address.
    stepped = np.arange(keys, dtype=np.uint64) * np.uint64(8)
    return [_Traffic("uniform", hashed, uniform), _Traffic("zipf", hashed, zipf), _Traffic("step 8", stepped, uniform)]


def _pool(count: int, kind: PlacementKind, replicas: int) -> PoolMap:
    slots = SLOTS
    while slots < count * SLOTS_PER_SERVER_MIN:
        slots *= 2
    servers = tuple(PoolServer(f"server-{number:05}", f"server-{number:05}:7421") for number in range(count))
    return PoolMap(1, servers, replicas, slots, kind)


class _Maps(NamedTuple):
    """The pool placed in each way, and with one server more and one less."""

    both: Placement
    joined: Placement
    left: Placement
    modulo: Placement
    modulo_joined: Placement


def _rows(count: int, traffic: Sequence[_Traffic]) -> list[PoolRow]:
    pool, modulo = _pool(count, PlacementKind.RENDEZVOUS, 2), _pool(count, PlacementKind.MOD, 1)
    new, old = PoolServer("server-new", "server-new:7421"), f"server-{count // 2:05}"
    left = next_map(pool, [each for each in pool.servers if each.name != old])
    places = (pool, next_map(pool, [*pool.servers, new]), left, modulo, next_map(modulo, [*modulo.servers, new]))
    maps = _Maps(*map(Placement, places))
    return [_row(count, maps, each) for each in traffic]


def _row(count: int, maps: _Maps, traffic: _Traffic) -> PoolRow:
    owners = maps.both.owners_of(traffic.heads)
    requested = owners[traffic.requested]
    sample = traffic.heads[:MOVED_SAMPLE]
    joined, left = moved_share(maps.both, maps.joined, sample), moved_share(maps.both, maps.left, sample)
    return PoolRow(
        servers=count,
        distribution=traffic.name,
        mod=_peak(maps.modulo.owners_of(traffic.heads)[traffic.requested, 0], count),
        rendezvous=_peak(requested[:, 0], count),
        less_loaded=_peak(_reads(requested, count), count),
        stored=_peak(owners.ravel(), count),
        join_moved=joined,
        join_moved_of_ideal=joined * (count + 1),
        leave_moved=left,
        leave_moved_of_ideal=left * count,
        join_moved_mod=moved_share(maps.modulo, maps.modulo_joined, sample),
    )


def _reads(owners: NDArray[np.uint16], count: int) -> NDArray[np.intp]:
    loads = [0] * count
    chosen = np.empty(len(owners), np.intp)
    for number, pair in enumerate(owners.tolist()):
        position = min(pair, key=loads.__getitem__)
        loads[position] += 1
        chosen[number] = position
    return chosen


def _peak(positions: NDArray[np.intp] | NDArray[np.uint16], count: int) -> float:
    loads = np.bincount(positions, minlength=count)
    return float(loads.max() / loads.mean())


def next_map(pool: PoolMap, servers: Iterable[PoolServer]) -> PoolMap:
    """Return a pool's next map, of these servers."""
    ordered = tuple(sorted(servers, key=lambda each: each.name))
    return msgspec.structs.replace(pool, epoch=pool.epoch + 1, servers=ordered)


def moved_share(before: Placement, after: Placement, heads: Words) -> float:
    """Return which share of the copies of these keys lies, after a change, on servers that did not have it before."""
    names = [server.name for server in before.map.servers]
    numbers = {name: number for number, name in enumerate(names)}
    renumbered = np.array([numbers.get(server.name, -1) for server in after.map.servers], np.int64)
    renamed = renumbered[after.owners_of(heads).astype(np.intp)]
    old = before.owners_of(heads).astype(np.int64)
    kept = (renamed[:, :, None] == old[:, None, :]).any(axis=2)
    return 1.0 - float(kept.mean())
