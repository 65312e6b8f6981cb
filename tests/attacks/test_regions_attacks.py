"""Regions, their centre and records under attack: floods, leaps, silence, loss and clocks that go back."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.server.worlds import World, ask, put
from tests.servers import RunningServer, running_server

from kvtide.bench.services import wait_until
from kvtide.clock import SystemClock
from kvtide.server.auth import Grant, Scope, new_token, token_digest
from kvtide.server.names import Names
from kvtide.testing.tier_suite import object_bytes, object_id
from kvtide.tier.records import raise_to, records_clients
from kvtide.types import BlockKey, Name, NamedId, Namespace, ObjectId
from kvtide.wire.records import RecordKind, RecordName

SPACE = object_id(1).namespace
GENERATION = f"/v1/records/generation/{SPACE.hex()}"
TOKENS = {name: new_token() for name in ("a", "b", "relay")}
OWN = tuple(
    Grant(tenant=name, scopes=[Scope.READ, Scope.WRITE], token_sha256=token_digest(TOKENS[name])) for name in ("a", "b")
)
RELAY = Grant(
    tenant="regions", scopes=[Scope.READ, Scope.WRITE], token_sha256=token_digest(TOKENS["relay"]), on_behalf_of=["*"]
)


def by(name: str) -> dict[str, str]:
    return {"Own_Authorization": f"Bearer {TOKENS[name]}"}


@pytest.fixture
def tenants(tmp_path: Path) -> Iterator[World]:
    (tmp_path / "token").write_text(TOKENS["relay"])
    option = f"?token_file={tmp_path / 'token'}"
    with ExitStack() as stack:
        central: dict[str, object] = {"grants": (*OWN, RELAY)}
        yield World(tmp_path, stack, central, options=(option, option), grants=(*OWN, RELAY))


@pytest.fixture
def guarded() -> Iterator[RunningServer]:
    with running_server(grants=(*OWN, RELAY)) as server:
        yield server


def made_up(number: int) -> Namespace:
    return Namespace(hashlib.sha256(f"made up {number}".encode()).digest())


def test_look_ups_of_one_tenant_do_not_keep_the_objects_of_another_from_the_centre(tenants: World) -> None:
    one = tenants.regions[0]
    region = one.region
    assert region is not None and region.synchroniser is not None
    # Nothing is sent while the flood comes.
    region.synchroniser._sending.close()
    put(one, 1, **by("a"))
    for number in range(5000):
        one.backing.names.ids("b", made_up(number), [BlockKey(bytes(32))])
    for number in range(3):
        assert ask(one, "POST", f"/v1/{made_up(number).hex()}/exists", b'{"keys": []}', **by("b"))[0].status == 200
    region.synchroniser._sending.open()
    wait_until(lambda: ask(tenants.centre, "HEAD", 1, **by("a"))[0].status == 200, "the centre to have it", 20)
    assert region.synchroniser.given_up == 0


def test_what_was_read_through_and_what_waits_have_names_after_a_restart(tenants: World) -> None:
    one = tenants.regions[0]
    assert one.region is not None and one.region.synchroniser is not None
    one.region.synchroniser._sending.close()
    put(one, 1, **by("a"))
    manifest = one.region._manifest
    assert manifest is not None
    manifest.close()
    manifest.open()
    waiting = manifest.next()
    assert waiting is not None and waiting.name == Name("a", SPACE, 0)


def test_events_never_guess_a_name() -> None:
    names = Names(lambda tenant, namespace: 0)
    hidden = ObjectId(names.place("a", SPACE), BlockKey(bytes(32)))
    assert names.own(hidden) is None, "not the place where it is stored"
    (named,) = names.ids("a", SPACE, [hidden.key])
    assert names.own(named) == ObjectId(SPACE, hidden.key)


def test_many_names_of_one_tenant_leave_those_of_others() -> None:
    names = Names(lambda tenant, namespace: 0, names_max=16)
    (mine,) = names.ids("a", SPACE, [BlockKey(bytes(32))])
    names.note(mine)
    for number in range(100):
        for each in names.ids("b", made_up(number), [BlockKey(bytes(32))]):
            names.note(each)
    assert names.find(mine.namespace) == Name("a", SPACE, 0)
    assert len(names._names) == 16


@pytest.mark.parametrize("leap", ["7", "999999999999", "999999999999999999"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_no_reading_request_writes_a_record(guarded: RunningServer, method: str, leap: str) -> None:
    put(guarded, 1, **by("a"))
    assert ask(guarded, method, 1, Generation=leap, **by("a"))[0].status == 404
    assert guarded.records.generation("a", SPACE) == 0
    assert ask(guarded, method, 1, **by("a"))[0].status == 200


def test_a_tenant_raises_its_generation_by_one_at_a_time(guarded: RunningServer) -> None:
    far = "999999999999"
    assert ask(guarded, "PUT", 1, object_bytes(1), Generation=far, **by("a"))[0].status == 409
    assert guarded.records.generation("a", SPACE) == 1
    assert ask(guarded, "PUT", GENERATION, far.encode(), **by("a"))[0].status == 409
    assert ask(guarded, "PUT", GENERATION, b"2", **by("a"))[0].status == 200
    assert guarded.records.generation("a", SPACE) == 2


def test_another_server_gives_back_what_was_lost_but_no_leap(guarded: RunningServer) -> None:
    assert ask(guarded, "PUT", 1, object_bytes(1), Generation="9", Tenant="a", **by("relay"))[0].status == 201
    assert guarded.records.generation("a", SPACE) == 9
    assert ask(guarded, "PUT", GENERATION, b"999999999999", Tenant="a", **by("relay"))[0].status == 409
    assert ask(guarded, "PUT", GENERATION, b"20", Tenant="a", **by("relay"))[0].status == 200


def test_an_open_server_can_still_be_invalidated_after_an_attempt_to_end_that() -> None:
    with running_server() as server:
        for value in ("999999999999", "999999999999999999"):
            ask(server, "GET", 1, Generation=value)
            ask(server, "PUT", 1, object_bytes(1), Generation=value)
            ask(server, "PUT", GENERATION, value.encode())
        known = server.records.generation("", SPACE)
        assert known < 10_000
        assert ask(server, "PUT", GENERATION, str(known + 1).encode())[0].status == 200


def test_ids_with_a_name_are_equal_to_those_without() -> None:
    named = NamedId.of(object_id(1), Name("a", SPACE, 3))
    assert named == object_id(1) and hash(named) == hash(object_id(1))
    assert {object_id(1): 1}[named] == 1


def test_a_server_that_is_far_behind_is_brought_up_by_its_tenant(guarded: RunningServer, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKENS["a"])
    (client,) = records_clients(f"{guarded.url}?token_file={tmp_path / 'token'}", SystemClock())
    with client:
        assert raise_to(client, RecordName(RecordKind.GENERATION, SPACE.hex()), 5).value == "5"
