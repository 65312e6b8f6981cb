"""A pool of five servers, each on a host of its own, under load: killed, cut off, frozen, joined and left."""

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from tests.faults.conftest import Tally
from tests.faults.schedules import Host, Load, Node, network_hosts, nodes, seeds
from tests.stores import opened
from tests.suites.tier_suite import object_bytes, object_id, put_all, read_all

from kvtide.clock import SystemClock
from kvtide.tier.http.tier import http_tier
from kvtide.tier.pool.placement import PoolMap, PoolServer
from kvtide.tier.pool.tier import OPERATION_S_MAX, PoolTier, pool_tier
from kvtide.tier.stack import TierStack
from kvtide_lab.bench.services import free_ports, wait_until

SERVERS = 5
OBJECTS = 200
OBJECT_BYTES = 20_000
PORT = 7421
# Two owners, one after the other, and what the machine is busy with besides.
DEADLINE_S = 2 * OPERATION_S_MAX + 10.0
RUNS, RUNS_NIGHTLY = 1, 4


class Pool:
    """Servers, some of which are members, and the file with their map, which may be damaged, old, or name others."""

    def __init__(self, folder: Path, places: Sequence[tuple[int, Host | None]], members: int) -> None:
        self.path = folder / "pool.json"
        self.hosts = [host for _, host in places if host]
        self.servers = [self._node(folder / f"server-{number}", *place) for number, place in enumerate(places)]
        self.known = [PoolServer(server.folder.name, server.address) for server in self.servers]
        self.epoch = 0
        self.publish(self.known[:members])

    def _node(self, folder: Path, port: int, host: Host | None) -> Node:
        words = ["--tier", "memory://", "--pool", f"pool+file://{self.path}", "--name", folder.name]
        return Node(port, folder, *words, *(["--open-to-all"] if host else []), host=host)

    def publish(self, members: Sequence[PoolServer]) -> None:
        self.epoch += 1
        self._write(msgspec.json.encode(PoolMap(self.epoch, tuple(members))))

    def damage(self, rng: random.Random) -> None:
        """Put something there that is no map, or an old one."""
        old = msgspec.json.encode(PoolMap(0, tuple(self.known[:1])))
        self._write(rng.choice([b"", b"{}", b"\xff", old, old[: len(old) // 2]]))

    def _write(self, data: bytes) -> None:
        aside = self.path.with_suffix(".new")
        aside.write_bytes(data)
        aside.rename(self.path)

    def strike(self, rng: random.Random) -> None:
        victim = rng.choice(self.servers)
        fault = rng.choice(["freeze", "kill", "mend", "mend", "wipe", "leave", "all", "damage", "none"])
        if fault in {"freeze", "kill", "mend", "wipe"}:
            getattr(victim, fault)()
        elif fault == "leave":
            self.publish(rng.sample(self.known, rng.randint(1, len(self.known))))
        elif fault == "all":
            self.publish(self.known)
        elif fault == "damage":
            self.damage(rng)

    def heal(self) -> None:
        for server in self.servers:
            server.mend()
        self.publish(self.known)
        for server in self.servers:
            server.wait()

    def objects_on(self, number: int) -> int:
        with opened(http_tier(f"http://{self.servers[number].address}", SystemClock())) as tier:
            return sum(1 for _ in tier.objects())


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with network_hosts(SERVERS + 1) as hosts:
        found = Pool(tmp_path_factory.mktemp("pool"), [(PORT, host) for host in hosts], SERVERS)
        with nodes(found.servers):
            yield found


@contextmanager
def engine_of(pool: Pool) -> Iterator[tuple[TierStack, PoolTier]]:
    tier = pool_tier(f"pool+file://{pool.path}", SystemClock())
    with opened(TierStack([tier])) as stack:
        yield stack, tier


@pytest.fixture
def stack(pool: Pool) -> Iterator[tuple[TierStack, PoolTier]]:
    with engine_of(pool) as found:
        put_all(found[0], range(OBJECTS), OBJECT_BYTES)
        yield found


CUTS = {"cut": ("input", "output"), "deaf": ("input",), "mute": ("output",)}


@contextmanager
def lost(pool: Pool, pattern: str, number: int) -> Iterator[None]:
    """Have a server killed, frozen or cut off for the time of the `with`."""
    server, host = pool.servers[number], pool.hosts[number]
    if pattern in CUTS:
        host.cut(*CUTS[pattern])
    else:
        {"killed": server.kill, "frozen": server.freeze}[pattern]()
    try:
        yield
    finally:
        host.heal()
        server.mend()
        server.wait()


@pytest.mark.parametrize("pattern", ["killed", "frozen", "cut", "deaf", "mute"])
@pytest.mark.real_time
def test_lost_server_costs_neither_errors_nor_hits(
    pattern: str, pool: Pool, stack: tuple[TierStack, PoolTier], tally: Tally, fault_factor: int
) -> None:
    for run in range(RUNS if fault_factor == 1 else RUNS_NIGHTLY):
        with Load(stack[0], OBJECTS, OBJECT_BYTES, threads=2) as load:
            before = load.hit_rate(OBJECTS)
            with lost(pool, pattern, run % SERVERS):
                # The first call finds out, by waiting or by a refusal; from then on replicas answer.
                time.sleep(0.0 if pattern == "killed" else OPERATION_S_MAX + 0.2)
                during = load.hit_rate(2 * OBJECTS)
            # It is left alone for a second.
            time.sleep(1.2)
            after = load.hit_rate(OBJECTS)
        tally.count(f"pool {pattern}", load.wrong, 0)
        for name, figure in (("hit rate of before", during / before), ("longest s", load.longest_s)):
            tally.note(f"pool {pattern}: {name}", figure)
        assert (load.wrong, load.errors) == (0, [])
        assert load.longest_s <= DEADLINE_S, f"run {run}: an operation took {load.longest_s:.2f} s"
        assert during >= 0.95 * before, f"run {run}: hit rate {before:.3f}, then {during:.3f}"
        assert after >= 0.95 * before


def test_join_and_leave_under_load_move_what_must(pool: Pool, stack: tuple[TierStack, PoolTier], tally: Tally) -> None:
    tier = stack[1]
    with Load(stack[0], OBJECTS, OBJECT_BYTES, threads=2) as load:
        before = load.hit_rate(OBJECTS)
        pool.publish(pool.known)
        wait_until(lambda: tier.epoch == pool.epoch, "the map")
        during_join = load.hit_rate(2 * OBJECTS)
        # What is read is put in its place by a thread of its own, which may be slower than the reads.
        wait_until(lambda: pool.objects_on(SERVERS) > 0, "the new server's first object")
        joined, repairs = pool.objects_on(SERVERS), tier.repairs
        pool.publish([*pool.known[:1], *pool.known[2:]])
        wait_until(lambda: tier.epoch == pool.epoch, "the map")
        during_leave = load.hit_rate(2 * OBJECTS)
        wait_until(lambda: tier.repairs > repairs, "a copy in place of those that left")
        left = tier.repairs - repairs
    copies = 2 * OBJECTS
    tally.count("pool join and leave", load.wrong, 0)
    tally.note("pool join: moved share of 1/5", joined / copies * SERVERS)
    tally.note("pool leave: moved share of 1/5", left / copies * SERVERS)
    assert (load.wrong, load.errors) == (0, [])
    assert 0 < joined / copies <= 1.15 / SERVERS
    assert 0 < left / copies <= 1.15 / SERVERS
    assert min(during_join, during_leave) >= 0.95 * before
    assert load.longest_s <= DEADLINE_S


SCHEDULES, SCHEDULES_NIGHTLY = 2, 500
MEMBERS, STEPS, CALLS = 4, 4, 5


@pytest.fixture(scope="module")
def local_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    found = Pool(tmp_path_factory.mktemp("local"), [(port, None) for port in free_ports(MEMBERS)], MEMBERS)
    with nodes(found.servers):
        yield found


@pytest.mark.timeout(3600)
@pytest.mark.real_time
def test_random_faults_of_a_pool_and_its_map(local_pool: Pool, tally: Tally, fault_factor: int) -> None:
    with engine_of(local_pool) as (stack, tier):
        for seed, rng in seeds(1, SCHEDULES if fault_factor == 1 else SCHEDULES_NIGHTLY):
            for _ in range(STEPS):
                local_pool.strike(rng)
                for _ in range(CALLS):
                    _call(stack, rng.randrange(OBJECTS), seed)
            local_pool.heal()
            wait_until(lambda: tier.epoch == local_pool.epoch, f"seed {seed}: the map")
            wait_until(lambda: _is_kept(stack), f"seed {seed}: the pool to take and give objects")
            tally.count("pool schedules", 0, 0)


def _call(stack: TierStack, number: int, seed: int) -> None:
    """Read an object, and store it if it is not there: right, and in time."""
    started_s = time.monotonic()
    data = read_all(stack, number, OBJECT_BYTES + 1)
    read_s = time.monotonic() - started_s
    assert data in (None, object_bytes(number, OBJECT_BYTES)), f"seed {seed}: wrong bytes of {number}"
    assert read_s <= DEADLINE_S, f"seed {seed}: a read took {read_s:.2f} s"
    if data is None:
        stack.put_from(object_id(number), object_bytes(number, OBJECT_BYTES))
        put_s = time.monotonic() - started_s - read_s
        assert put_s <= DEADLINE_S, f"seed {seed}: a store took {put_s:.2f} s"


def _is_kept(stack: TierStack) -> bool:
    stack.put_from(object_id(0), object_bytes(0, OBJECT_BYTES))
    return read_all(stack, 0, OBJECT_BYTES + 1) == object_bytes(0, OBJECT_BYTES)
