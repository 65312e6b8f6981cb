"""What tenants may have on a server, and clients behind a proxy."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, Mock

import pytest
from tests.attacks.floods import GRANTS, ask
from tests.server.worlds import logged, path_of, token_of
from tests.servers import RunningServer, running_server
from tests.suites.tier_suite import object_bytes, object_id

from kvtide.server.auth import Proxies
from kvtide.server.logs import ACCESS_LOGGER
from kvtide.server.quotas import Quota, Stored
from kvtide.server.settings import ServerLimits, read_settings
from kvtide.types import Name, NamedId
from kvtide_lab.bench.services import valkey_server, wait_until

SIZE = 10_000
NAMESPACE = object_id(1).namespace.hex()


def put(server: RunningServer, number: int, who: str = "victim", size: int = SIZE) -> tuple[int, str]:
    answer, body = ask(server, "PUT", path_of(number), who, object_bytes(number, size))
    return answer.status, json.loads(body)["error"] if body else ""


def held(server: RunningServer, who: str = "victim") -> Stored | None:
    return next((each for each in server.service.quotas.stored() if each.tenant == who), None)


@pytest.fixture(params=["memory", "disk", "both"])
def tiers(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, ...]:
    disk = f"disk://{tmp_path / 'store'}"
    return {"memory": ("memory://",), "disk": (disk,), "both": ("memory://", disk)}[str(request.param)]


def test_full_quota_is_a_507_that_names_it_and_others_go_on(tiers: tuple[str, ...]) -> None:
    quotas = {"victim": Quota(bytes_max=3 * SIZE), "*": Quota(objects_max=1)}
    with running_server(grants=GRANTS, tiers=tiers, quotas=quotas) as server:
        assert [put(server, number)[0] for number in (1, 2, 3)] == [201] * 3
        status, why = put(server, 4)
        assert (status, "bytes_max is 30000, 40000 were needed" in why) == (507, True)
        assert put(server, 4, "attacker")[0] == 201
        assert (put(server, 5, "attacker")[0], "objects_max is 1" in put(server, 5, "attacker")[1]) == (507, True)
        assert ask(server, "DELETE", path_of(1))[0].status == 204
        assert put(server, 4)[0] == 201
        metrics = ask(server, "GET", "/metrics")[1].decode()
        assert held(server) == Stored("victim", 3, 3 * SIZE)
    assert f'kvtide_tenant_stored_bytes{{tenant="victim"}} {3 * SIZE}.0' in metrics
    assert f'kvtide_tenant_quota_bytes{{tenant="victim"}} {3 * SIZE}.0' in metrics
    assert 'kvtide_tenant_quota_objects{tenant="*"} 1.0' in metrics


def test_quota_holds_over_a_restart_and_a_raised_generation(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"tiers": (f"disk://{tmp_path}",), "quotas": {"victim": Quota(objects_max=3)}}
    with running_server(grants=GRANTS, **settings) as server:
        assert (put(server, 1)[0], put(server, 9, "attacker")[0]) == (201, 201)
        assert ask(server, "PUT", f"/v1/records/generation/{NAMESPACE}", body=b"1")[0].status == 200
        assert (put(server, 1)[0], put(server, 2)[0], put(server, 3)[0]) == (201, 201, 507)
    with running_server(grants=GRANTS, **settings) as server:
        assert (held(server), held(server, "attacker")) == (Stored("victim", 3, 3 * SIZE), Stored("attacker", 1, SIZE))
        assert put(server, 3)[0] == 507


def test_what_is_evicted_counts_no_longer() -> None:
    limits = ServerLimits(memory_bytes_max=1 << 20)
    with running_server(grants=GRANTS, limits=limits, quotas={"victim": Quota(bytes_max=1 << 30)}) as server:
        assert all(put(server, number, size=100_000)[0] == 201 for number in range(30))
        found = held(server)
        tier = server.store.tier_stats()[0]
        assert found is not None and found.objects == tier.objects < 30


def test_what_is_evicted_before_it_is_counted_counts_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_server(grants=GRANTS, quotas={"victim": Quota(objects_max=1)}) as server:
        (memory,) = server.store.open_tiers.values()
        put_from = memory.put_from

        def evicted(*args: Any) -> bool:
            return put_from(*args) and memory.delete(args[0], "evicted")

        monkeypatch.setattr(memory, "put_from", evicted)
        assert [put(server, number)[0] for number in (1, 2)] == [201, 201]
        assert held(server) is None


def test_what_others_removed_counts_no_longer(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"tiers": (f"disk://{tmp_path}",), "quotas": {"victim": Quota(objects_max=1)}}
    with running_server(grants=GRANTS, **settings) as server, running_server(grants=GRANTS, **settings) as other:
        assert (put(server, 1)[0], ask(other, "DELETE", path_of(1))[0].status) == (201, 204)
        assert (ask(server, "GET", path_of(1))[0].status, held(server), put(server, 2)[0]) == (404, None, 201)
        for segment in (tmp_path / "segments").iterdir():
            segment.unlink()
        # Whoever looks for anything learns of it.
        assert (ask(server, "GET", path_of(3))[0].status, held(server), put(server, 3)[0]) == (404, None, 201)


def test_refused_and_broken_uploads_take_nothing_of_the_quota() -> None:
    with running_server(grants=GRANTS, quotas={"victim": Quota(objects_max=1)}) as server:
        for _ in range(3):
            assert ask(server, "PUT", path_of(2), body=object_bytes(1))[0].status == 422
        assert put(server, 1)[0] == 201
        assert held(server) == Stored("victim", 1, SIZE)


def test_objects_expire_and_make_room(tiers: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtide.server.service._EXPIRY_S", 0.2)
    with running_server(grants=GRANTS, tiers=tiers, quotas={"victim": Quota(objects_max=1, ttl_s=0.5)}) as server:
        look = Mock(wraps=server.service.quotas.expired, side_effect=[RuntimeError("no thread"), *[DEFAULT] * 1000])
        monkeypatch.setattr(server.service.quotas, "expired", look)
        assert (put(server, 1)[0], put(server, 2)[0]) == (201, 507)
        assert put(server, 7, "attacker")[0] == 201
        wait_until(lambda: held(server) is None, "the end of the object")
        answer, _ = ask(server, "GET", path_of(1))
        assert (answer.status, answer.headers["Kvtide-Removed"]) == (404, "expired")
        assert put(server, 2)[0] == 201
        assert ask(server, "GET", path_of(7), "attacker")[0].status == 200


def test_object_that_is_stored_again_after_its_time_is_a_new_one(tiers: tuple[str, ...]) -> None:
    with running_server(grants=GRANTS, tiers=tiers, quotas={"victim": Quota(ttl_s=0.3)}) as server:
        assert put(server, 1)[0] == 201
        wait_until(lambda: bool(server.service.quotas.expired()), "the end of its time")
        assert put(server, 1)[0] == 201


def test_finer_object_counts_by_its_own_size(tiers: tuple[str, ...]) -> None:
    with running_server(grants=GRANTS, tiers=tiers, quotas={"victim": Quota(bytes_max=10 * SIZE)}) as server:
        for size, quality in ((SIZE, 0.5), (5 * SIZE, 0.0)):
            assert ask(server, "PUT", path_of(1), body=object_bytes(1, size, quality))[0].status == 201
            assert held(server) == Stored("victim", 1, size)


def test_object_counts_for_the_tenant_in_its_name() -> None:
    """However many namespaces were asked for while it came."""
    with running_server(grants=GRANTS, quotas={"*": Quota(objects_max=1)}) as server:
        name = Name("victim", object_id(1).namespace, 0)
        server.service.quotas.placed(NamedId.of(object_id(1), name), 0, SIZE)
        assert held(server) == Stored("victim", 1, SIZE)


def test_what_a_tier_behind_the_server_has_is_not_counted() -> None:
    with valkey_server() as behind:
        tiers = ("memory://", f"valkey://127.0.0.1:{behind.port}?wait_s_max=20")
        with running_server(grants=GRANTS, tiers=tiers, quotas={"victim": Quota(objects_max=1)}) as server:
            for number in (1, 2):
                assert put(server, number)[0] == 201
                assert ask(server, "DELETE", path_of(number))[0].status == 204
                assert held(server) is None


def test_many_objects_of_one_tenant_leave_some_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtide.server.quotas.COUNTED_MAX", 8)
    monkeypatch.setattr("kvtide.server.quotas.COUNTED_RESERVED", 2)
    with running_server(grants=GRANTS, quotas={"*": Quota(bytes_max=1 << 30)}) as server:
        assert [put(server, number, "attacker")[0] for number in range(9)] == 8 * [201] + [507]
        assert [put(server, number)[0] for number in range(2)] == [201, 507]


def test_what_expires_in_a_region_stays_at_its_centre(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A busy machine is no silent centre.
    monkeypatch.setattr("kvtide.server.regions.LATEST_S_MAX", 15.0)
    region_of: dict[str, Any] = {"manifest": tmp_path / "manifest", "quotas": {"*": Quota(ttl_s=0.3)}}
    with running_server() as centre, running_server(grants=GRANTS, central=centre.url, **region_of) as region:
        assert put(region, 1)[0] == 201
        wait_until(lambda: not len(region.backing.synchroniser.manifest), "the centre to have it")
        wait_until(lambda: bool(region.service.quotas.expired()), "the end of its time")
        assert ask(region, "GET", path_of(1))[0].status == 200


def test_region_counts_what_it_has_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtide.server.regions.LATEST_S_MAX", 15.0)
    region_of: dict[str, Any] = {"manifest": tmp_path / "manifest", "quotas": {"*": Quota(objects_max=1)}}
    with running_server() as centre, running_server(grants=GRANTS, central=centre.url, **region_of) as region:
        assert (put(region, 1)[0], put(region, 2)[0]) == (201, 507)
        assert held(region) == Stored("victim", 1, SIZE)
        wait_until(lambda: not len(region.backing.synchroniser.manifest), "the centre to have it")
        assert region.backing.local.delete(next(region.backing.local.objects()).id, "evicted")
        assert put(region, 2)[0] == 201
        assert (ask(region, "GET", path_of(1))[0].status, held(region)) == (200, Stored("victim", 1, SIZE))


# Clients behind a proxy: told apart by what a trusted one says, and by nothing that anybody else does.

PROXY: dict[str, Any] = {"trusted_proxies": ("127.0.0.1",)}


@contextmanager
def asked(server: RunningServer, client: str, who: str = "") -> Iterator[bytes]:
    """Ask for the metrics as a proxy that names a client; give the answer's beginning."""
    token = f"Authorization: Bearer {token_of(who)}\r\n" if who else ""
    with server.connect() as sock:
        sock.sendall(f"GET /metrics HTTP/1.1\r\nHost: x\r\n{token}X-Forwarded-For: {client}\r\n\r\n".encode())
        yield sock.recv(1000)


def status(server: RunningServer, client: str, who: str = "") -> int:
    with asked(server, client, who) as answer:
        return int(answer[9:12])


def test_strangers_header_counts_for_nothing(tmp_path: Path) -> None:
    with logged(ACCESS_LOGGER, tmp_path / "access") as lines:
        with running_server(trusted_proxies=("10.0.0.0/8",)) as server:
            assert status(server, "10.9.9.9") == 200
        assert {line["address"] for line in lines()} == {"127.0.0.1"}


def test_chain_is_believed_up_to_the_first_address_that_is_not_trusted() -> None:
    proxies = Proxies(("127.0.0.1", "10.0.0.0/8", "unix"))
    for text, client in (
        ("6.6.6.6, 192.0.2.1", "192.0.2.1"),
        ("6.6.6.6, 192.0.2.1, 10.0.0.5", "192.0.2.1"),
        ("10.0.0.9, 10.0.0.5", "10.0.0.9"),
        ("192.0.2.1, nonsense, 10.0.0.5", "10.0.0.5"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("", "127.0.0.1"),
    ):
        assert proxies.client_of({"x-forwarded-for": text}, "127.0.0.1") == client
    assert proxies.client_of({"x-forwarded-for": "192.0.2.1"}, "unix") == "192.0.2.1"
    assert proxies.client_of({"x-forwarded-for": "192.0.2.1"}, "192.0.2.9") == "192.0.2.9"


def test_strangers_behind_one_proxy_have_a_rate_each() -> None:
    limits = ServerLimits(stranger_requests_s_max=1, head_s_max=0.2)
    with running_server(grants=GRANTS, limits=limits, **PROXY) as server:
        assert [status(server, "192.0.2.1") for _ in range(3)] == [401, 429, 429]
        assert status(server, "192.0.2.2") == 401
        assert status(server, "192.0.2.1", who="victim") == 200


def test_proxy_may_have_more_connections_than_one_client() -> None:
    with running_server(limits=ServerLimits(tenant_connections_max=2), **PROXY) as server, ExitStack() as stack:
        for number in range(6):
            assert stack.enter_context(asked(server, f"192.0.2.{number}")).startswith(b"HTTP/1.1 200 ")


def test_proxy_that_cannot_be_meant_is_an_error_at_the_start() -> None:
    with pytest.raises(ValueError, match="proxy"):
        read_settings(None, {"trusted_proxies": ["proxy.example"]})
