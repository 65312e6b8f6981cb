"""Regions, their centre and records under attack: floods, leaps, silence, loss and clocks that go back."""

import hashlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import pytest
from tests.chaos import ChaosProxy, Fault, Kind
from tests.processes import frozen
from tests.server.test_records import opened
from tests.server.worlds import CHAT, GENERATION, SPACE, World, ask, bearer, granted, put, token_of
from tests.servers import RunningServer, ServerProcess, answering, running_server, server_process
from tests.suites.tier_suite import object_bytes

from kvtide.clock import SystemClock
from kvtide.errors import RequestRefused
from kvtide.server.auth import Scope
from kvtide.server.records import RECORDS_MAX, RECORDS_TENANT_MAX, Records
from kvtide.server.regions import LATEST_S_MAX
from kvtide.server.settings import ServerLimits
from kvtide.tier.http.records import raise_to, records_clients
from kvtide.types import BlockKey, Namespace
from kvtide.wire.protocol import RecordKind, RecordName
from kvtide_lab.bench.services import wait_until

_Result = TypeVar("_Result")
OWN = tuple(granted(name, Scope.READ, Scope.WRITE) for name in "ab")
RELAY = granted("relay", Scope.READ, Scope.WRITE, on_behalf_of=["*"])


@pytest.fixture
def tenants(tmp_path: Path, stack: ExitStack) -> World:
    (tmp_path / "token").write_text(token_of("relay"))
    option = f"?token_file={tmp_path / 'token'}"
    return World(tmp_path, stack, {"grants": (*OWN, RELAY)}, options=(option, option), grants=(*OWN, RELAY))


@pytest.fixture
def guarded() -> Iterator[RunningServer]:
    with running_server(grants=(*OWN, RELAY)) as server:
        yield server


def made_up(number: int) -> Namespace:
    return Namespace(hashlib.sha256(f"made up {number}".encode()).digest())


def test_look_ups_of_one_tenant_do_not_keep_the_objects_of_another_from_the_centre(tenants: World) -> None:
    one = tenants.regions[0]
    sync = one.backing.synchroniser
    # Nothing is sent while the flood comes.
    sync._sending.close()
    put(one, 1, **bearer("a"))
    for number in range(5000):
        one.backing.names.ids("b", made_up(number), [BlockKey(bytes(32))])
    for number in range(3):
        assert ask(one, "POST", f"/v1/{made_up(number).hex()}/exists", b'{"keys": []}', **bearer("b"))[0].status == 200
    sync._sending.open()
    wait_until(lambda: ask(tenants.centre, "HEAD", 1, **bearer("a"))[0].status == 200, "the centre to have it")
    assert sync.given_up == 0


def test_a_tenant_raises_its_generation_by_one_at_a_time(guarded: RunningServer) -> None:
    far = "999999999999"
    assert ask(guarded, "PUT", 1, object_bytes(1), Generation=far, **bearer("a"))[0].status == 409
    assert guarded.records.generation("a", SPACE) == 1
    assert ask(guarded, "PUT", GENERATION, far.encode(), **bearer("a"))[0].status == 409
    assert ask(guarded, "PUT", GENERATION, b"2", **bearer("a"))[0].status == 200
    assert guarded.records.generation("a", SPACE) == 2


def test_another_server_gives_back_what_was_lost_but_no_leap(guarded: RunningServer) -> None:
    assert ask(guarded, "PUT", 1, object_bytes(1), Generation="9", Tenant="a", **bearer("relay"))[0].status == 201
    assert guarded.records.generation("a", SPACE) == 9
    assert ask(guarded, "PUT", GENERATION, b"999999999999", Tenant="a", **bearer("relay"))[0].status == 409
    assert ask(guarded, "PUT", GENERATION, b"20", Tenant="a", **bearer("relay"))[0].status == 200


def test_an_open_server_can_still_be_invalidated_after_an_attempt_to_end_that() -> None:
    with running_server() as server:
        for value in ("999999999999", "999999999999999999"):
            ask(server, "GET", 1, Generation=value)
            ask(server, "PUT", 1, object_bytes(1), Generation=value)
            ask(server, "PUT", GENERATION, value.encode())
        known = server.records.generation("", SPACE)
        assert known < 10_000
        assert ask(server, "PUT", GENERATION, str(known + 1).encode())[0].status == 200


def test_a_server_that_is_far_behind_is_brought_up_by_its_tenant(guarded: RunningServer, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(token_of("a"))
    (client,) = records_clients(f"{guarded.url}?token_file={tmp_path / 'token'}", SystemClock())
    with client:
        assert raise_to(client, RecordName(RecordKind.GENERATION, SPACE.hex()), 5).value == "5"


# What waits for a silent server, before its breaker opens and after, on a machine that is busy with other things too.
SILENT_S_MAX = LATEST_S_MAX + 6.0


def timed(act: Callable[[], _Result]) -> tuple[float, _Result]:
    started_s = time.monotonic()
    result = act()
    return time.monotonic() - started_s, result


def asked_beside_a_put(server: RunningServer, count: int, **headers: str) -> list[tuple[float, int]]:
    """Ask for objects that nobody has and store one meanwhile; return how long each GET took, and its status."""
    with ThreadPoolExecutor(count + 1) as pool:
        gets = [lambda n=n: ask(server, "GET", n, None, **headers)[0].status for n in range(100, 100 + count)]
        asked = [pool.submit(timed, get) for get in gets]
        stored_s, status = pool.submit(timed, lambda: ask(server, "PUT", 2, object_bytes(2))[0].status).result()
    assert status == 201
    assert stored_s < SILENT_S_MAX, f"a PUT waited {stored_s:.1f} s"
    return [each.result() for each in asked]


@pytest.fixture
def halves(tmp_path: Path) -> Iterator[tuple[RunningServer, ServerProcess]]:
    """A region in this process whose centre is one of its own, which can be frozen."""
    with server_process("--tier", "memory://", "--records", str(tmp_path / "central")) as centre:
        region = running_server(central=centre.url, manifest=tmp_path / "manifest")
        with region as server:
            wait_until(lambda: ask(server, "GET", 1)[0].getheader("Kvtide-As-Of") is not None, "the centre")
            yield server, centre


@pytest.mark.real_time
def test_a_frozen_centre_holds_nobody_up_for_long(halves: tuple[RunningServer, ServerProcess]) -> None:
    region, centre = halves
    put(region, 1)
    with frozen(centre.process.pid):
        absent = asked_beside_a_put(region, 12)
        assert {status for _, status in absent} == {404}
        assert max(took_s for took_s, _ in absent) < 2 * SILENT_S_MAX
        # From now on the centre is left alone.
        assert ask(region, "GET", 1)[1] == object_bytes(1)
        took_s, (answer, reason) = timed(lambda: ask(region, "GET", 1, Force_Latest="1"))
        assert answer.status == 503 and b"can't be had" in reason
        assert took_s < SILENT_S_MAX
    wait_until(lambda: ask(region, "GET", 3, Force_Latest="1")[0].status == 404, "the centre to be asked again")


@pytest.mark.real_time
def test_one_frozen_region_does_not_stall_the_centre(tmp_path: Path) -> None:
    with (
        server_process("--tier", "memory://") as silent,
        server_process("--tier", "memory://") as other,
        running_server(regions=(silent.url, other.url)) as centre,
    ):
        put(other, 7)
        recovery = centre.region.recovery
        wait_until(lambda: recovery is not None and recovery.is_over, "the centre to have asked its regions")
        with frozen(silent.process.pid):
            asked = asked_beside_a_put(centre, 16, Force_Latest="1")
            assert {status for _, status in asked} == {503}, "nobody knows"
            took_s, (answer, content) = timed(lambda: ask(centre, "GET", 7, Force_Latest="1"))
            assert (answer.status, content) == (200, object_bytes(7)), "another region has it"
            assert took_s < SILENT_S_MAX


def test_a_centre_that_trickles_is_given_up(tmp_path: Path) -> None:
    """One byte a second: never silent, never done."""
    with server_process("--tier", "memory://") as centre:
        put(centre, 1, 50_000)
        slow = Fault(Kind.TRICKLE, True, 0)
        with (
            ChaosProxy(centre.address, lambda: slow) as proxy,
            running_server(central=proxy.url, manifest=tmp_path / "manifest") as region,
        ):
            took_s, (answer, _) = timed(lambda: ask(region, "GET", 1))
            assert answer.status == 503, "a new region that has heard of no invalidation"
            assert took_s < 2 * SILENT_S_MAX
            took_s, (answer, _) = timed(lambda: ask(region, "GET", 1, Force_Latest="1"))
            assert answer.status == 503
            assert took_s < SILENT_S_MAX


def test_a_region_of_small_objects_removes_no_large_one_at_its_centre(tmp_path: Path) -> None:
    small: dict[str, Any] = {"manifest": tmp_path / "manifest", "limits": ServerLimits(object_bytes_max=20_000)}
    with running_server() as centre, running_server(central=centre.url, **small) as region:
        put(centre, 1, 50_000)
        wait_until(lambda: ask(region, "GET", 1)[0].status == 404, "the region to hear of its centre")
        assert ask(centre, "GET", 1)[0].status == 200


class SetBack(SystemClock):
    """A wall clock that somebody sets back."""

    back_s = 0.0

    def wall_s(self) -> float:
        return super().wall_s() - self.back_s


def lost(server: RunningServer) -> None:
    """Lose all records, as a server whose file is gone has when it starts again."""
    records = server.records
    records._records.clear()
    records._counts.clear()
    records.version, records.epoch = 0, "another"


def test_knowledge_is_not_younger_because_a_clock_was_set_back(world: World) -> None:
    one = world.regions[0]
    assert one.region is not None and one.region.central is not None
    central, clock = one.region.central, SetBack()
    wait_until(lambda: central.as_of_s is not None, "the centre's first answer")
    world.centre.stop()
    central._clock = clock
    central._asking.close()
    central._asked_s -= 1800
    clock.back_s = 3600
    assert central.is_too_old_for({"kvtide-max-staleness": "5"})
    assert ask(one, "GET", 1, Max_Staleness="5")[0].status == 503


def test_a_centre_that_lost_records_and_time_is_still_followed(world: World) -> None:
    one = world.regions[0]
    assert ask(world.centre, "PUT", CHAT, b"a" * 64)[0].status == 200
    wait_until(lambda: ask(one, "GET", CHAT)[0].status == 200, "the region to hear of it")
    clock = SetBack()
    clock.back_s = 86_400
    world.centre.records._clock = clock
    lost(world.centre)
    assert ask(world.centre, "PUT", CHAT, b"b" * 64)[0].status == 200
    wait_until(lambda: ask(one, "GET", CHAT)[1].strip() == b"b" * 64, "the region to hear of the new one")
    assert ask(world.centre, "PUT", GENERATION, b"1")[0].status == 200
    wait_until(lambda: one.records.generation("", SPACE) == 1, "the region to hear of the invalidation")


def test_the_latest_is_what_the_centre_has_also_after_it_lost_its_records(world: World) -> None:
    one = world.regions[0]
    assert ask(one, "PUT", CHAT, b"a" * 64)[0].status == 200
    lost(world.centre)
    assert ask(one, "GET", CHAT)[0].status == 200, "what was known here"
    answer, reason = ask(one, "GET", CHAT, Force_Latest="1")
    assert answer.status == 404, reason


@pytest.mark.parametrize(("status", "passed"), [(401, 502), (299, 502), (520, 502), (599, 502), (412, 412)])
def test_a_status_of_the_centre_that_means_nothing_to_the_client_is_not_passed_on(
    tmp_path: Path, status: int, passed: int
) -> None:
    odd = answering(b"HTTP/1.1 %d Odd\r\nContent-Length: 0\r\n\r\n" % status)
    with odd as url, running_server(central=url, manifest=tmp_path / "manifest") as region:
        assert ask(region, "PUT", "/v1/records/profile/p", b"x")[0].status == passed
        assert ask(region, "PUT", 1, object_bytes(1))[0].status == 201


@pytest.mark.parametrize("kind", [RecordKind.PROFILE, RecordKind.GENERATION])
def test_many_records_of_others_leave_room_to_invalidate(kind: RecordKind) -> None:
    records = Records(None, SystemClock())
    for number in range(RECORDS_MAX):
        name = str(number % RECORDS_TENANT_MAX) if kind is RecordKind.PROFILE else made_up(number).hex()
        records.write(f"t{number // RECORDS_TENANT_MAX}", RecordName(kind, name), "1")
    records.write("mine", RecordName(RecordKind.GENERATION, SPACE.hex()), "1")
    records.write("mine", RecordName(RecordKind.PROFILE, "p"), "x")
    assert records.generation("mine", SPACE) == 1
    if kind is RecordKind.PROFILE:
        with pytest.raises(RequestRefused, match="aliases and profiles"):
            records.write("t0", RecordName(kind, "one more"), "x")
    records.check()


def test_what_is_removed_at_the_centre_is_gone_in_the_regions(world: World) -> None:
    one, two = world.regions
    assert ask(one, "PUT", CHAT, b"a" * 64)[0].status == 200
    wait_until(lambda: ask(two, "GET", CHAT)[0].status == 200, "the other region to hear of it")
    assert ask(one, "DELETE", CHAT)[0].status == 204
    assert [ask(server, "GET", CHAT)[0].status for server in (one, world.centre)] == [404, 404]
    wait_until(lambda: ask(two, "GET", CHAT)[0].status == 404, "the other region to hear of it")
    assert ask(one, "DELETE", CHAT)[0].status == 404
    assert ask(two, "PUT", CHAT, b"b" * 64)[0].status == 200
    assert ask(one, "GET", CHAT, Force_Latest="1")[1].strip() == b"b" * 64


def test_what_was_removed_while_a_region_was_cut_off_is_gone_there(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much that is: the centre tells of the last ones alone."""
    monkeypatch.setattr("kvtide.server.records.REMOVED_MAX", 2)
    one, names = world.regions[0], [f"/v1/records/alias/{number}" for number in range(6)]
    for name in names:
        assert ask(world.centre, "PUT", name, b"a" * 64)[0].status == 200
    wait_until(lambda: ask(one, "GET", names[-1])[0].status == 200, "the region to hear of them")
    one.region.central._asking.close()
    for name in names:
        assert ask(world.centre, "DELETE", name)[0].status == 204
    one.region.central.refresh()
    assert [ask(one, "GET", name)[0].status for name in names] == 6 * [404]


def test_removed_records_stay_removed_and_take_little_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtide.server.records.REMOVED_MAX", 3)
    names = [RecordName(RecordKind.PROFILE, str(number)) for number in range(10)]
    with opened(tmp_path / "records") as records:
        for name in names:
            records.write("a", name, "x")
            assert records.remove("a", name) is not None
            records.check()
    with opened(tmp_path / "records") as again:
        assert [again.get("a", name) for name in names] == [None] * 10
        again.check()


def test_deadline_reaches_the_centre_and_does_not_count_against_it(
    halves: tuple[RunningServer, ServerProcess],
) -> None:
    region, centre = halves
    with frozen(centre.process.pid):
        for number in range(100, 104):
            took_s, (answer, _) = timed(lambda n=number: ask(region, "GET", n, Deadline_Ms="200"))  # type: ignore[misc]
            assert answer.status == 504, "nobody knows whether the centre has it"
            assert took_s < SILENT_S_MAX
    assert ask(region, "GET", 104, Force_Latest="1")[0].status == 404, "it was never left alone"
