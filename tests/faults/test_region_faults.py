"""Two regions and a centre over links of 100 Mbit/s: what one stores is found from the other; a cut is survived."""

import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import pytest
from tests.faults.conftest import Tally
from tests.faults.schedules import Host, Node, asked, network_hosts, nodes, seeds
from tests.server.worlds import CHAT, GENERATION, Place, ask
from tests.suites.tier_suite import object_bytes

from kvtide.server.regions import LATEST_S_MAX
from kvtide.server.settings import ListenAddress
from kvtide_lab.bench.services import free_ports, wait_until

PORT = 7421
MBIT_S = 100
OBJECTS = 20
OBJECT_BYTES = 500_000


class Regions:
    """A centre of ours, and a server on each host. Cables are shaped."""

    def __init__(self, hosts: list[Host], folder: Path, stack: ExitStack) -> None:
        self.hosts = hosts
        self.port = free_ports(1)[0]
        self.centre = Place(ListenAddress("127.0.0.1", self.port))
        self.places = [Place(ListenAddress(host.address, PORT)) for host in hosts]
        regions = [word for host in hosts for word in ("--region", f"http://{host.address}:{PORT}")]
        serve = ("--open-to-all", "--tier", "memory://")
        found = [Node(self.port, folder / "centre", *serve, "--listen", f"0.0.0.0:{self.port}", *regions)]
        for host in hosts:
            host.shape(MBIT_S)
            own = folder / str(host.number)
            place = ("--central", f"http://{host.gateway}:{self.port}", "--manifest", str(own / "manifest"))
            found.append(Node(PORT, own, *serve, *place, host=host))
        stack.enter_context(nodes(found))
        for each in self.places:
            latest(each, 10**9)

    def sent_bytes(self, region: int) -> int:
        """Return how many bytes a host's cable has taken from it so far."""
        words = self.hosts[region].command("cat", "/sys/class/net/eth0/statistics/tx_bytes")
        return int(subprocess.run(words, check=True, capture_output=True).stdout)


def latest(place: Place, what: int | str) -> tuple[HTTPResponse, bytes]:
    """Ask for the latest until somebody can say: a busy machine may take longer than a region waits."""
    asked = [ask(place, "GET", what, Force_Latest="1")]

    def is_said() -> bool:
        if asked[0][0].status == 503:
            asked[0] = ask(place, "GET", what, Force_Latest="1")
        return asked[0][0].status != 503

    wait_until(is_said, f"the latest of {what}")
    return asked[0]


@pytest.fixture(scope="module")
def regions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Regions]:
    with ExitStack() as stack:
        hosts = list(stack.enter_context(network_hosts(2)))
        yield Regions(hosts, tmp_path_factory.mktemp("regions"), stack)


def test_other_region_finds_the_latest_at_once(regions: Regions, tally: Tally) -> None:
    one, two = regions.places
    started = regions.sent_bytes(0)
    for number in range(OBJECTS):
        assert ask(one, "PUT", number, object_bytes(number, OBJECT_BYTES))[0].status == 201
    last = OBJECTS - 1
    answer, content = latest(two, last)
    wrong = int(answer.status != 200 or content != object_bytes(last, OBJECT_BYTES))
    wait_until(lambda: all(ask(regions.centre, "HEAD", n)[0].status == 200 for n in range(OBJECTS)), "the centre", 30)
    ratio = (regions.sent_bytes(0) - started) / (OBJECTS * OBJECT_BYTES)
    for number in range(OBJECTS):
        wrong += latest(two, number)[1] != object_bytes(number, OBJECT_BYTES)
    tally.count("regions", wrong, 0)
    tally.note("regions: bytes on the cable per new byte", ratio)
    assert wrong == 0
    assert ratio <= 1.1, "heads, acknowledgements and the one object that was fetched early included"


def test_region_without_its_centre_is_honest(regions: Regions, tally: Tally) -> None:
    data, one, host = object_bytes(100, OBJECT_BYTES), regions.places[0], regions.hosts[0]
    assert ask(one, "PUT", 100, data)[0].status == 201
    # Only the centre is out of reach: its port is where the region connects to.
    host.cut("output", to_port=regions.port)
    try:
        cut_s = time.time()
        # What the region had asked for just before may still be answered.
        time.sleep(1)
        assert ask(regions.centre, "PUT", GENERATION, b"2")[0].status == 200
        answer, content = ask(one, "GET", 100)
        assert (answer.status, content) == (200, data)
        assert float(answer.getheader("Kvtide-As-Of") or "inf") <= cut_s
        forced, reason = ask(one, "GET", 101, Force_Latest="1")
        assert forced.status == 503 and b"can't be had" in reason
        assert ask(one, "GET", 100, Force_Latest="1")[0].status == 503, "it may have been invalidated"
        assert ask(one, "GET", 100, Max_Staleness="0.5")[0].status == 503
        written, reason = ask(one, "PUT", CHAT, b"f" * 64)
        assert written.status == 503 and b"can't be asked" in reason
    finally:
        host.heal()
    wait_until(lambda: ask(one, "GET", 101, Force_Latest="1")[0].status == 404, "the cable to heal", 30)
    assert ask(one, "GET", 100)[0].status == 404, "invalidated meanwhile"
    assert float(ask(one, "GET", 100)[0].getheader("Kvtide-As-Of") or 0) > cut_s
    tally.count("regions cut off", 0, 0)


SCHEDULES, SCHEDULES_NIGHTLY = 2, 200
STEPS = 4
# What a region may make a client wait for its centre, twice (a look-up and the latest), and a busy machine besides.
DEADLINE_S = 2 * LATEST_S_MAX + 15.0
SMALL_BYTES = 4000


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, list[Node]]]:
    ports, folder = free_ports(3), tmp_path_factory.mktemp("schedules")
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    store = ("--tier", "memory://", "--records")
    central = folder / "centre"
    centre = Node(ports[0], central, *store, str(central / "records"), "--region", urls[1], "--region", urls[2])
    regions = []
    for port in ports[1:]:
        own = folder / str(port)
        place = ("--central", urls[0], "--manifest", str(own / "manifest"))
        regions.append(Node(port, own, *store, str(own / "records"), *place))
    with nodes([centre, *regions]):
        yield centre, regions


class Story:
    """What was written so far, and which region has heard of it, so that an answer can be told to be right."""

    def __init__(self, first: int) -> None:
        self._next = first
        self.stored: list[int] = []
        # Objects, and the generation since which they are none.
        self.invalidated: dict[int, int] = {}
        self.generation = 0
        # What a region knows for certain: it raised the generation itself, or has given the latest since.
        self._heard: dict[int, int] = {}

    def store(self, region: Node) -> None:
        number = self._next
        self._next += 1
        answer = asked(region.port, "PUT", number, object_bytes(number, SMALL_BYTES))
        assert answer.took_s < DEADLINE_S
        assert answer.status in {0, 201, 200, 503}, answer
        if answer.status in {200, 201}:
            self.stored.append(number)

    def read(self, region: Node, number: int, **headers: Any) -> int:
        answer = asked(region.port, "GET", number, **headers)
        assert answer.took_s < DEADLINE_S, f"GET waited {answer.took_s:.1f} s"
        assert answer.status in {0, 200, 404, 503}, answer
        if answer.status == 200:
            assert answer.body == object_bytes(number, SMALL_BYTES)
        if answer.status in {200, 404} and headers:
            self._heard[region.port] = self.generation
        if answer.status == 200:
            is_over = self.invalidated.get(number, self.generation + 1) <= self._heard.get(region.port, 0)
            assert not is_over, f"{number} was invalidated and came back"
        return answer.status

    def invalidate(self, region: Node) -> None:
        """By a region, which answers once the centre has it."""
        known = asked(region.port, "GET", GENERATION, Force_Latest="1")
        if known.status != 200:
            return
        answer = asked(region.port, "PUT", GENERATION, b"%d" % (int(known.body) + 1))
        assert answer.took_s < DEADLINE_S
        if answer.status == 200:
            self.generation = self._heard[region.port] = int(answer.body)
            self.invalidated |= dict.fromkeys(self.stored, self.generation)
            self.stored = []


@pytest.mark.timeout(3600)
def test_random_faults_of_centre_and_regions(world: tuple[Node, list[Node]], tally: Tally, fault_factor: int) -> None:
    centre, regions = world
    story = Story(10_000)
    for seed, rng in seeds(1, SCHEDULES if fault_factor == 1 else SCHEDULES_NIGHTLY):
        for _ in range(STEPS):
            fault = rng.choice(["freeze", "kill", "mend", "mend", "none", "none", "wipe"])
            victim = rng.choice([centre, centre, *regions])
            if fault != "none" and (fault != "wipe" or victim is centre):
                getattr(victim, fault)()
            up = [region for region in regions if region.is_running]
            if not up:
                continue
            region = rng.choice(up)
            story.store(region)
            for number in rng.sample(story.stored, min(2, len(story.stored))):
                story.read(region, number)
                story.read(region, number, Force_Latest="1")
            if rng.random() < 0.2:
                story.invalidate(region)
                for number in [*story.invalidated][-3:]:
                    story.read(region, number)
                    story.read(region, number, Force_Latest="1")
        for node in (centre, *regions):
            node.mend()
        for node in (centre, *regions):
            node.wait()
        wait_until(
            lambda: all(story.read(region, 10**8, Force_Latest="1") == 404 for region in regions),
            f"seed {seed}: everybody to be asked",
            60,
        )
        for region in regions:
            for number in [*story.invalidated][-5:]:
                assert story.read(region, number, Force_Latest="1") in {404, 503}
        tally.count("region schedules", 0, 0)
