"""A pool of five servers, each on a host of its own, under load: killed, cut off, frozen, joined and left."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.faults.conftest import Tally
from tests.faults.hosts import Host, log_of, network_hosts
from tests.faults.schedules import Node, nodes, seeds

from kvtide.clock import SystemClock
from kvtide.errors import TierUnavailable, WrongServer
from kvtide.testing.tier_suite import object_bytes, object_id, read_all
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


class PoolHosts:
    """Server processes on hosts, and the file with their map."""

    def __init__(self, hosts: list[Host], folder: Path) -> None:
        self.hosts = hosts
        self.path = folder / "pool.json"
        self._folder = folder
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.map = PoolMap(1, tuple(self.server(number) for number in range(SERVERS)))
        self.publish(self.map)

    def server(self, number: int) -> PoolServer:
        return PoolServer(f"server-{number}", f"{self.hosts[number].address}:{PORT}")

    def publish(self, new: PoolMap) -> None:
        self.map = new
        aside = self.path.with_suffix(".new")
        aside.write_bytes(new.to_json())
        aside.rename(self.path)

    def start(self, number: int) -> None:
        server, host = self.server(number), self.hosts[number]
        place = [
            "--listen",
            server.address,
            "--open-to-all",
            "--pool",
            f"pool+file://{self.path}",
            "--name",
            server.name,
        ]
        command = host.command(sys.executable, "-m", "kvtide.cli", "serve", "--tier", "memory://", *place)
        with log_of(self._folder, host).open("ab") as log:
            tie = ["setpriv", "--pdeathsig", "KILL"]
            self.processes[number] = subprocess.Popen([*tie, *command], stdout=log, stderr=subprocess.STDOUT)

    def wait(self, number: int) -> None:
        tier = http_tier(f"http://{self.server(number).address}", SystemClock())
        tier.open()

        def is_up() -> bool:
            assert self.processes[number].poll() is None, log_of(self._folder, self.hosts[number]).read_text()
            try:
                return not tier.contains(object_id(10**9))
            except WrongServer:
                return True
            except TierUnavailable:
                return False

        wait_until(is_up, f"server {number}", 60)
        tier.close()

    def objects_on(self, number: int) -> int:
        tier = http_tier(f"http://{self.server(number).address}", SystemClock())
        tier.open()
        count = sum(1 for _ in tier.objects())
        tier.close()
        return count

    def stop(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


class PoolLoad:
    """Two threads that read everything over and over through an engine's stack, and store what is missing."""

    def __init__(self, stack: TierStack) -> None:
        self._stack = stack
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, args=(first,)) for first in (0, OBJECTS // 2)]
        self.wrong = self.hits = self.misses = 0
        self.longest_s = 0.0
        self.errors: list[str] = []

    def __enter__(self) -> PoolLoad:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closing.set()
        for thread in self._threads:
            thread.join()

    def _run(self, first: int) -> None:
        number = first
        while not self._closing.is_set():
            number = (number + 1) % OBJECTS
            started_s = time.monotonic()
            try:
                data = read_all(self._stack, number, OBJECT_BYTES + 1)
                read_s = time.monotonic() - started_s
                if data is None:
                    self._stack.put_from(object_id(number), object_bytes(number, OBJECT_BYTES))
            except Exception as error:  # noqa: BLE001 - what reaches the engine is what we count
                with self._lock:
                    self.errors.append(repr(error))
                continue
            took_s = max(read_s, time.monotonic() - started_s - read_s)
            with self._lock:
                self.longest_s = max(self.longest_s, took_s)
                self.hits += data is not None
                self.misses += data is None
                self.wrong += data not in (None, object_bytes(number, OBJECT_BYTES))

    def hit_rate(self, reads: int = 2 * OBJECTS) -> float:
        """Return the hit rate of the next reads, by default two of each object."""
        with self._lock:
            hits, misses = self.hits, self.misses
        wait_until(lambda: self.hits + self.misses >= hits + misses + reads, "reads", 60)
        with self._lock:
            hits, misses = self.hits - hits, self.misses - misses
        return hits / (hits + misses)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PoolHosts]:
    with ExitStack() as stack:
        hosts = PoolHosts(list(stack.enter_context(network_hosts(SERVERS + 1))), tmp_path_factory.mktemp("pool"))
        stack.callback(hosts.stop)
        for number in range(SERVERS + 1):
            hosts.start(number)
        for number in range(SERVERS + 1):
            hosts.wait(number)
        yield hosts


@pytest.fixture
def stack(pool: PoolHosts) -> Iterator[tuple[TierStack, PoolTier]]:
    tier = pool_tier(f"pool+file://{pool.path}", SystemClock())
    stack = TierStack([tier])
    stack.open()
    for number in range(OBJECTS):
        assert stack.put_from(object_id(number), object_bytes(number, OBJECT_BYTES))
    yield stack, tier
    stack.close()


def do(pool: PoolHosts, pattern: str, number: int) -> None:
    if pattern == "killed":
        pool.processes[number].kill()
        pool.processes[number].wait()
    elif pattern == "frozen":
        subprocess.run(["kill", "-STOP", str(pool.processes[number].pid)], check=True)
    else:
        hooks = {"cut": ("input", "output"), "deaf": ("input",), "mute": ("output",)}[pattern]
        pool.hosts[number].cut(*hooks)


def undo(pool: PoolHosts, pattern: str, number: int) -> None:
    if pattern == "killed":
        pool.start(number)
        pool.wait(number)
    elif pattern == "frozen":
        pool.processes[number].send_signal(signal.SIGCONT)
    else:
        pool.hosts[number].heal()


@pytest.mark.parametrize("pattern", ["killed", "frozen", "cut", "deaf", "mute"])
def test_lost_server_costs_neither_errors_nor_hits(
    pattern: str, pool: PoolHosts, stack: tuple[TierStack, PoolTier], tally: Tally, fault_factor: int
) -> None:
    for run in range(RUNS if fault_factor == 1 else RUNS_NIGHTLY):
        with PoolLoad(stack[0]) as load:
            before = load.hit_rate(OBJECTS)
            do(pool, pattern, run % SERVERS)
            try:
                # The first call finds out, by waiting or by a refusal; from then on replicas answer.
                time.sleep(0.0 if pattern == "killed" else OPERATION_S_MAX + 0.2)
                during = load.hit_rate()
            finally:
                undo(pool, pattern, run % SERVERS)
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


def test_join_and_leave_under_load_move_what_they_must(
    pool: PoolHosts, stack: tuple[TierStack, PoolTier], tally: Tally
) -> None:
    tier = stack[1]
    with PoolLoad(stack[0]) as load:
        before = load.hit_rate(OBJECTS)
        pool.publish(pool.map.with_server(pool.server(SERVERS)))
        wait_until(lambda: tier.epoch == pool.map.epoch, "the map")
        during_join = load.hit_rate()
        # What is read is put in its place by a thread of its own, which may be slower than the reads.
        wait_until(lambda: pool.objects_on(SERVERS) > 0, "the new server's first object")
        joined, repairs = pool.objects_on(SERVERS), tier.repairs
        pool.publish(pool.map.without_server("server-1"))
        wait_until(lambda: tier.epoch == pool.map.epoch, "the map")
        during_leave = load.hit_rate()
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


SCHEDULES, SCHEDULES_NIGHTLY = 10, 500
MEMBERS, STEPS, CALLS = 4, 4, 5


class LocalPool:
    """Servers on this machine and the file with their map, which may be damaged, old, or name others."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "pool.json"
        self.members = [
            PoolServer(f"member-{number}", f"127.0.0.1:{port}") for number, port in enumerate(free_ports(MEMBERS))
        ]
        self.epoch = 0
        self.publish(self.members)
        self.servers = [self._node(member, folder) for member in self.members]

    def _node(self, member: PoolServer, folder: Path) -> Node:
        pool = ("--pool", f"pool+file://{self.path}", "--name", member.name)
        return Node(int(member.address.rpartition(":")[2]), folder / member.name, "--tier", "memory://", *pool)

    def publish(self, members: Sequence[PoolServer]) -> None:
        self.epoch += 1
        self._write(PoolMap(self.epoch, tuple(members)).to_json())

    def damage(self, rng: random.Random) -> None:
        """Put something there that is no map, or an old one."""
        old = PoolMap(0, tuple(self.members[:1])).to_json()
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
            self.publish(rng.sample(self.members, rng.randint(1, MEMBERS)))
        elif fault == "all":
            self.publish(self.members)
        elif fault == "damage":
            self.damage(rng)

    def heal(self) -> None:
        for server in self.servers:
            server.mend()
        self.publish(self.members)
        for server in self.servers:
            server.wait()


@pytest.fixture(scope="module")
def local_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPool]:
    pool = LocalPool(tmp_path_factory.mktemp("local"))
    with nodes(pool.servers):
        yield pool


@pytest.mark.timeout(3600)
def test_random_faults_of_a_pool_and_its_map(local_pool: LocalPool, tally: Tally, fault_factor: int) -> None:
    tier = pool_tier(f"pool+file://{local_pool.path}", SystemClock())
    stack = TierStack([tier])
    stack.open()
    for seed, rng in seeds(1, SCHEDULES if fault_factor == 1 else SCHEDULES_NIGHTLY):
        for _ in range(STEPS):
            local_pool.strike(rng)
            for _ in range(CALLS):
                number = rng.randrange(OBJECTS)
                started_s = time.monotonic()
                data = read_all(stack, number, OBJECT_BYTES + 1)
                read_s = time.monotonic() - started_s
                assert data in (None, object_bytes(number, OBJECT_BYTES)), f"seed {seed}: wrong bytes of {number}"
                assert read_s <= DEADLINE_S, f"seed {seed}: a read took {read_s:.2f} s"
                if data is None:
                    stack.put_from(object_id(number), object_bytes(number, OBJECT_BYTES))
                    put_s = time.monotonic() - started_s - read_s
                    assert put_s <= DEADLINE_S, f"seed {seed}: a store took {put_s:.2f} s"
        local_pool.heal()
        wait_until(lambda: tier.epoch == local_pool.epoch, f"seed {seed}: the map")
        wait_until(lambda: _is_kept(stack), f"seed {seed}: the pool to take and give objects")
        tally.count("pool schedules", 0, 0)
    stack.close()


def _is_kept(stack: TierStack) -> bool:
    stack.put_from(object_id(0), object_bytes(0, OBJECT_BYTES))
    return read_all(stack, 0, OBJECT_BYTES + 1) == object_bytes(0, OBJECT_BYTES)
