"""Two regions and their centre: reading through, sending on, asking for the latest, and being cut off."""

import resource
import time
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.server.worlds import CHAT, GENERATION, SPACE, World, ask, bearer, granted, launched, put, token_of
from tests.servers import RunningServer, counted, hints_heard
from tests.stores import opened
from tests.suites.tier_suite import object_bytes, object_id

from kvtide.clock import SystemClock
from kvtide.errors import TierUnavailable
from kvtide.evict import Hint
from kvtide.server.auth import Scope
from kvtide.server.records import Records
from kvtide.server.regions import CentralTier, Manifest, backing_for
from kvtide.server.settings import ServerSettings, TlsSettings, read_settings
from kvtide.tier.http import http_tier
from kvtide.tier.http.peer import Call
from kvtide.tier.http.tier import HttpTier
from kvtide.tier.ram import MemoryTier
from kvtide.tier.stack import TierStack
from kvtide.types import Name, NamedId
from kvtide.wire.protocol import RecordKind, RecordName
from kvtide_lab.bench.services import wait_until


def manifest_in(folder: Path, *numbers: int) -> closing[Manifest]:
    """Open a folder's manifest and add objects."""
    manifest = Manifest(folder / "manifest")
    manifest.open()
    for number in numbers:
        manifest.add(named(number))
    return closing(manifest)


def named(number: int) -> NamedId:
    return NamedId.of(object_id(number), Name("a", object_id(number).namespace, 0))


def test_a_finer_object_takes_the_place_of_a_coarser_one_at_the_centre_too(world: World) -> None:
    one = world.regions[0]
    coarse, fine = object_bytes(1, quality=0.5), object_bytes(1)
    sent = one.backing.synchroniser
    for content in (coarse, fine):
        assert ask(one, "PUT", 1, content)[0].status == 201
        wait_until(lambda c=content: ask(world.centre, "GET", 1)[1] == c, "the centre to have it")  # type: ignore[misc]
    assert ask(one, "PUT", 1, coarse)[0].status == 200
    wait_until(lambda: not len(sent.manifest), "all to be sent")
    assert ask(world.centre, "GET", 1)[1] == fine
    assert sent.sent_objects == 2
    assert counted(one, "kvtide_region_as_of_seconds") > 0
    assert counted(one, "kvtide_region_waiting_objects") == counted(one, "kvtide_region_given_up_objects") == 0


def test_object_crosses_the_long_link_once_whoever_holds_the_manifest(world: World) -> None:
    one, two = world.regions
    put(one, 1)
    wait_until(lambda: not len(one.backing.synchroniser.manifest), "the centre to have it")
    with two.backing.synchroniser.manifest._lock:
        assert [ask(two, "GET", what)[0].status for what in (1, 1, "/healthz")] == [200] * 3
    assert ask(two, "GET", 1, Local="1")[1] == object_bytes(1)


def test_what_is_replaced_while_it_is_sent_is_sent_again(tmp_path: Path) -> None:
    with manifest_in(tmp_path, 1) as manifest:
        taken = manifest.next()
        assert taken is not None
        manifest.add(named(1))
        manifest.done(taken)
        assert manifest.next() == taken, "what was sent may be what was there before"
        manifest.done(taken)
        assert manifest.next() is None


def test_a_write_that_was_cut_costs_the_manifest_nothing(tmp_path: Path) -> None:
    with manifest_in(tmp_path, 1) as manifest:
        size, old = (tmp_path / "manifest").stat().st_size, resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 40, old[1]))
        with suppress(OSError):
            manifest.add(named(2))
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        manifest.add(named(3))
    with manifest_in(tmp_path) as again:
        assert len(again) == 3


def test_advice_of_a_regions_engine_reaches_the_centre(world: World) -> None:
    one, two = world.regions
    with opened(TierStack([http_tier(one.url, SystemClock())])) as engine:
        assert engine.note_request([object_id(0)], Hint(is_last=True))
        wait_until(lambda: hints_heard(world.centre) == 1, "the advice to come")
        assert (hints_heard(one), hints_heard(two)) == (1, 0)


def test_batched_look_up_of_the_latest_knows_what_was_invalidated(world: World) -> None:
    one, two = world.regions
    put(two, 1)
    question = b'{"keys": ["' + object_id(1).key.hex().encode() + b'"]}'
    look = partial(ask, two, "POST", f"/v1/{SPACE.hex()}/exists", question)
    assert b"[true]" in look(Force_Latest="1")[1]
    assert ask(one, "PUT", GENERATION, b"1")[0].status == 200
    assert b"[false]" in look(Force_Latest="1")[1]
    world.centre.stop()
    assert look(Force_Latest="1")[0].status == 503


def test_latest_is_not_claimed_while_a_region_is_cut_off(world: World) -> None:
    one, two = world.regions
    one.stop()
    answer, content = ask(world.centre, "GET", 7, Force_Latest="1")
    assert answer.status == 503
    assert b"can't be had" in content
    put(two, 8)
    assert ask(world.centre, "GET", 8, Force_Latest="1")[0].status == 200, "found all the same"


def test_large_objects_have_time_to_cross_a_long_link(tmp_path: Path) -> None:
    backing = backing_for(ServerSettings(central="http://centre:1", manifest=tmp_path / "manifest"), SystemClock())
    assert backing.synchroniser is not None
    sent_to = backing.synchroniser._central
    assert isinstance(sent_to, HttpTier)
    patience = sent_to._patience(Call("PUT", "/", (), bytes(80_000_000)))
    assert patience.deadline_s > time.monotonic() + 80


def test_manifest_goes_on_after_a_restart(tmp_path: Path) -> None:
    with manifest_in(tmp_path, 0, 1, 2, 3, 4, 1) as first:
        first.done(object_id(0))
    with (tmp_path / "manifest").open("ab") as file:
        file.write(b"torn")
    with manifest_in(tmp_path) as second:
        assert len(second) == 4
        second.note_use(object_id(3))
        second.note_use(object_id(0))
        order = []
        while (each := second.next()) is not None:
            order.append(each)
            assert each.name == named(0).name
            second.done(each)
        assert order == [object_id(number) for number in (3, 1, 2, 4)]
    with manifest_in(tmp_path, 5) as third:
        assert (len(third), third.next()) == (1, named(5))
    # Damage to a name costs what is stored under it.
    path = tmp_path / "manifest"
    path.write_bytes(path.read_bytes().replace(b"a" + bytes(63), b"\xff" + bytes(63)))
    with manifest_in(tmp_path) as fourth:
        assert (len(fourth), fourth.next()) == (0, None)


def test_second_region_that_ends_at_once_costs_the_first_one_s_manifest_nothing(tmp_path: Path) -> None:
    with manifest_in(tmp_path, 1) as first:
        with manifest_in(tmp_path):
            pass  # the port is taken
        first.add(named(2))
        first.done(named(1))
    with manifest_in(tmp_path) as again:
        assert (len(again), again.next()) == (1, named(2))


def test_manifest_drops_the_oldest_over_its_bound_though_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtide.server.regions.PENDING_MAX", 3)
    with manifest_in(tmp_path, 0) as manifest:
        manifest.note_use(object_id(0))
        for number in range(1, 5):
            manifest.add(named(number))
        assert (len(manifest), manifest.next()) == (3, object_id(2))


def test_file_of_the_manifest_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtide.server.regions.RECORDS_MAX", 20)
    with manifest_in(tmp_path) as manifest:
        for number in range(200):
            manifest.add(named(number))
            if number % 10:
                manifest.done(object_id(number))
        assert len(manifest) == 20
    assert (tmp_path / "manifest").stat().st_size <= 73 * (20 + 22 + 2)
    with manifest_in(tmp_path) as again:
        assert len(again) == 20


def test_manifest_that_can_not_be_written_is_a_fault(tmp_path: Path) -> None:
    with manifest_in(tmp_path) as manifest:
        manifest._file.close()
        manifest._file = (tmp_path / "manifest").open("rb")
        central = CentralTier(MemoryTier(1 << 20, SystemClock(), lambda key: False), manifest)
        with pytest.raises(TierUnavailable, match="can't note"):
            central.put_from(named(1), b"x")


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


# Records of regions and their centre, tenants over a centre, and a centre under TLS.


def test_forced_latest_sees_what_the_other_region_wrote(world: World) -> None:
    one, two = world.regions
    wait_until(lambda: ask(two, "GET", CHAT)[0].status == 404, "the centre's first answer")
    for value in (SPACE.hex(), 64 * "a", 64 * "b"):
        written, _ = ask(one, "PUT", CHAT, value.encode())
        answer, content = ask(two, "GET", CHAT, Force_Latest="1")
        assert (answer.status, content.strip().decode()) == (200, value)
        assert answer.getheader("ETag") == written.getheader("ETag")
    assert ask(two, "GET", CHAT, Force_Latest="1", Own_If_None_Match=str(answer.getheader("ETag")))[0].status == 304
    assert ask(one, "PUT", CHAT, SPACE.hex().encode(), Own_If_None_Match="*")[0].status == 412
    assert ask(one, "PUT", CHAT, b"nonsense")[0].status == 400


def test_region_without_its_centre_goes_on_and_says_since_when(world: World) -> None:
    one = world.regions[0]
    put(one, 1)
    assert ask(one, "PUT", CHAT, SPACE.hex().encode())[0].status == 200
    for what in (1, CHAT):
        wait_until(lambda w=what: ask(one, "GET", w)[0].getheader("Kvtide-As-Of") is not None, "the first answer")  # type: ignore[misc]
    world.centre.stop()
    cut_s = time.time()
    put(one, 2)
    assert ask(one, "GET", 2)[1] == object_bytes(2)
    answer, content = ask(one, "PUT", CHAT, 64 * b"c")
    assert answer.status == 503 and b"can't be asked" in content
    time.sleep(0.6)
    for what, known in ((1, object_bytes(1)), (CHAT, SPACE.hex().encode())):
        answer, content = ask(one, "GET", what, Max_Staleness="3600")
        assert answer.status == 200 and known in content
        assert float(answer.getheader("Kvtide-As-Of") or "inf") <= cut_s
    newest: tuple[dict[str, Any], ...] = ({"Max_Staleness": "0.5"}, {"Force_Latest": "1"})
    for what in (3, CHAT):
        for headers in newest:
            answer, content = ask(one, "GET", what, **headers)
            assert answer.status == 503
            assert b"centre has not answered" in content or b"can't be had" in content
    assert ask(one, "GET", 1, Max_Staleness="soon")[0].status == 400


@pytest.mark.parametrize("is_known", [True, False])
def test_region_answers_without_its_centre_once_it_heard_of_it(world: World, stack: ExitStack, is_known: bool) -> None:
    world.centre.stop()
    one = world.regions[0]
    one.stop()
    if not is_known:
        Path(f"{one.settings.manifest}.records").unlink()
    region = launched(one.settings, stack)
    put(region, 1)
    assert [ask(region, "GET", number)[0].status for number in (1, 2)] == ([200, 404] if is_known else [503, 503])
    # Records are the centre's, and what it wrote since is not known.
    assert [ask(region, "GET", path)[0].status for path in (CHAT, GENERATION)] == [503, 503]


def test_what_was_invalidated_is_not_synchronised(tmp_path: Path, stack: ExitStack) -> None:
    world = World(tmp_path, stack, sync_bytes_s_max=1.0)
    one = world.regions[0]
    for number in range(3):
        put(one, number)
    sync = one.region.synchroniser
    wait_until(lambda: sync.sent_objects == 1, "the first to be sent")
    ask(one, "PUT", GENERATION, b"1")
    assert [sync.step(), sync.step(), sync.step()] == [0, 0, None]
    assert world.centre.store.stats().objects == 1


OWN = (granted("a"), granted("b"))
RELAY = granted("relay", Scope.READ, Scope.WRITE, on_behalf_of=["a"])
ASKING = granted("centre", Scope.READ, on_behalf_of=["*"])


@pytest.fixture
def tenants(tmp_path: Path, stack: ExitStack) -> World:
    """Regions of tenants a and b; the centre lets them act for a alone."""
    files = {name: tmp_path / f"token-{name}" for name in ("relay", "centre")}
    for name, path in files.items():
        path.write_text(token_of(name))
    options = (f"?token_file={files['centre']}", f"?token_file={files['relay']}")
    return World(tmp_path, stack, {"grants": (*OWN, RELAY)}, options=options, grants=(*OWN, ASKING))


def test_tenants_share_with_themselves_across_regions_alone(tenants: World) -> None:
    one, two = tenants.regions
    put(one, 1, **bearer("a"))
    assert ask(two, "GET", 1, Force_Latest="1", **bearer("a"))[1] == object_bytes(1)
    wait_until(lambda: ask(tenants.centre, "HEAD", 1, **bearer("a"))[0].status == 200, "the centre to have it")
    for server in (one, two, tenants.centre):
        assert ask(server, "GET", 1, **bearer("b"))[0].status == 404
    assert ask(one, "PUT", GENERATION, b"1", **bearer("a"))[0].status == 200
    assert ask(two, "GET", 1, Force_Latest="1", **bearer("a"))[0].status == 404
    assert tenants.centre.records.generation("b", SPACE) == 0


def test_a_wiped_centre_recovers_what_tenants_invalidated(tenants: World, stack: ExitStack) -> None:
    assert ask(tenants.regions[0], "PUT", GENERATION, b"1", **bearer("a"))[0].status == 200
    tenants.centre.stop()
    centre = launched(tenants.centre.settings, stack)
    wait_until(lambda: ask(centre, "GET", 1, **bearer("a"))[0].status == 404, "the centre to answer")
    assert [centre.records.generation(tenant, SPACE) for tenant in ("a", "b")] == [1, 0]


def test_region_may_not_act_for_a_tenant_that_its_grant_does_not_name(tenants: World) -> None:
    one, two = tenants.regions
    put(one, 1, **bearer("b"))
    assert ask(one, "GET", 1, **bearer("b"))[1] == object_bytes(1), "it stays in its region"
    put(one, 2, **bearer("a"))
    wait_until(lambda: ask(tenants.centre, "HEAD", 2, **bearer("a"))[0].status == 200, "what is allowed to be sent")
    answer, _ = ask(two, "GET", 1, Force_Latest="1", **bearer("b"))
    assert answer.status == 503, "nobody may say that it is not there"
    answer, content = ask(one, "PUT", GENERATION, b"1", **bearer("b"))
    assert answer.status == 403 and b"may not ask for that tenant" in content
    for what, tenant, who in ((1, "b", "relay"), (1, "b", "a"), (1, "../a", "relay"), ("/metrics", "a", "relay")):
        assert ask(tenants.centre, "GET", what, Tenant=tenant, **bearer(who))[0].status == 403
    listed = ask(tenants.centre, "GET", "/v1/records", **bearer("b"))[1]
    assert b'"records":[]' in listed


def test_centre_and_regions_talk_tls_with_certificates(certificates: Path, tmp_path: Path, stack: ExitStack) -> None:
    cert, key, authority = (certificates / name for name in ("server.pem", "server.key", "ca.pem"))
    tls = TlsSettings(cert_file=cert, key_file=key, client_ca_file=authority)
    words = [("ca_file", "ca.pem"), ("cert_file", "client.pem"), ("key_file", "client.key")]
    option = "?" + "&".join(f"{name}={certificates / file}" for name, file in words)
    world = World(tmp_path, stack, {"tls": tls}, "https://127.0.0.1", ("", option))
    one, two = world.regions
    put(one, 1)
    wait_until(lambda: world.centre.store.stats().objects == 1, "the centre to have it")
    assert ask(two, "GET", 1)[1] == object_bytes(1)
    assert ask(one, "PUT", CHAT, SPACE.hex().encode())[0].status == 200
    assert ask(two, "GET", CHAT, Force_Latest="1")[0].status == 200


def test_region_looks_up_a_run_at_its_centre_in_few_questions(world: World) -> None:
    one, two = world.regions
    for number in range(30):
        put(one, number)
    wait_until(lambda: world.centre.store.stats().objects == 30, "the centre to have it")
    with opened(http_tier(two.url, SystemClock())) as tier:
        before = asked_for_objects(world.centre)
        assert tier.count_leading([object_id(number) for number in range(100)]) == 30
        assert asked_for_objects(world.centre) - before <= 4


def asked_for_objects(server: RunningServer) -> float:
    asked = [(route, status) for route in ("object", "exists") for status in ("200", "404")]
    return sum(counted(server, "kvtide_requests_total", route=route, status=status) for route, status in asked)


# A centre that lost its records, or was set back in time: what was invalidated stays so, whoever knows of it.

NAME = RecordName(RecordKind.GENERATION, SPACE.hex())


@pytest.fixture
def wiped(tmp_path: Path, stack: ExitStack) -> World:
    """Both regions know generation 1, region two has an object of it; then region one alone hears of generation 2."""
    wiped = World(tmp_path, stack, {"records": tmp_path / "records"})
    one, two = wiped.regions
    assert ask(one, "PUT", GENERATION, b"1")[0].status == 200
    assert ask(two, "GET", 1, Force_Latest="1")[0].status == 404
    put(two, 1)
    assert ask(two, "GET", 1, Force_Latest="1")[1] == object_bytes(1)
    (tmp_path / "backup").write_bytes((tmp_path / "records").read_bytes())
    for region in wiped.regions:
        silence(region)
    assert ask(one, "PUT", GENERATION, b"2")[0].status == 200
    return wiped


def silence(region: RunningServer) -> None:
    """Let a region hear of its centre only when a test, or a request for the latest, makes it ask."""
    region.backing.central._asking.close()


def look(region: RunningServer) -> None:
    """Do what a region does every second."""
    region.backing.central._ask()


def is_served(region: RunningServer) -> bool:
    found = {ask(region, "GET", number, Force_Latest="1")[0].status for number in (1, 2)}
    assert found <= {200, 404, 503}
    return 200 in found


def expect_nothing_back(wiped: World, centre: RunningServer) -> None:
    """Wait until everybody is asked again, and find the invalidated object nowhere."""
    for region in wiped.regions:
        wait_until(lambda r=region: ask(r, "GET", 9, Force_Latest="1")[0].status == 404, "the centre")  # type: ignore[misc]
        assert not is_served(region)
    assert ask(centre, "GET", 1)[0].status == 404


@pytest.mark.parametrize("state", ["wiped", "backup"])
def test_a_region_that_missed_an_invalidation_does_not_undo_it(
    wiped: World, tmp_path: Path, stack: ExitStack, state: str
) -> None:
    one, two = wiped.regions
    wiped.centre.stop()
    # It waits to be synchronised, under the generation that is over.
    put(two, 2)
    (tmp_path / "records").unlink()
    if state == "backup":
        (tmp_path / "backup").rename(tmp_path / "records")
    centre = launched(wiped.centre.settings, stack)
    # What is written anew has a higher version than all that the other region knows.
    look(two)
    assert not is_served(two)
    look(one)
    assert not is_served(two)
    expect_nothing_back(wiped, centre)


def test_wiped_centre_says_nothing_before_each_region_was_asked(wiped: World, tmp_path: Path, stack: ExitStack) -> None:
    one, two = wiped.regions
    wiped.centre.stop()
    one.stop()
    (tmp_path / "records").unlink()
    centre = launched(wiped.centre.settings, stack)
    for _ in range(2):
        look(two)
        answer, _ = ask(two, "GET", 1, Force_Latest="1")
        assert answer.status == 503, "nobody who is here knows"
        assert ask(centre, "GET", 1)[0].status == 503
        assert ask(two, "PUT", GENERATION, b"2")[0].status == 503, "it would be what was there already"
        assert ask(two, "GET", 1)[1] == object_bytes(1), "as of before"
        # Its file is there from now on, but it is no more than it was.
        centre.stop()
        centre = launched(wiped.centre.settings, stack)
    wiped.regions[0] = launched(one.settings, stack)
    expect_nothing_back(wiped, centre)


def test_an_intact_centre_waits_for_no_region(wiped: World, stack: ExitStack) -> None:
    one, two = wiped.regions
    wait_until(lambda: ask(two, "GET", 9, Force_Latest="1")[0].status == 404, "the centre")
    wiped.centre.stop()
    one.stop()
    centre = launched(wiped.centre.settings, stack)
    wait_until(lambda: ask(centre, "GET", GENERATION)[0].status == 200, "the centre to answer")
    assert ask(two, "GET", GENERATION, Force_Latest="1")[1].strip() == b"2"


def test_a_region_that_restarts_while_it_tells_a_wiped_centre_tells_it_again(tmp_path: Path, stack: ExitStack) -> None:
    """A centre that does not know its regions: it learns from them alone."""
    centre = launched(ServerSettings(listen="127.0.0.1:0"), stack)
    kept = ServerSettings(listen="127.0.0.1:0", central=centre.url, manifest=tmp_path / "manifest")
    region = launched(kept, stack)
    assert ask(region, "PUT", GENERATION, b"3")[0].status == 200
    silence(region)
    centre.stop()
    centre = launched(ServerSettings(listen=str(centre.address)), stack)
    # As far as it comes before it is killed.
    region.records.begin_anew()
    region.stop()
    launched(kept, stack)
    wait_until(lambda: centre.records.generation("", SPACE) == 3, "the centre to be told")


def test_a_region_without_its_records_serves_nothing_before_it_has_asked(tmp_path: Path, stack: ExitStack) -> None:
    centre, tiers = launched(ServerSettings(listen="127.0.0.1:0"), stack), (f"disk://{tmp_path / 'store'}",)
    kept = ServerSettings(listen="127.0.0.1:0", central=centre.url, manifest=tmp_path / "manifest", tiers=tiers)
    region = launched(kept, stack)
    put(region, 1)
    assert ask(region, "PUT", GENERATION, b"1")[0].status == 200
    region.stop()
    (tmp_path / "manifest.records").write_bytes(b"nonsense\n")
    centre.stop()
    region = launched(kept, stack)
    assert [ask(region, method, 1)[0].status for method in ("GET", "HEAD")] == [503, 503]


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
