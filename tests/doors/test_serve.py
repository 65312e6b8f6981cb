"""Doors of `kvtide serve`: each flag or setting shows in what a process of its own answers."""

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from tests.attacks.floods import head
from tests.doors.register import door
from tests.doors.user import BLOCK, PROMPT, grant, serving, status
from tests.server.worlds import ask, bearer, metric, path_of, put, stalled
from tests.suites.tier_suite import object_bytes, object_id

from kvtide.engines.transformers import attach
from kvtide_lab.bench.services import wait_until

BOTH = grant("search") + grant("chat")


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


@door("idle connections and slow heads")
def test_connection_that_says_nothing_is_closed(tmp_path: Path) -> None:
    limits = "[limits]\nhead_s_max = 0.2\n"
    with serving(tmp_path, limits) as server:
        for said in (b"", b"GET / HT"):
            with socket.create_connection(("127.0.0.1", server.port), 10) as slow:
                slow.sendall(said)
                assert slow.recv(1) == b""


@door("order within a tenant")
@pytest.mark.parametrize(("urgency", "place"), [("u=0", 0), ("u=7", 3)])
def test_urgent_body_goes_before_the_tenants_others(tmp_path: Path, urgency: str, place: int) -> None:
    log, who, hog = tmp_path / "log", bearer("search"), bearer("hog")
    settings = f"[limits]\nstall_s_max = 60\n[sending]\nslots = 1\nslice_bytes = 65536\n{BOTH}{grant('hog')}"
    with serving(tmp_path, settings, "--access-log", str(log)) as server, ThreadPoolExecutor(4) as threads:
        for number, size, owner in ((1, 1 << 20, who), (2, 1 << 16, who), (3, 16 << 20, hog)):
            put(server, number, size, **owner)

        def waiting(count: int) -> None:
            wait_until(lambda: metric(server, "kvtide_waiting_sends", **who) >= count, "bodies to wait")

        def ended() -> list[int]:
            gets = (line for line in lines(log, 1) if (line["method"], line["route"]) == ("GET", "object"))
            return [line["sent_bytes"] for line in gets if line["tenant"] == "search"]

        with stalled(server, head("GET", path_of(3), "hog"), partial(metric, server, "kvtide_unsent_bytes", **hog)):
            futures = [threads.submit(ask, server, "GET", 1, **who) for _ in range(3)]
            waiting(3)
            futures.append(threads.submit(ask, server, "GET", 2, Own_Priority=urgency, **who))
            waiting(4)
        assert [future.result(30)[0].status for future in futures] == [200] * 4
        wait_until(lambda: len(ended()) == 4, "all to be logged")
        assert ended().index(min(ended())) == place


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


def lines(path: Path, count: int) -> list[Any]:
    wait_until(lambda: path.exists() and path.read_text().count("\n") >= count, "lines of the log")
    return [json.loads(line) for line in path.read_text().splitlines()]


@door("audit log")
def test_each_delete_has_a_line(tmp_path: Path) -> None:
    with serving(tmp_path, "", "--audit-log", str(tmp_path / "log")) as server:
        put(server, 1)
        assert status(server, "DELETE", 1) == 204
        (line,) = lines(tmp_path / "log", 1)
    assert object_id(1).key.hex() in json.dumps(line)


@door("access log")
@door("clients behind a proxy")
def test_client_behind_a_proxy_is_known(tmp_path: Path) -> None:
    settings = 'trusted_proxies = ["127.0.0.1"]\n'
    with serving(tmp_path, settings, "--access-log", str(tmp_path / "log")) as server:
        status(server, "GET", 1, Own_X_Forwarded_For="10.1.2.3")
        assert lines(tmp_path / "log", 1)[0]["address"] == "10.1.2.3"
