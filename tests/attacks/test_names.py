"""Names that somebody makes up: they displace nobody's."""

from __future__ import annotations

from tests.attacks.floods import GRANTS, TOKENS, ask
from tests.server.worlds import World, path_of, put
from tests.server.worlds import ask as ask_world
from tests.servers import counted, running_server

from kvtide.server.auth import Grant, Scope, new_token, token_digest
from kvtide.server.settings import ServerLimits
from kvtide.testing.tier_suite import object_bytes

OBJECT = path_of(1)


def test_made_up_tenants_leave_named_ones_their_labels() -> None:
    token = new_token()
    relay = Grant(tenant="relay", scopes=list(Scope), token_sha256=token_digest(token), on_behalf_of=["*"])
    with running_server(grants=(*GRANTS, relay)) as server:
        ask(server, "PUT", OBJECT, body=object_bytes(1))
        metrics = server.service.metrics
        for number in range(100):
            metrics.count_sent(f"junk-{number}", 1)
        ask(server, "GET", OBJECT, "victim")
        ask(server, "PUT", OBJECT, "second", object_bytes(1))
        assert metrics.label("second") == "second"
        assert all(counted(server, "kvtide_received_bytes_total", tenant=name) for name in ("victim", "second"))
        assert counted(server, "kvtide_sent_bytes_total", tenant="(others)")


def test_made_up_tenants_have_no_rate_of_their_own() -> None:
    token = new_token()
    relay = Grant(tenant="relay", scopes=list(Scope), token_sha256=token_digest(token), on_behalf_of=["*", "known"])
    TOKENS["relay"] = token
    with running_server(grants=(*GRANTS, relay), limits=ServerLimits(tenant_requests_s_max=0.2)) as server:
        junk = [ask(server, "GET", "/v1", "relay", Kvtide_Tenant=f"junk-{n}")[0].status for n in range(20)]
        assert 429 in junk
        assert ask(server, "GET", "/v1", "relay", Kvtide_Tenant="known")[0].status == 200
    with running_server(limits=ServerLimits(tenant_requests_s_max=0.2)) as server:
        assert 429 in [ask(server, "GET", "/v1", "", Kvtide_Tenant=f"junk-{n}")[0].status for n in range(20)]


def test_what_is_brought_from_another_region_takes_a_buffer(world: World) -> None:
    east, west = world.regions
    put(east, 1)
    buffers = west.service.buffers
    all_of_them = buffers.take(west.settings.limits.buffer_bytes_max)
    assert all_of_them is not None
    assert ask_world(west, "GET", 1, Force_Latest="1")[0].status == 503
    buffers.give_back(all_of_them)
    assert ask_world(west, "GET", 1, Force_Latest="1")[1] == object_bytes(1)
