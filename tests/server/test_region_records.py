"""Records of regions and their centre, tenants over a centre, and a centre under TLS."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.server.worlds import World, ask, put
from tests.servers import RunningServer, counted

from kvtide.clock import SystemClock
from kvtide.server.auth import Grant, Scope, new_token, token_digest
from kvtide.server.settings import TlsSettings
from kvtide.testing.tier_suite import object_bytes, object_id
from kvtide.tier.http.tier import http_tier
from kvtide_lab.bench.services import wait_until

SPACE = object_id(1).namespace
GENERATION = f"/v1/records/generation/{SPACE.hex()}"
CHAT = "/v1/records/alias/chat"


def test_invalidation_in_one_region_reaches_the_others(world: World) -> None:
    one, two = world.regions
    put(one, 1)
    wait_until(lambda: ask(world.centre, "HEAD", 1)[0].status == 200, "the centre to have it")
    assert ask(two, "GET", 1)[1] == object_bytes(1)
    assert ask(one, "PUT", GENERATION, b"1")[0].status == 200
    assert ask(one, "GET", 1)[0].status == 404, "at once where it was raised"
    assert ask(world.centre, "GET", 1)[0].status == 404, "and at the centre"
    assert ask(two, "GET", 1, Force_Latest="1")[0].status == 404
    assert ask(two, "GET", 1)[0].status == 404
    put(two, 1)
    assert ask(one, "GET", 1, Force_Latest="1")[1] == object_bytes(1)


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


def test_region_without_its_centre_says_what_it_knows(world: World) -> None:
    one = world.regions[0]
    assert ask(one, "PUT", CHAT, SPACE.hex().encode())[0].status == 200
    wait_until(lambda: ask(one, "GET", CHAT)[0].getheader("Kvtide-As-Of") is not None, "the first answer")
    world.centre.stop()
    answer, content = ask(one, "GET", CHAT)
    assert (answer.status, content.strip().decode()) == (200, SPACE.hex())
    for method, body, headers in (("PUT", 64 * b"c", {}), ("GET", None, {"Force_Latest": "1"})):
        answer, content = ask(one, method, CHAT, body, **headers)
        assert answer.status == 503
        assert b"can't be asked" in content or b"can't be had" in content
    assert ask(one, "GET", CHAT, Max_Staleness="0")[0].status == 503
    assert ask(one, "GET", CHAT, Max_Staleness="3600")[0].status == 200
    assert ask(one, "GET", CHAT)[1].strip().decode() == SPACE.hex()


def test_region_that_never_heard_of_the_centre_does_not_guess(tmp_path: Path) -> None:
    with ExitStack() as stack:
        world = World(tmp_path, stack)
        world.centre.stop()
        one = RunningServer(world.regions[0].settings)
        world.regions[0].stop()
        one.start()
        stack.callback(one.stop)
        assert ask(one, "GET", CHAT)[0].status == 503
        assert ask(one, "GET", GENERATION)[0].status == 503


def test_what_was_invalidated_is_not_synchronised(tmp_path: Path) -> None:
    with ExitStack() as stack:
        world = World(tmp_path, stack, sync_bytes_s_max=1.0)
        one = world.regions[0]
        for number in range(3):
            put(one, number)
        assert one.region is not None and one.region.synchroniser is not None
        sync = one.region.synchroniser
        wait_until(lambda: sync.sent_objects == 1, "the first to be sent")
        ask(one, "PUT", GENERATION, b"1")
        assert [sync.step(), sync.step(), sync.step()] == [0, 0, None]
        assert world.centre.store.stats().objects == 1


def test_region_teaches_a_centre_that_lost_its_records(world: World) -> None:
    one = world.regions[0]
    ask(one, "PUT", GENERATION, b"4")
    world.centre.records._records.clear()
    world.centre.records._generations.clear()
    put(one, 1)
    wait_until(lambda: world.centre.records.generation("", SPACE) == 4, "the centre to hear of it")


TENANTS = {name: new_token() for name in ("a", "b", "relay", "centre")}
OWN = tuple(Grant(tenant=name, scopes=list(Scope), token_sha256=token_digest(TENANTS[name])) for name in ("a", "b"))
RELAY = Grant(
    tenant="regions", scopes=[Scope.READ, Scope.WRITE], token_sha256=token_digest(TENANTS["relay"]), on_behalf_of=["a"]
)
ASKING = Grant(tenant="centre", scopes=[Scope.READ], token_sha256=token_digest(TENANTS["centre"]), on_behalf_of=["*"])


@pytest.fixture
def tenants(tmp_path: Path) -> Iterator[World]:
    """Regions of tenants a and b; the centre lets them act for a alone."""
    files = {name: tmp_path / f"token-{name}" for name in ("relay", "centre")}
    for name, path in files.items():
        path.write_text(TENANTS[name])
    options = (f"?token_file={files['centre']}", f"?token_file={files['relay']}")
    with ExitStack() as stack:
        central: dict[str, object] = {"grants": (*OWN, RELAY)}
        yield World(tmp_path, stack, central, options=options, grants=(*OWN, ASKING))


def by(name: str) -> dict[str, Any]:
    return {"Own_Authorization": f"Bearer {TENANTS[name]}"}


def test_tenants_share_with_themselves_across_regions_alone(tenants: World) -> None:
    one, two = tenants.regions
    put(one, 1, **by("a"))
    assert ask(two, "GET", 1, Force_Latest="1", **by("a"))[1] == object_bytes(1)
    wait_until(lambda: ask(tenants.centre, "HEAD", 1, **by("a"))[0].status == 200, "the centre to have it")
    for server in (one, two, tenants.centre):
        assert ask(server, "GET", 1, **by("b"))[0].status == 404
    assert ask(one, "PUT", GENERATION, b"1", **by("a"))[0].status == 200
    assert ask(two, "GET", 1, Force_Latest="1", **by("a"))[0].status == 404
    assert tenants.centre.records.generation("b", SPACE) == 0


def test_a_wiped_centre_recovers_what_tenants_invalidated(tenants: World) -> None:
    assert ask(tenants.regions[0], "PUT", GENERATION, b"1", **by("a"))[0].status == 200
    tenants.centre.stop()
    centre = RunningServer(tenants.centre.settings)
    centre.start()
    try:
        wait_until(lambda: ask(centre, "GET", 1, **by("a"))[0].status == 404, "the centre to answer")
        assert [centre.records.generation(tenant, SPACE) for tenant in ("a", "b")] == [1, 0]
    finally:
        centre.stop()


def test_region_may_not_act_for_a_tenant_that_its_grant_does_not_name(tenants: World) -> None:
    one, two = tenants.regions
    put(one, 1, **by("b"))
    assert ask(one, "GET", 1, **by("b"))[1] == object_bytes(1), "it stays in its region"
    answer, _ = ask(two, "GET", 1, Force_Latest="1", **by("b"))
    assert answer.status == 503, "nobody may say that it is not there"
    answer, content = ask(one, "PUT", GENERATION, b"1", **by("b"))
    assert answer.status == 403 and b"may not ask for that tenant" in content
    assert ask(tenants.centre, "GET", 1, Tenant="b", **by("relay"))[0].status == 403
    assert ask(tenants.centre, "GET", 1, Tenant="b", **by("a"))[0].status == 403
    assert ask(tenants.centre, "GET", 1, Tenant="../a", **by("relay"))[0].status == 403
    assert ask(tenants.centre, "GET", "/metrics", Tenant="a", **by("relay"))[0].status == 403
    listed = ask(tenants.centre, "GET", "/v1/records", **by("b"))[1]
    assert b'"records":[]' in listed


def test_grant_names_tenants() -> None:
    with pytest.raises(ValueError, match="on_behalf_of"):
        Grant(tenant="a", scopes=[], token_sha256=token_digest("x"), on_behalf_of=["a/b"])


def test_centre_and_regions_talk_under_tls_with_certificates(certificates: Path, tmp_path: Path) -> None:
    tls = TlsSettings(
        cert_file=certificates / "server.pem",
        key_file=certificates / "server.key",
        client_ca_file=certificates / "ca.pem",
    )
    words = [("ca_file", "ca.pem"), ("cert_file", "client.pem"), ("key_file", "client.key")]
    option = "?" + "&".join(f"{name}={certificates / file}" for name, file in words)
    with ExitStack() as stack:
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
    tier = http_tier(two.url, SystemClock())
    tier.open()
    before = asked_for_objects(world.centre)
    assert tier.count_leading([object_id(number) for number in range(100)]) == 30
    assert asked_for_objects(world.centre) - before <= 4
    tier.close()


def asked_for_objects(server: RunningServer) -> float:
    asked = [(route, status) for route in ("object", "exists") for status in ("200", "404")]
    return sum(counted(server, "kvtide_requests_total", route=route, status=status) for route, status in asked)
