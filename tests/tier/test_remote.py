"""The parts of the remote tier that need no server, and what it makes of answers that are off."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.stores import opened

from kvtide.clock import ManualClock, SystemClock
from kvtide.errors import TierUnavailable
from kvtide.testing.tier_suite import object_bytes, object_id
from kvtide.tier.breaker import Breaker
from kvtide.tier.http.tier import http_tier
from kvtide.tier.stack import TierStack


def test_breaker_opens_tries_once_and_closes(clock: ManualClock) -> None:
    breaker = Breaker(2, 5.0, clock)
    breaker.note_fault()
    assert breaker.allows()
    breaker.note_fault()
    assert breaker.is_open and not breaker.allows()
    clock.advance(5.0)
    assert breaker.allows() and not breaker.allows()
    breaker.note_success()
    assert breaker.allows() and not breaker.is_open


def test_failed_trial_keeps_the_breaker_open(clock: ManualClock) -> None:
    breaker = Breaker(1, 5.0, clock)
    breaker.note_fault()
    clock.advance(5.0)
    assert breaker.allows()
    breaker.note_fault()
    clock.advance(4.9)
    assert not breaker.allows()


@pytest.mark.parametrize(("faults_max", "open_s"), [(0, 1.0), (1, 0.0)])
def test_breaker_needs_positive_bounds(faults_max: int, open_s: float, clock: ManualClock) -> None:
    with pytest.raises(ValueError, match="positive"):
        Breaker(faults_max, open_s, clock)


@contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """Run a server that gives every request this answer and closes."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while self.rfile.readline().strip():
                continue
            self.wfile.write(answer)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


PART = b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes %s\r\nContent-Length: %d\r\n\r\n%s"


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
        b"HTTP/1.1 206 Partial Content\r\nContent-Length: 5\r\n\r\nhello",
        PART % (b"0-4/5", 5, b"hell"),
        PART % (b"1-5/6", 5, b"hello"),
        PART % (b"0-4/9", 5, b"hello"),
        PART % (b"0-3/4", 5, b"hello"),
        PART % (b"0-199/200", 200, b"x" * 200),
        b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 99999999\r\n\r\n",
        b"HTTP/1.1 206 Partial Content\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    ],
)
def test_answer_that_is_off_is_a_fault_and_a_miss_upstairs(answer: bytes) -> None:
    with answering(answer) as url:
        tier = http_tier(url, SystemClock())
        stack = TierStack([tier])
        stack.open()
        buffer = memoryview(bytearray(100))
        with pytest.raises(TierUnavailable):
            tier.get_into(object_id(1), buffer)
        assert stack.get_into(object_id(1), buffer) is None
        assert tier.stats().faults >= 1
        tier.check()
        stack.close()


def test_nobody_listening_is_a_fault_for_every_verb() -> None:
    with opened(http_tier("http://127.0.0.1:1", SystemClock())) as tier:
        for action in (
            lambda: tier.contains(object_id(1)),
            lambda: tier.get_into(object_id(1), memoryview(bytearray(1))),
            lambda: tier.put_from(object_id(1), object_bytes(1)),
            lambda: tier.delete(object_id(1), "removed"),
            lambda: list(tier.objects()),
        ):
            with pytest.raises(TierUnavailable):
                action()
        assert tier.removed_reason(object_id(1)) is None
        assert tier.stats().objects == 0
