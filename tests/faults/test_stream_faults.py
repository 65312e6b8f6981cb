"""Loads over real servers and links that fail one after the other: right, in time, and no byte twice."""

import json
import os
import random
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from tests.chaos import ChaosProxy, Fault, Kind
from tests.doors.user import PROMPT, answer
from tests.engines.test_streaming import SlowPrefill, Stored
from tests.faults.conftest import Tally
from tests.faults.writers import use_server, writing
from tests.servers import RunningServer, ServerProcess, disk_arguments, running_server, server_process, tier_on
from tests.store.load.sources import IdleEngine, MadeEngine, access_of, made_job, made_objects, parsed
from tests.stores import opened
from tests.suites.tier_suite import object_bytes, object_id

from kvtide.clock import SystemClock
from kvtide.codec import LosslessCodec
from kvtide.engines.transformers.streaming import StreamedPrefill
from kvtide.errors import CorruptPayload, TierUnavailable
from kvtide.plan import LinkEstimate, PrefillSpeed
from kvtide.plan.policies import Layered, TwoEnded
from kvtide.store.load.run import FetchLimits, FetchRun, LoadRequest
from kvtide.store.load.streamed import Streamed
from kvtide.tier import Tier
from kvtide.tier.http.peer import PeerSettings
from kvtide.tier.http.tier import HttpTier, http_tier
from kvtide.tier.stack import TierStack
from kvtide.types import ObjectId
from kvtide.wire import parse_object
from kvtide.wire.receiver import Receiver
from kvtide_lab.bench.services import wait_until
from kvtide_lab.bench.shaped import ShapedProxy

CLOCK = SystemClock()
SIZES = (100_000, 50_000, 150_000)
# What the machine may be busy with besides.
BUSY_S = 8.0
# A server that fails is left alone for a fifth of a second.
OPEN = PeerSettings(open_s=0.2, trial_s=0.5)


class Linked:
    """Links to the first two of three servers with the same objects, and a client's tiers over them."""

    def __init__(
        self,
        servers: Sequence[RunningServer | ServerProcess],
        objects: dict[ObjectId, bytes],
        bytes_per_s: float,
        stack: ExitStack,
        settings: PeerSettings,
    ) -> None:
        self._addresses = [(server.address.host, server.address.port) for server in servers]
        for server in servers:
            with opened(http_tier(server.url, CLOCK)) as tier:
                assert all(tier.put_from(object_id, data) for object_id, data in objects.items())
        self.links = [stack.enter_context(ShapedProxy(each, bytes_per_s.__mul__)) for each in self._addresses[:2]]
        url = ",".join(f"127.0.0.1:{link.port}" for link in self.links)
        self.tiers = TierStack([http_tier(f"http://{url}", CLOCK, settings)])
        self.tiers.open()
        stack.callback(self.tiers.close)

    @property
    def passed_bytes(self) -> int:
        return sum(link.passed_bytes for link in self.links)

    def move(self, link: ShapedProxy, server: int) -> None:
        """Change the address behind a link: what was open breaks off."""
        link.target = self._addresses[server]
        link.cut()
        link.mend()

    def happen(self, random: Random) -> None:
        """Cut a link for a moment, damage what passes it, or have it lead to another server."""
        link, event = random.choice(self.links), random.choice(("cut", "damage", "move"))
        if event == "damage":
            link.to_damage += 1
            return
        if event == "move":
            link.target = random.choice(self._addresses)
        link.cut()
        time.sleep(random.uniform(0, 0.05))
        link.mend()


class Servers(Linked):
    """The servers are processes on disks."""

    def __init__(self, folder: Path, objects: dict[ObjectId, bytes], bytes_per_s: float, stack: ExitStack) -> None:
        disks = [disk_arguments(folder / str(number)) for number in range(3)]
        self.processes = [stack.enter_context(server_process(*disk)) for disk in disks]
        super().__init__(self.processes, objects, bytes_per_s, stack, OPEN)


def fail_later(servers: Servers, stack: ExitStack, cut_s: float, kill_at: int, cut_at: int) -> None:
    """The first server is killed, then the link cut for a while, then the client sent to another server.

    When so many bytes have passed: a machine that is held up loads later too.
    """
    before = servers.passed_bytes

    def fail() -> None:
        wait_until(lambda: servers.passed_bytes - before >= kill_at, "bytes to pass")
        servers.processes[0].kill()
        wait_until(lambda: servers.passed_bytes - before >= cut_at, "more bytes to pass")
        servers.links[1].cut()
        time.sleep(cut_s)
        servers.links[1].mend()
        time.sleep(0.5)
        servers.move(servers.links[1], 2)

    failing = stack.enter_context(ThreadPoolExecutor(1)).submit(fail)
    stack.callback(failing.result)


@pytest.mark.real_time
def test_all_that_can_fail_fails_and_no_byte_comes_twice(tmp_path: Path, stack: ExitStack) -> None:
    objects = made_objects(6, SIZES)
    servers = Servers(tmp_path, objects, 3e5, stack)
    job, link = made_job(objects, deadline_s=30.0), LinkEstimate()
    receivers = [Receiver(stored) for stored in job.objects]
    fail_later(servers, stack, cut_s=1.5, kill_at=200_000, cut_at=400_000)
    run = FetchRun(job, receivers, Layered(), servers.tiers, link, CLOCK, FetchLimits())
    run.start()
    report = run.until_ready(IdleEngine())
    unique = 6 * sum(SIZES)
    assert report.progress.here == (3,) * 6
    assert report.ready_s < 29
    assert report.received_bytes == unique
    assert [each.sections() for each in receivers] == [stored.sections() for stored in parsed(objects)]
    assert report.faults >= 3
    # What a broken connection lost on its way is asked for again: the kernel's buffers, not the range.
    twice = (servers.passed_bytes - unique) / unique
    print(json.dumps({"bytes_twice_share": twice, "faults": report.faults, "ready_s": report.ready_s}))
    assert twice <= 0.01


SCHEDULES = 200
SCHEDULE_SIZES = (60_000, 40_000, 100_000)


def in_process(objects: dict[ObjectId, bytes], stack: ExitStack) -> Linked:
    """Return links to servers in this process, with memory."""
    servers = [stack.enter_context(running_server(tiers=("memory://",))) for _ in range(3)]
    return Linked(servers, objects, 2e7, stack, PeerSettings(open_s=0.02, trial_s=0.05))


@pytest.mark.real_time
def test_random_schedules_of_cuts_damage_and_moves(stack: ExitStack) -> None:
    objects = made_objects(6, SCHEDULE_SIZES)
    whole = {stored.meta.id: {s.id: bytes(s.data) for s in stored.sections()} for stored in parsed(objects)}
    unique, random, rig = 6 * sum(SCHEDULE_SIZES), Random(5), in_process(objects, stack)
    events = stack.enter_context(ThreadPoolExecutor(1))
    passed = faults = damaged = 0
    for _ in range(SCHEDULES):
        job, before = made_job(objects, deadline_s=30.0), rig.passed_bytes
        receivers = [Receiver(stored) for stored in job.objects]
        places = sorted(random.randrange(unique) for _ in range(random.randint(1, 4)))
        run = FetchRun(job, receivers, Layered(), rig.tiers, LinkEstimate(), CLOCK, FetchLimits(retry_s=0.01))
        ended = threading.Event()

        def happen(places: list[int] = places, before: int = before, ended: threading.Event = ended) -> None:
            for place in places:
                while rig.passed_bytes < before + place and not ended.wait(0.001):
                    pass
                rig.happen(random)

        happening = events.submit(happen)
        run.start()
        report = run.until_ready(IdleEngine())
        ended.set()
        happening.result()
        for block, stored in enumerate(job.objects):
            here = {section.id: bytes(section.data) for section in receivers[block].sections()}
            assert here.items() <= whole[stored.meta.id].items(), "wrong bytes"
            assert len(here) == 6 or block in report.damaged
        passed += rig.passed_bytes - before
        faults, damaged = faults + report.faults, damaged + len(report.damaged)
    twice = passed / (SCHEDULES * unique) - 1
    print(json.dumps({"schedules": SCHEDULES, "faults": faults, "damaged": damaged, "bytes_twice_share": twice}))
    assert faults > SCHEDULES // 2
    assert damaged > SCHEDULES // 10
    assert twice <= 0.01


def test_a_name_that_leads_elsewhere_in_mid_load_is_followed(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = made_objects(6, SIZES)
    rig, looked_up = in_process(objects, stack), socket.getaddrinfo
    ports = [rig.links[0].port]
    rig.links[0].restart(lambda seconds: 2e6 * seconds)

    def look_up(host: str, port: Any, *rest: Any, **more: Any) -> Any:
        found = looked_up("127.0.0.1", ports[-1] if host == "localhost" else port, *rest, **more)
        return found if host == "localhost" else looked_up(host, port, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    tiers = TierStack([http_tier("http://localhost:8321", CLOCK, PeerSettings(open_s=0.02, trial_s=0.05))])
    tiers.open()
    stack.callback(tiers.close)
    job, before = made_job(objects, deadline_s=30.0), rig.links[0].passed_bytes
    receivers = [Receiver(stored) for stored in job.objects]
    limits = FetchLimits(retry_s=0.01)
    run = FetchRun(job, receivers, Layered(), tiers, LinkEstimate(), CLOCK, limits, CLOCK.monotonic_s() + 30)
    run.start()
    wait_until(lambda: rig.links[0].passed_bytes - before > 300_000, "bytes to pass")
    ports.append(rig.links[1].port)
    rig.links[0].cut()
    report = run.until_ready(IdleEngine())
    assert report.progress.here == (3,) * 6
    assert report.received_bytes == 6 * sum(SIZES)
    assert rig.links[1].passed_bytes > 300_000


@pytest.mark.real_time
def test_deadline_is_kept_with_the_engine_computing_meanwhile(tmp_path: Path, stack: ExitStack) -> None:
    objects = made_objects(6, SIZES)
    servers = Servers(tmp_path, objects, 1e5, stack)
    job, link = made_job(objects, deadline_s=3.5, tokens_per_s=12.0), LinkEstimate()
    receivers = [Receiver(stored) for stored in job.objects]
    fail_later(servers, stack, cut_s=3.0, kill_at=100_000, cut_at=200_000)
    engine = MadeEngine(tokens_per_s=14.0)
    run = FetchRun(job, receivers, TwoEnded(), servers.tiers, link, CLOCK, FetchLimits())
    run.start()
    report = run.until_ready(engine)
    # 2.5 s to what is computed in 3.5 s, and the last bases in 1.5 s before the cut: in time, or computed at once.
    assert report.ready_s <= 3.5 + 2.5 + BUSY_S
    assert engine.spans[-1][1] >= 40


def test_answer_is_right_whatever_fails(tiny_model: Any, tmp_path: Path, stack: ExitStack) -> None:
    stored = Stored(tiny_model, PROMPT, LosslessCodec())
    servers = Servers(tmp_path, stored.objects, 1e4, stack)
    fail_later(servers, stack, cut_s=1.0, kill_at=5000, cut_at=10_000)
    engine: StreamedPrefill = SlowPrefill(stored.model, stored.ids[:96], stored.layout)
    streamed = Streamed(engine, LoadRequest(PrefillSpeed(16.0), 0.0), TwoEnded())
    streamed.load(access_of(servers.tiers), stored.metas, 30.0)
    report = streamed.report
    # The last pass may be left to the engine.
    assert report.tokens >= 48
    assert 0 < report.computed_tokens <= report.tokens
    assert torch.equal(stored.answer(engine), stored.plain_answer())


# Damaged connections and killed processes between client and server: misses, never wrong bytes, nothing leaked.

SEED = 20260311
SIZE = 200_000
FAULTS = {
    Kind.DELAY: 4,
    Kind.RESET: 12,
    Kind.HALF_CLOSE: 6,
    Kind.TRICKLE: 2,
    Kind.FLIP: 60,
    Kind.TRUNCATE: 12,
    Kind.LENGTH: 6,
}
KILLS = 4


@pytest.fixture
def server(local_url: str) -> Iterator[RunningServer]:
    with running_server(tiers=(local_url,)) as running:
        yield running


def verified(tier: Tier, number: int, size: int = SIZE) -> bytes | None:
    """Read an object as a consumer does: what fails a check is a miss."""
    buffer = bytearray(size + 1)
    try:
        came = tier.get_into(object_id(number), memoryview(buffer))
        if came is None:
            return None
        parse_object(memoryview(buffer)[:came], object_id(number)).sections()
    except (TierUnavailable, CorruptPayload):
        return None
    return bytes(buffer[:came])


client = partial(tier_on, tries_max=1, faults_max=10**6)


@pytest.mark.parametrize("is_answer", [True, False], ids=["answer", "upload"])
@pytest.mark.parametrize("kind", FAULTS)
def test_what_is_damaged_on_its_way_is_a_miss_or_right_and_stored_whole_or_not_at_all(
    server: RunningServer, kind: Kind, is_answer: bool, tally: Tally, fault_factor: int
) -> None:
    rng = random.Random(SEED)
    # The answer's head is some 200 bytes.
    reach = 200 if kind is Kind.LENGTH else SIZE + 200
    with (
        opened(client(server)) as direct,
        ChaosProxy(server.address, lambda: Fault(kind, is_answer, rng.randrange(reach))) as proxy,
    ):
        for number in range(FAULTS[kind] * fault_factor):
            data, came = object_bytes(number, SIZE), None
            is_stored = is_answer and direct.put_from(object_id(number), data)
            with opened(client(proxy, operation_s_max=1.0)) as through, suppress(TierUnavailable):
                if is_answer:
                    came = verified(through, number)
                else:
                    is_stored = through.put_from(object_id(number), data)
            found = verified(direct, number)
            is_wrong = came not in (None, data) or found not in (None, data)
            tally.count(f"{'get' if is_answer else 'put'} {kind.value}", is_wrong, is_stored and not found)
            assert not is_wrong
            assert not is_stored or found
        assert proxy.connections >= FAULTS[kind]


def test_retries_get_through_a_bad_connection(server: RunningServer) -> None:
    faults = iter([Fault(Kind.RESET, True, 50_000), Fault(Kind.FLIP, False, 100_000), Fault(Kind.TRUNCATE, False, 9)])
    with (
        ChaosProxy(server.address, lambda: next(faults, Fault(Kind.NOTHING, True, 0))) as proxy,
        opened(client(proxy, tries_max=4)) as tier,
    ):
        assert tier.put_from(object_id(1), object_bytes(1, SIZE))
        assert verified(tier, 1) == object_bytes(1, SIZE)


def test_killed_server_never_shows_a_partial_object(tmp_path: Path, tally: Tally, fault_factor: int) -> None:
    rng = random.Random(SEED)
    for _ in range(KILLS * fault_factor):
        server, tried, committed = ServerProcess("--tier", f"disk://{tmp_path}"), list[int](), list[int]()

        def work(tier: HttpTier, tried: list[int] = tried, committed: list[int] = committed) -> None:
            with suppress(TierUnavailable):
                for number in range(200):
                    tried.append(number)
                    if tier.put_from(object_id(number), object_bytes(number, SIZE)):
                        committed.append(number)
                    found = verified(tier, number)
                    assert found in (None, object_bytes(number, SIZE))

        with opened(client(server)) as tier, ThreadPoolExecutor(1) as threads:
            worker = threads.submit(work, tier)
            time.sleep(rng.uniform(0.0, 0.3))
            server.kill()
            worker.result()
        with running_server(tiers=(f"disk://{tmp_path}",)) as again, opened(client(again)) as reader:
            found = {number: verified(reader, number) for number in tried}
            contents = {number: object_bytes(number, SIZE) for number in tried}
            tally.judge("kill server", found, contents, committed, f"seed {SEED}")
            for number in tried:
                reader.delete(object_id(number), "removed")


def check_when_settled(server: RunningServer) -> None:
    """Check that nothing is lent. A connection of a killed client may not even have been accepted yet."""

    def is_settled() -> bool:
        try:
            server.service.check()
        except AssertionError:
            return False
        return len(server.service.acceptor.limits) <= 1

    wait_until(is_settled, "what the client had to be given back")


def test_killed_client_leaves_no_buffer_slot_or_socket(server: RunningServer, tally: Tally, fault_factor: int) -> None:
    rng, contents = random.Random(SEED), {number: object_bytes(number, 900_000) for number in range(8)}
    with opened(client(server)) as direct:
        for _ in range(KILLS * fault_factor):
            with writing(use_server, server.url):
                time.sleep(rng.uniform(0.0, 0.2))
            check_when_settled(server)
            found = {number: verified(direct, number, 900_000) for number in contents}
            tally.judge("kill client", found, contents, (), f"seed {SEED}")


def test_stale_pooled_connection_is_no_fault(tmp_path: Path) -> None:
    first = ServerProcess("--tier", f"disk://{tmp_path}")
    with opened(client(first)) as tier:
        assert tier.put_from(object_id(1), object_bytes(1))
        assert first.terminate() == 0
        again = ServerProcess("--tier", f"disk://{tmp_path}", port=first.port)
        assert verified(tier, 1) == object_bytes(1)
    assert again.terminate() == 0


# Stores that are read-only, full, missing or torn, and writers that are killed: always a miss, never an error.


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.name.startswith("kvtide")]


def test_read_only_store_is_read_and_never_written(
    tiny_model: Any, small_disk: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    disk = small_disk("size=512k")
    expected = answer(tiny_model, disk, PROMPT[:, :50]).output
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    assert answer(tiny_model, disk, PROMPT).hit_tokens == 48
    assert torch.equal(answer(tiny_model, disk, PROMPT[:, :50]).output, expected)
    assert len([message for message in messages(caplog) if "Read-only" in message]) == 1


def test_full_disk_still_answers_and_reads_go_on(
    tiny_model: Any, small_disk: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    disk = small_disk("size=512k")
    answer(tiny_model, disk, PROMPT[:, :50])
    ballast = os.open(disk / "ballast", os.O_WRONLY | os.O_CREAT)
    with pytest.raises(OSError, match="No space"):
        while True:
            os.write(ballast, bytes(4096))
    os.close(ballast)
    found = answer(tiny_model, disk, PROMPT)
    assert found.hit_tokens == 48
    assert torch.equal(found.output, tiny_model.generate(PROMPT, max_new_tokens=4, do_sample=False))
    assert len([message for message in messages(caplog) if "No space" in message]) == 1
    assert list(disk.glob("*.part")) == []
