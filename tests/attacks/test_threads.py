"""Slow tiers and floods of one tenant: threads and look-ups are shared, and a deadline holds wherever one waits."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from tests.attacks.floods import GRANTS, ask, head
from tests.server.worlds import path_of
from tests.servers import RunningServer, running_server

from kvtide.server.http.shares import Rates
from kvtide.server.settings import ServerLimits
from kvtide.testing.tier_suite import object_bytes, object_id
from kvtide.tier.base import WrappedTier
from kvtide_lab.bench.services import wait_until

OBJECT = path_of(1)
SPACE = OBJECT.rpartition("/")[0]


class Blocked(WrappedTier):
    """A tier whose verbs wait until it is let go. It can't lend."""

    def __init__(self, inner: object, verbs: set[str]) -> None:
        super().__init__(inner)  # type: ignore[arg-type]
        self.verbs = verbs
        self.waiting = 0
        self.go_on = threading.Event()

    def before(self, verb: str, size: int) -> None:
        if verb in self.verbs:
            self.waiting += 1
            self.go_on.wait(20)
            self.waiting -= 1


@contextmanager
def blocked(server: RunningServer, *verbs: str) -> Iterator[Blocked]:
    """Let a server's only tier hang."""
    store = server.store
    tier = store._open[0].tier = Blocked(store._open[0].tier, set(verbs))
    try:
        yield tier
    finally:
        tier.go_on.set()
        wait_until(lambda: not tier.waiting, "the calls to come back")


@contextmanager
def asking(count: int, action: Callable[[int], object]) -> Iterator[None]:
    with ThreadPoolExecutor(count) as threads:
        asked = [threads.submit(action, number) for number in range(count)]
        yield
        for each in asked:
            each.result()


@pytest.mark.parametrize("limits", [ServerLimits(), ServerLimits(io_threads=2)])
def test_slow_reads_of_one_tenant_leave_threads_to_others(limits: ServerLimits) -> None:
    with running_server(grants=GRANTS, limits=limits) as server:
        assert ask(server, "PUT", OBJECT, body=object_bytes(1))[0].status == 201
        with blocked(server, "get") as tier:
            absent = [path_of(number) for number in range(10, 22)]
            with asking(12, lambda number: ask(server, "GET", absent[number], "attacker")):
                wait_until(lambda: tier.waiting >= max(1, limits.io_threads - 1), "the attacker's calls to hang")
                tier.verbs.clear()
                assert ask(server, "GET", OBJECT)[1] == object_bytes(1)
                assert ask(server, "PUT", path_of(2), body=object_bytes(2))[0].status == 201
                assert tier.waiting
                tier.go_on.set()


def test_slow_reads_leave_a_thread_to_who_writes() -> None:
    with running_server() as server, blocked(server, "get") as tier:
        absent = [path_of(number) for number in range(10, 22)]
        with asking(12, lambda number: ask(server, "GET", absent[number], "")):
            wait_until(lambda: tier.waiting >= 3, "the calls to hang")
            assert ask(server, "PUT", OBJECT, "", object_bytes(1))[0].status == 201
            tier.go_on.set()


@pytest.mark.parametrize(
    ("method", "path", "body", "verb"),
    [
        ("GET", OBJECT, None, "get"),
        ("HEAD", OBJECT, None, "get"),
        ("PUT", OBJECT, object_bytes(1), "put"),
        ("DELETE", OBJECT, None, "delete"),
        ("POST", f"{SPACE}/exists", json.dumps({"keys": [object_id(1).key.hex()]}).encode(), "contains"),
    ],
)
def test_deadline_holds_while_a_tier_hangs(method: str, path: str, body: bytes | None, verb: str) -> None:
    with running_server(limits=ServerLimits(io_threads=1)) as server, blocked(server, verb) as tier:
        for _ in range(3):
            started_s = time.monotonic()
            answer, _ = ask(server, method, path, "", body, Kvtide_Deadline_Ms="200")
            assert answer.status == 504
            assert time.monotonic() - started_s < 15
        # A call whose time was over before its thread began has not begun at all.
        assert tier.waiting <= 1
        tier.go_on.set()
        wait_until(lambda: not tier.waiting, "the call to come back")
        tier.verbs.clear()
        assert ask(server, "GET", "/v1", "")[0].status == 200


def test_deadline_counts_from_the_first_byte_and_ends_an_upload() -> None:
    with running_server() as server, server.connect() as sock:
        started_s = time.monotonic()
        sock.sendall(head("PUT", OBJECT, Content_Length=1000, Kvtide_Deadline_Ms=5000)[:-2])
        time.sleep(4.0)
        sock.sendall(b"\r\nx")
        assert sock.recv(1000).startswith(b"HTTP/1.1 504 ")
        # From the end of the head it would be nine seconds.
        assert time.monotonic() - started_s < 8.5


def test_look_ups_of_many_keys_cost_as_many_requests() -> None:
    keys = json.dumps({"keys": [object_id(number).key.hex() for number in range(1000)]}).encode()
    with running_server(grants=GRANTS, limits=ServerLimits(tenant_requests_s_max=500)) as server:
        assert ask(server, "POST", f"{SPACE}/exists", "attacker", keys)[0].status == 200
        assert ask(server, "POST", f"{SPACE}/exists", "attacker", keys)[0].status == 429
        assert ask(server, "POST", f"{SPACE}/exists", "victim", keys)[0].status == 200
    leading = keys.replace(b"}", b', "leading_only": true}')
    with running_server(grants=GRANTS, limits=ServerLimits(tenant_requests_s_max=500)) as server:
        for _ in range(5):
            assert ask(server, "POST", f"{SPACE}/exists", "attacker", leading)[0].status == 200


def test_rates_forget_who_has_not_asked_for_a_while() -> None:
    rates = Rates(lambda: 10.0)
    for number in range(5000):
        rates.take(f"junk-{number}", number / 1000)
    assert len(rates) < 1200
    rates.take("one", 100.0)
    assert len(rates) <= 64
    bounded = Rates(lambda: 10.0, owners_max=80)
    for number in range(100):
        bounded.take(str(number), 0.0)
    assert len(bounded) == 80
