"""Doors of `kvtide serve`: each flag or setting shows in what a process of its own answers."""

import json
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from tests.doors.register import door
from tests.doors.user import BLOCK, PROMPT, Regions, grant, serving, status
from tests.processes import frozen
from tests.server.worlds import Place, ask, bearer, metric, path_of, put, stalled, token_of
from tests.servers import ServerProcess
from tests.suites.tier_suite import object_bytes, object_id

from kvtide.engines.transformers import attach
from kvtide.server.settings import ListenAddress
from kvtide_lab.bench.services import free_ports, wait_until

OPEN = 'tiers = ["memory://"]\n'
BOTH = grant("search") + grant("chat")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with grants for two tenants."""
    with serving(tmp_path_factory.mktemp("server"), BOTH) as server:
        yield server


@door("tiers of a server")
def test_disk_of_a_server_is_warm_after_a_restart(tmp_path: Path) -> None:
    flags = ("--tier", "memory://", "--tier", f"disk://{tmp_path / 'store'}")
    for found in (404, 200):
        with serving(tmp_path, "", *flags) as server:
            assert status(server, "GET", 1) == found
            assert status(server, "PUT", 1, object_bytes(1)) in {200, 201}
            assert server.terminate() == 0


@door("advice in headers")
def test_advice_of_an_engine_reaches_the_server(tiny_model: Any, tmp_path: Path) -> None:
    hints = (None, {"session": "a1", "retain_s": 60.5, "priority": -1}, {"session": "a1", "is_last": True})
    with (
        serving(tmp_path, "", "--tier", "memory://?policy=mix") as server,
        attach(tiny_model, f"http://127.0.0.1:{server.port}", block_tokens=BLOCK) as cached,
    ):
        for hint in hints:
            cached.generate(PROMPT, max_new_tokens=1, kvtide_hint=hint)
        assert cached.flush(60)
        wait_until(lambda: metric(server, "kvtide_hints_total") == 2, "the advice to come")
        assert (cached.cache.stats().hints_heard, cached.cache.stats().hints_ignored) == (2, 0)


@door("bring a prefix up before it is asked for")
def test_prefetched_object_is_in_memory_before_it_is_asked_for(tmp_path: Path) -> None:
    flags = ("--tier", "memory://", "--tier", f"disk://{tmp_path / 'store'}")
    with serving(tmp_path, "", *flags) as server:
        put(server, 1)
    with serving(tmp_path, "", *flags) as server:
        wanted = object_id(1)
        body = json.dumps({"keys": [wanted.key.hex()]}).encode()
        answer = ask(server, "POST", f"/v1/{wanted.namespace.hex()}/prefetch", body)
        assert json.loads(answer[1]) == {"queued": 1}
        wait_until(lambda: metric(server, 'kvtide_tier_objects{tier="memory"}') == 1, "the object to come up")
        assert ask(server, "POST", f"/v1/{wanted.namespace.hex()}/prefetch", b'{"keys": 3}')[0].status == 400


@door("tokens and scopes")
def test_token_and_scope_are_asked_for(tmp_path: Path) -> None:
    with serving(tmp_path, grant("search", '"read"')) as server:
        asked: tuple[dict[str, Any], ...] = ({}, {"Own_Authorization": "Bearer wrong"}, bearer("search"))
        assert [status(server, "GET", 1, **who) for who in asked] == [401, 401, 404]
        assert status(server, "PUT", 1, object_bytes(1), **bearer("search")) == 403


@door("tenants on a server")
def test_tenants_do_not_see_each_other(server: ServerProcess) -> None:
    put(server, 1, **bearer("search"))
    assert [status(server, "GET", 1, **bearer(who)) for who in ("search", "chat")] == [200, 404]


@door("largest object")
def test_larger_object_is_refused(tmp_path: Path) -> None:
    with serving(tmp_path, "[limits]\nobject_bytes_max = 2000\n") as server:
        assert [status(server, "PUT", 1, object_bytes(1, size)) for size in (2001, 2000)] == [413, 201]


@door("memory of a server")
def test_memory_of_a_server_is_bounded(tmp_path: Path) -> None:
    with serving(tmp_path, "[limits]\nmemory_bytes_max = 200000\n") as server:
        for number in range(40):
            status(server, "PUT", number, object_bytes(number, 10_000))
        assert 0 < metric(server, 'kvtide_tier_used_bytes{tier="memory"}') <= 200_000
        assert metric(server, 'kvtide_tier_evictions_total{tier="memory"}') >= 20


@door("requests of a tenant")
def test_tenant_that_asks_too_often_waits(tmp_path: Path) -> None:
    with serving(tmp_path, f"[limits]\ntenant_requests_s_max = 0.05\n{BOTH}") as server:
        assert [status(server, "GET", 1, **bearer("search")) for _ in range(2)] == [404, 429]
        assert status(server, "GET", 1, **bearer("chat")) == 404


@door("connections of a tenant")
def test_connections_of_an_address_are_bounded(tmp_path: Path) -> None:
    with serving(tmp_path, "[limits]\ntenant_connections_max = 2\n") as server, ExitStack() as stack:
        for _ in range(2):
            connection = HTTPConnection("127.0.0.1", server.port, timeout=10)
            stack.callback(connection.close)
            connection.request("GET", "/v1")
            assert connection.getresponse().status == 200
        assert status(server, "GET", "/v1") in {429, 503}


@door("idle connections and slow heads")
def test_connection_that_says_nothing_is_closed(tmp_path: Path) -> None:
    limits = "[limits]\nhead_s_max = 0.2\n"
    with serving(tmp_path, limits) as server:
        for said in (b"", b"GET / HT"):
            with socket.create_connection(("127.0.0.1", server.port), 10) as slow:
                slow.sendall(said)
                assert slow.recv(1) == b""


@door("quota of bytes and objects")
def test_put_above_the_quota_names_it(tmp_path: Path) -> None:
    quotas = '[quotas.search]\nbytes_max = 5000\n[quotas."*"]\nobjects_max = 1\n'
    with serving(tmp_path, quotas + BOTH) as server:
        refused = {}
        for who in ("search", "chat"):
            put(server, 1, 4000, **bearer(who))
            refused[who] = ask(server, "PUT", 2, object_bytes(2, 4000), **bearer(who))
        assert [answer.status for answer, _ in refused.values()] == [507, 507]
        assert b"bytes_max is 5000" in refused["search"][1] and b"objects_max is 1" in refused["chat"][1]


@door("lifetime by tenant")
def test_objects_of_a_tenant_expire(tmp_path: Path) -> None:
    with serving(tmp_path, f"[quotas.search]\nttl_s = 0.5\n{BOTH}") as server:
        for who in ("search", "chat"):
            put(server, 1, **bearer(who))
        wait_until(lambda: status(server, "GET", 1, **bearer("search")) == 404, "the object to expire")
        assert status(server, "GET", 1, **bearer("chat")) == 200


def orders_of_ends(folder: Path, sending: str, last: str = "chat", times: int = 1, **headers: Any) -> list[list[str]]:
    """Let one tenant ask for three large bodies, then `last` for a small one; return what the server ended when."""
    log = folder / "order"
    log.unlink(missing_ok=True)
    settings = f"[limits]\nstall_s_max = 60\n[sending]\nslots = 1\nslice_bytes = 65536\n{sending}\n{BOTH}{grant('hog')}"
    with serving(folder, settings, "--access-log", str(log)) as server, ThreadPoolExecutor(4) as threads:
        for number, size, who in ((1, 1 << 20, "search"), (2, 1 << 16, last), (3, 16 << 20, "hog")):
            put(server, number, size, **bearer(who))

        def waiting(count: int) -> None:
            wait_until(lambda: metric(server, "kvtide_waiting_sends", **bearer("chat")) >= count, "bodies to wait")

        def ended() -> list[str]:
            gets = (line for line in lines(log, 1) if (line["method"], line["route"]) == ("GET", "object"))
            sizes = [line["sent_bytes"] for line in gets if line["tenant"] != "hog"]
            return ["large" if size > 1 << 16 else "small" for size in sizes]

        request = f"GET {path_of(3)} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token_of('hog')}\r\n\r\n"
        for turn in range(times):
            with stalled(server, request.encode(), partial(metric, server, "kvtide_unsent_bytes", **bearer("hog"))):
                futures = [threads.submit(ask, server, "GET", 1, **bearer("search")) for _ in range(3)]
                waiting(3)
                futures.append(threads.submit(ask, server, "GET", 2, **bearer(last), **headers))
                waiting(4)
            assert [future.result(30)[0].status for future in futures] == [200] * 4
            wait_until(lambda count=4 * turn + 4: len(ended()) == count, "all to be logged")  # type: ignore[misc]
        return [ended()[4 * turn : 4 * turn + 4] for turn in range(times)]


@door("byte-fair sending")
def test_small_body_does_not_wait_for_another_tenants_large_ones(tmp_path: Path) -> None:
    assert orders_of_ends(tmp_path, 'policy = "vtc"') == [["small", "large", "large", "large"]]


@door("the report's lottery")
def test_lottery_draws_who_waits_with_little(tmp_path: Path) -> None:
    # What is large wins both draws in one of a hundred.
    lasts = [order[-1] for order in orders_of_ends(tmp_path, 'policy = "lottery"', times=3)]
    assert lasts.count("large") >= 2


@door("first come, first served")
def test_fifo_sends_in_order_of_arrival(tmp_path: Path) -> None:
    assert orders_of_ends(tmp_path, 'policy = "fifo"') == [["large", "large", "large", "small"]]


@door("order within a tenant")
def test_urgent_body_goes_before_the_tenants_others(tmp_path: Path) -> None:
    assert orders_of_ends(tmp_path, "", "search", Own_Priority="u=0")[0][0] == "small"
    assert orders_of_ends(tmp_path, "", "search", Own_Priority="u=7")[0][-1] == "small"


@door("bodies of a tenant at a time")
def test_tenant_with_too_many_bodies_is_told_to_wait(tmp_path: Path) -> None:
    with (
        serving(tmp_path, f"[sending]\nlink_bits_s = 5e5\nslice_bytes = 32768\ntenant_sends_max = 1\n{BOTH}") as server,
        ExitStack() as stack,
    ):
        # The first one takes 16 s.
        for who, size in (("search", 1 << 20), ("chat", 1000)):
            put(server, 1, size, **bearer(who))
        first = HTTPConnection("127.0.0.1", server.port, timeout=20)
        stack.callback(first.close)
        first.request("GET", path_of(1), headers={"Authorization": bearer("search")["Own_Authorization"]})
        assert first.getresponse().status == 200
        assert [status(server, "GET", 1, **bearer(who)) for who in ("search", "chat")] == [429, 200]


@door("rate of the link")
def test_bodies_go_no_faster_than_the_link_is_said_to_be(tmp_path: Path) -> None:
    with serving(tmp_path, "[sending]\nlink_bits_s = 4e6\nslice_bytes = 65536\n") as server:
        put(server, 1, 500_000)
        started_s = time.monotonic()
        assert len(ask(server, "GET", 1)[1]) == 500_000
        assert time.monotonic() - started_s > 0.3


@door("settings without a restart")
def test_hangup_reads_the_file_again(tmp_path: Path) -> None:
    with serving(tmp_path, "[limits]\nobject_bytes_max = 2000\n") as server:
        assert status(server, "PUT", 1, object_bytes(1, 3000)) == 413
        (tmp_path / "kvtide.toml").write_text("[limits]\nobject_bytes_max = 4000\n")
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: status(server, "PUT", 1, object_bytes(1, 3000)) in {200, 201}, "the new bound")


@door("health on a port of its own")
def test_health_tells_what_is_there(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    with serving(tmp_path, "", "--health", f"127.0.0.1:{port}"):
        answer, body = ask(Place(ListenAddress("127.0.0.1", port)), "GET", "/readyz")
    assert (answer.status, json.loads(body)["parts"]) == (200, {"tier memory": True})


def lines(path: Path, count: int) -> list[Any]:
    wait_until(lambda: path.exists() and path.read_text().count("\n") >= count, "lines of the log")
    return [json.loads(line) for line in path.read_text().splitlines()]


@door("access log")
def test_each_request_has_a_line(tmp_path: Path) -> None:
    with serving(tmp_path, grant("search"), "--access-log", str(tmp_path / "log")) as server:
        put(server, 1, **bearer("search"))
        (line,) = lines(tmp_path / "log", 1)
    assert (line["tenant"], line["method"], line["status"]) == ("search", "PUT", 201)
    assert line["received_bytes"] == 1000


@door("audit log")
def test_each_delete_has_a_line(tmp_path: Path) -> None:
    with serving(tmp_path, "", "--audit-log", str(tmp_path / "log")) as server:
        put(server, 1)
        assert status(server, "DELETE", 1) == 204
        (line,) = lines(tmp_path / "log", 1)
    assert object_id(1).key.hex() in json.dumps(line)


@door("clients behind a proxy")
def test_client_behind_a_proxy_is_known(tmp_path: Path) -> None:
    settings = 'trusted_proxies = ["127.0.0.1"]\n'
    with serving(tmp_path, settings, "--access-log", str(tmp_path / "log")) as server:
        status(server, "GET", 1, Own_X_Forwarded_For="10.1.2.3")
        assert lines(tmp_path / "log", 1)[0]["address"] == "10.1.2.3"


@door("metrics")
def test_metrics_count_what_was_read(server: ServerProcess) -> None:
    name = 'kvtide_object_reads_total{result="found",tenant="search"}'
    put(server, 2, **bearer("search"))
    before = metric(server, name, **bearer("chat"))
    status(server, "GET", 2, **bearer("search"))
    assert metric(server, name, **bearer("chat")) == before + 1


@door("read through from the centre")
def test_region_reads_what_only_the_centre_has(regions: Regions) -> None:
    put(regions.centre, 1)
    answer, body = ask(regions.quick, "GET", 1)
    assert (answer.status, body) == (200, object_bytes(1))
    assert float(answer.headers["Kvtide-As-Of"]) > 0


@door("synchronise with the centre")
def test_centre_gets_what_a_region_stores_at_its_rate(regions: Regions) -> None:
    # A first one would go at once, whatever the rate.
    numbers = (2, 3)
    for number in numbers:
        put(regions.quick, number)
    wait_until(lambda: all(status(regions.centre, "GET", n, Local="1") == 200 for n in numbers), "both to be there")


@door("force the latest")
def test_latest_is_found_before_it_is_synchronised(regions: Regions) -> None:
    put(regions.slow, 4)
    assert status(regions.quick, "GET", 4) == 404
    assert status(regions.quick, "GET", 4, Force_Latest="1") == 200


@door("bound on staleness")
@pytest.mark.real_time
def test_region_says_when_it_knows_too_little(regions: Regions) -> None:
    put(regions.quick, 5)
    # A centre that has just begun asks its regions first.
    wait_until(lambda: status(regions.quick, "GET", 6, Max_Staleness="9") == 404, "the centre to have begun")
    with frozen(regions.centre.process.pid):
        assert status(regions.quick, "GET", 5) == 200
        assert status(regions.quick, "GET", 6, Max_Staleness="0") == 503
    wait_until(lambda: status(regions.quick, "GET", 6, Max_Staleness="9") == 404, "the centre to be back")
