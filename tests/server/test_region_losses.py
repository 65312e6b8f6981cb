"""A centre that lost its records, or was set back in time: what was invalidated stays so, whoever knows of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.server.worlds import World, ask, put
from tests.servers import RunningServer

from kvtide.clock import SystemClock
from kvtide.server.records import Records
from kvtide.server.settings import ServerSettings
from kvtide.testing.tier_suite import object_bytes, object_id
from kvtide.wire.protocol import RecordKind, RecordName
from kvtide_lab.bench.services import wait_until

SPACE = object_id(1).namespace
GENERATION = f"/v1/records/generation/{SPACE.hex()}"
NAME = RecordName(RecordKind.GENERATION, SPACE.hex())


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def world(tmp_path: Path, stack: ExitStack) -> World:
    """Both regions know generation 1, region two has an object of it; then region one alone hears of generation 2."""
    world = World(tmp_path, stack, {"records": tmp_path / "records"})
    one, two = world.regions
    assert ask(one, "PUT", GENERATION, b"1")[0].status == 200
    assert ask(two, "GET", 1, Force_Latest="1")[0].status == 404
    put(two, 1)
    assert ask(two, "GET", 1, Force_Latest="1")[1] == object_bytes(1)
    (tmp_path / "backup").write_bytes((tmp_path / "records").read_bytes())
    for region in world.regions:
        silence(region)
    assert ask(one, "PUT", GENERATION, b"2")[0].status == 200
    return world


def silence(region: RunningServer) -> None:
    """Let a region hear of its centre only when a test, or a request for the latest, makes it ask."""
    assert region.backing.central is not None
    region.backing.central._asking.close()


def look(region: RunningServer) -> None:
    """Do what a region does every second."""
    assert region.backing.central is not None
    region.backing.central._ask()


def again(server: RunningServer, stack: ExitStack) -> RunningServer:
    """Start a server that was stopped, as another process would."""
    started = RunningServer(server.settings)
    started.start()
    stack.callback(started.stop)
    return started


def is_served(region: RunningServer) -> bool:
    found = {ask(region, "GET", number, Force_Latest="1")[0].status for number in (1, 2)}
    assert found <= {200, 404, 503}
    return 200 in found


def expect_nothing_back(world: World, centre: RunningServer) -> None:
    """Wait until everybody is asked again, and find the invalidated object nowhere."""
    for region in world.regions:
        wait_until(lambda r=region: ask(r, "GET", 9, Force_Latest="1")[0].status == 404, "the centre")  # type: ignore[misc]
        assert not is_served(region)
    assert ask(centre, "GET", 1)[0].status == 404


@pytest.mark.parametrize("state", ["wiped", "backup"])
def test_a_region_that_missed_an_invalidation_does_not_undo_it(
    world: World, tmp_path: Path, stack: ExitStack, state: str
) -> None:
    one, two = world.regions
    world.centre.stop()
    # It waits to be synchronised, under the generation that is over.
    put(two, 2)
    (tmp_path / "records").unlink()
    if state == "backup":
        (tmp_path / "backup").rename(tmp_path / "records")
    centre = again(world.centre, stack)
    # What is written anew has a higher version than all that the other region knows.
    look(two)
    assert not is_served(two)
    look(one)
    assert not is_served(two)
    expect_nothing_back(world, centre)


def test_a_wiped_centre_says_nothing_before_each_region_was_asked(
    world: World, tmp_path: Path, stack: ExitStack
) -> None:
    one, two = world.regions
    world.centre.stop()
    one.stop()
    (tmp_path / "records").unlink()
    centre = again(world.centre, stack)
    for _ in range(2):
        look(two)
        answer, _ = ask(two, "GET", 1, Force_Latest="1")
        assert answer.status == 503, "nobody who is here knows"
        assert ask(centre, "GET", 1)[0].status == 503
        assert ask(two, "PUT", GENERATION, b"2")[0].status == 503, "it would be what was there already"
        assert ask(two, "GET", 1)[1] == object_bytes(1), "as of before"
        # Its file is there from now on, but it is no more than it was.
        centre.stop()
        centre = again(world.centre, stack)
    world.regions[0] = again(one, stack)
    expect_nothing_back(world, centre)


def test_an_intact_centre_waits_for_no_region(world: World, stack: ExitStack) -> None:
    one, two = world.regions
    wait_until(lambda: ask(two, "GET", 9, Force_Latest="1")[0].status == 404, "the centre")
    world.centre.stop()
    one.stop()
    centre = again(world.centre, stack)
    wait_until(lambda: ask(centre, "GET", GENERATION)[0].status == 200, "the centre to answer")
    assert ask(two, "GET", GENERATION, Force_Latest="1")[1].strip() == b"2"


def test_a_region_that_restarts_while_it_tells_a_wiped_centre_tells_it_again(tmp_path: Path, stack: ExitStack) -> None:
    """A centre that does not know its regions: it learns from them alone."""
    centre = RunningServer(ServerSettings(listen="127.0.0.1:0"))
    centre.start()
    region = RunningServer(ServerSettings(listen="127.0.0.1:0", central=centre.url, manifest=tmp_path / "manifest"))
    region.start()
    assert ask(region, "PUT", GENERATION, b"3")[0].status == 200
    silence(region)
    centre.stop()
    settings = ServerSettings(listen=str(centre.address))
    centre = again(RunningServer(settings), stack)
    # As far as it comes before it is killed.
    region.records.begin_anew()
    region.stop()
    again(region, stack)
    wait_until(lambda: centre.records.generation("", SPACE) == 3, "the centre to be told")


def test_a_region_without_its_records_serves_nothing_before_it_has_asked(tmp_path: Path, stack: ExitStack) -> None:
    centre = RunningServer(ServerSettings(listen="127.0.0.1:0"))
    centre.start()
    stack.callback(centre.stop)
    tiers = (f"disk://{tmp_path / 'store'}",)
    kept = ServerSettings(listen="127.0.0.1:0", central=centre.url, manifest=tmp_path / "manifest", tiers=tiers)
    region = RunningServer(kept)
    region.start()
    put(region, 1)
    assert ask(region, "PUT", GENERATION, b"1")[0].status == 200
    region.stop()
    (tmp_path / "manifest.records").write_bytes(b"nonsense\n")
    centre.stop()
    region = again(region, stack)
    assert ask(region, "GET", 1)[0].status == 503
    assert ask(region, "HEAD", 1)[0].status == 503


def test_damaged_records_are_not_complete_until_somebody_says_so(tmp_path: Path) -> None:
    path = tmp_path / "records"
    states: list[bool] = []
    for damage in (False, False, True, False):
        records = Records(path, SystemClock())
        if damage:
            path.write_bytes(path.read_bytes()[:-20] + b"\n")
        records.open()
        states.append(records.is_complete)
        records.write("", NAME, "1")
        if len(states) == 1:
            records.settle()
        records.close()
    assert states == [False, True, False, False]
