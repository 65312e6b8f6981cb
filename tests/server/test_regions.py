"""Two regions and their centre: reading through, sending on, asking for the latest, and being cut off."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.server.worlds import World, ask, put
from tests.servers import counted, hints_heard

from kvtide.clock import SystemClock
from kvtide.errors import TierUnavailable
from kvtide.evict import Hint
from kvtide.server.regions import CentralTier, Manifest, backing_for
from kvtide.server.settings import ServerSettings, read_settings
from kvtide.testing.tier_suite import object_bytes, object_id
from kvtide.tier.http import http_tier
from kvtide.tier.ram import MemoryTier
from kvtide.tier.stack import TierStack
from kvtide.types import Name, NamedId
from kvtide_lab.bench.services import wait_until


@contextmanager
def opened(folder: Path, *numbers: int) -> Iterator[Manifest]:
    """Open a folder's manifest and add objects."""
    manifest = Manifest(folder / "manifest")
    manifest.open()
    for number in numbers:
        manifest.add(named(number))
    yield manifest
    manifest.close()


def named(number: int) -> NamedId:
    return NamedId.of(object_id(number), Name("", object_id(number).namespace, 0))


def test_what_a_region_stores_reaches_the_centre_and_the_other_region(world: World) -> None:
    one, two = world.regions
    for number in range(20):
        put(one, number, 30_000)
    wait_until(lambda: world.centre.store.stats().objects == 20, "the centre to get everything")
    for number in range(20):
        assert ask(two, "GET", number)[1] == object_bytes(number, 30_000)
    sent = one.backing.synchroniser
    assert sent is not None
    assert sent.sent_bytes / (20 * 30_000) <= 1.1
    assert two.backing.synchroniser is not None
    assert two.backing.synchroniser.sent_objects == 0, "what came from the centre is not sent back"


def test_a_finer_object_takes_the_place_of_a_coarser_one_at_the_centre_too(world: World) -> None:
    one = world.regions[0]
    coarse, fine = object_bytes(1, quality=0.5), object_bytes(1)
    sent = one.backing.synchroniser
    assert sent is not None
    for content in (coarse, fine):
        assert ask(one, "PUT", 1, content)[0].status == 201
        wait_until(lambda c=content: ask(world.centre, "GET", 1)[1] == c, "the centre to have it")  # type: ignore[misc]
    assert ask(one, "PUT", 1, coarse)[0].status == 200
    wait_until(lambda: sent.waiting == 0, "all to be sent")
    assert ask(world.centre, "GET", 1)[1] == fine
    assert sent.sent_objects == 2
    assert counted(one, "kvtide_region_as_of_seconds") > 0
    assert counted(one, "kvtide_region_waiting_objects") == counted(one, "kvtide_region_given_up_objects") == 0


def test_what_is_replaced_while_it_is_sent_is_sent_again(tmp_path: Path) -> None:
    with opened(tmp_path, 1) as manifest:
        taken = manifest.next()
        assert taken is not None
        manifest.add(named(1))
        manifest.done(taken)
        assert manifest.next() == taken, "what was sent may be what was there before"
        manifest.done(taken)
        assert manifest.next() is None


def test_a_dropped_object_that_was_read_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtide.server.regions.PENDING_MAX", 2)
    with opened(tmp_path, 0) as manifest:
        manifest.note_use(object_id(0))
        for number in (1, 2):
            manifest.add(named(number))
        assert manifest.next() == object_id(1)


@pytest.mark.timeout(20)
def test_a_manifest_that_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "manifest")
    with pytest.raises(OSError, match="regular file"):
        Manifest(tmp_path / "manifest").open()


def test_advice_of_a_regions_engine_reaches_the_centre(world: World) -> None:
    one, two = world.regions
    engine = TierStack([http_tier(one.url, SystemClock())])
    engine.open()
    assert engine.note_request([object_id(0)], Hint(is_last=True))
    wait_until(lambda: hints_heard(world.centre) == 1, "the advice to come")
    assert (hints_heard(one), hints_heard(two)) == (1, 0)
    engine.close()


def test_batched_look_up_of_the_latest_knows_what_was_invalidated(world: World) -> None:
    one, two = world.regions
    put(two, 1)
    question = b'{"keys": ["' + object_id(1).key.hex().encode() + b'"]}'
    space = object_id(1).namespace.hex()
    look = partial(ask, two, "POST", f"/v1/{space}/exists", question)
    assert b"[true]" in look(Force_Latest="1")[1]
    assert ask(one, "PUT", f"/v1/records/generation/{space}", b"1")[0].status == 200
    assert b"[false]" in look(Force_Latest="1")[1]
    world.centre.stop()
    assert look(Force_Latest="1")[0].status == 503


def test_region_that_is_cut_off_goes_on_and_says_since_when(world: World) -> None:
    one = world.regions[0]
    put(one, 1)
    wait_until(lambda: ask(one, "GET", 1)[0].getheader("Kvtide-As-Of") is not None, "the centre's first answer")
    world.centre.stop()
    cut_s = time.time()
    time.sleep(1.2)
    answer, content = ask(one, "GET", 1)
    assert (answer.status, content) == (200, object_bytes(1))
    assert float(answer.getheader("Kvtide-As-Of") or "inf") <= cut_s
    put(one, 2)
    assert ask(one, "GET", 2)[1] == object_bytes(2)
    assert ask(one, "GET", 1, Max_Staleness="3600")[0].status == 200
    newest: tuple[dict[str, Any], ...] = ({"Max_Staleness": "0.5"}, {"Force_Latest": "1"})
    for headers in newest:
        answer, content = ask(one, "GET", 3, **headers)
        assert answer.status == 503
        assert b"centre has not answered" in content or b"can't be had" in content
    assert ask(one, "GET", 1, Max_Staleness="soon")[0].status == 400


def test_latest_is_not_claimed_while_a_region_is_cut_off(world: World) -> None:
    one, two = world.regions
    one.stop()
    answer, content = ask(world.centre, "GET", 7, Force_Latest="1")
    assert answer.status == 503
    assert b"can't be had" in content
    put(two, 8)
    assert ask(world.centre, "GET", 8, Force_Latest="1")[0].status == 200, "found all the same"


def test_manifest_goes_on_after_a_restart(tmp_path: Path) -> None:
    with opened(tmp_path, 0, 1, 2, 3, 4, 1) as first:
        first.done(object_id(0))
    with (tmp_path / "manifest").open("ab") as file:
        file.write(b"torn")
    with opened(tmp_path) as second:
        assert len(second) == 4
        second.note_use(object_id(3))
        second.note_use(object_id(0))
        order = []
        while (each := second.next()) is not None:
            order.append(each)
            second.done(each)
        assert order == [object_id(number) for number in (3, 1, 2, 4)]
    with opened(tmp_path) as third:
        assert (len(third), third.next()) == (0, None)


def test_manifest_drops_the_oldest_over_its_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtide.server.regions.PENDING_MAX", 3)
    with opened(tmp_path, *range(5)) as manifest:
        assert (len(manifest), manifest.dropped, manifest.next()) == (3, 2, object_id(2))


def test_file_of_the_manifest_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtide.server.regions.RECORDS_MAX", 20)
    with opened(tmp_path) as manifest:
        for number in range(200):
            manifest.add(named(number))
            if number % 10:
                manifest.done(object_id(number))
        assert len(manifest) == 20
    assert (tmp_path / "manifest").stat().st_size <= 73 * (20 + 22 + 2)
    with opened(tmp_path) as again:
        assert len(again) == 20


def test_manifest_that_can_not_be_written_is_a_fault(tmp_path: Path) -> None:
    with opened(tmp_path) as manifest:
        assert manifest._file is not None
        manifest._file.close()
        manifest._file = (tmp_path / "manifest").open("rb")
        central = CentralTier(MemoryTier(1 << 20, SystemClock(), lambda key: False), manifest)
        with pytest.raises(TierUnavailable, match="can't note"):
            central.put_from(named(1), b"x")


def test_synchronising_keeps_to_its_rate(tmp_path: Path) -> None:
    with ExitStack() as stack:
        world = World(tmp_path, stack, sync_bytes_s_max=200_000.0)
        started_s = time.monotonic()
        for number in range(4):
            put(world.regions[0], number, 50_000)
        wait_until(lambda: world.centre.store.stats().objects == 4, "the centre to get everything")
        assert time.monotonic() - started_s >= 3 * 0.25


@pytest.mark.parametrize(
    "wrong", [{"central": "s3://bucket", "manifest": Path("m")}, {"central": "http://h:1"}, {"regions": ("disk:///x",)}]
)
def test_bad_settings_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        backing_for(ServerSettings(**wrong), SystemClock())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="positive"):
        read_settings(None, {"sync_bytes_s_max": 0})


def test_file_names_paths_as_text(tmp_path: Path) -> None:
    lines = ['socket_path = "/run/near"', 'manifest = "/var/m"', 'central = "http://h:1"', "[tls]"]
    path = tmp_path / "server.toml"
    path.write_text("\n".join([*lines, 'cert_file = "/c"', 'key_file = "/k"']))
    settings = read_settings(path, {})
    assert (settings.socket_path, settings.manifest) == (Path("/run/near"), Path("/var/m"))
    assert settings.tls is not None and settings.tls.key_file == Path("/k")
    assert read_settings(None, {"manifest": tmp_path}).manifest == tmp_path
    path.write_text("manifest = 3")
    with pytest.raises(ValueError, match="manifest"):
        read_settings(path, {})
