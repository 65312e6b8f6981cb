"""Bodies that a native thread moves: how they end, and what the scheduler hears of them."""

from __future__ import annotations

import asyncio
import functools
import os
import random
import socket
import tempfile
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry
from tests.server.worlds import ask
from tests.servers import running_server
from tests.suites.tier_suite import object_bytes

from kvtide.server.http.connections import Body, BodyProgress, Connection, Guest, Mover
from kvtide.server.http.exchange import Exchange
from kvtide.server.http.sender import Sender, SendOrder
from kvtide.server.http.shares import Workers
from kvtide.server.metrics import Metrics
from kvtide.server.scheduler import Scheduler, SchedulerSettings
from kvtide.server.settings import ProgressBudget
from kvtide.wire.http import RequestHead

SLICE = 64 << 10
SIZE = 4 << 20
CONTENT = random.Random(1).randbytes(SIZE)
ANY_PACE = ProgressBudget(1e9, 1.0, 0.0)


class Rig:
    """A mover and a sender with few slots, and readers at the other ends of its sockets."""

    def __init__(self, slots: int = 1) -> None:
        self.mover = Mover()
        self.mover.open()
        settings = SchedulerSettings(slots=slots, tenant_slots_max=slots, slice_bytes=SLICE)
        self.scheduler = Scheduler(settings, random.Random(0))
        self.workers = Workers(2)
        self.sender = Sender(self.scheduler, self.workers, 5.0, Metrics(CollectorRegistry()))
        self.sockets: list[socket.socket] = []

    def pair(self) -> tuple[socket.socket, socket.socket]:
        ours, theirs = socket.socketpair()
        self.sockets += [ours, theirs]
        for end in (ours, theirs):
            end.setblocking(False)
        return ours, theirs

    def sending(self, client: str) -> tuple[asyncio.Task[float], socket.socket]:
        """Send CONTENT to a reader, who is returned."""
        ours, theirs = self.pair()
        stream = Connection(ours, self.mover)
        guest, asked = Guest(client, f"@{client}", f"@{client}"), RequestHead("GET", "/", {}, None, True)
        exchange = Exchange(stream, guest, asked, 10.0)
        order = SendOrder(exchange, b"head", [memoryview(CONTENT)], ANY_PACE, lambda: False)
        return asyncio.create_task(self.sender.send(order)), theirs

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_: object) -> None:
        self.mover.close()
        self.workers.close()
        for end in self.sockets:
            end.close()
        self.scheduler.check()
        assert self.scheduler.slots_used == 0


async def read(end: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += await asyncio.wait_for(asyncio.get_running_loop().sock_recv(end, size - len(data)), 20)
    return data


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test's coroutine on an event loop."""

    @functools.wraps(test)
    def run(**given: Any) -> None:
        asyncio.run(asyncio.wait_for(test(**given), 60))

    return run


@in_loop
async def test_workers_have_all_threads_from_the_start() -> None:
    with Rig() as rig, pytest.MonkeyPatch.context() as patch:
        patch.delattr("threading.Thread.start")
        assert await rig.workers.read("a", int) == 0


@in_loop
async def test_reader_that_takes_nothing_ends_a_body_and_nothing_follows() -> None:
    with Rig() as rig:
        ours, theirs = rig.pair()
        body = Body(rig.mover, rig.mover.native.send(ours.fileno(), [memoryview(CONTENT)], 0))
        sent = await body.end(ANY_PACE, 0.05)
        ours.close()
        got = b""
        while data := await asyncio.get_running_loop().sock_recv(theirs, SIZE):
            got += data
    assert 0 < sent < SIZE and got == CONTENT[:sent]


@in_loop
async def test_cancelled_upload_writes_to_its_buffer_no_more() -> None:
    with Rig() as rig:
        ours, theirs = rig.pair()
        buffer = bytearray(SIZE)
        body = Body(rig.mover, rig.mover.native.receive(ours.fileno(), memoryview(buffer), 0))
        task = asyncio.create_task(body.end(ANY_PACE))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        theirs.send(b"x" * 1000)
        await asyncio.sleep(0.05)
        assert not rig.mover.waiting
    assert buffer == bytes(SIZE)


@in_loop
async def test_dribble_below_what_wakes_the_thread_counts_as_progress() -> None:
    with Rig() as rig:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            theirs = socket.create_connection(listener.getsockname())
            ours = listener.accept()[0]
        rig.sockets += [ours, theirs]
        ours.setblocking(False)
        looks: list[int] = []
        # No more is sent: what nobody reads may not fit between the two, and would block.
        taken = 32 << 10

        class Pace(ProgressBudget):
            def moved(self, count: int, now_s: float) -> None:
                looks.append(count)
                # A look reads the first part, so that less is left than was waited for.
                is_last = sum(looks) >= 1000
                theirs.sendall(CONTENT[1000:taken] if is_last else CONTENT[: 1000 if len(looks) == 1 else 0])
                self.due_s = asyncio.get_running_loop().time() + (60 if is_last else 0.05)

        buffer = bytearray(SIZE)
        body = Body(rig.mover, rig.mover.native.receive(ours.fileno(), memoryview(buffer)[:taken], 2 * taken))
        assert await asyncio.wait_for(body.end(Pace(1e9, 1.0, 0.0)), 30) == taken and buffer[:taken] == CONTENT[:taken]
    assert looks == [0, 1000, taken - 1000]


@pytest.mark.parametrize("is_cut", [True, False])
@in_loop
async def test_file_that_ends_early_and_peer_that_closes_are_told_apart(is_cut: bool) -> None:
    with Rig() as rig, tempfile.TemporaryFile() as file:
        ours, theirs = rig.pair()
        os.ftruncate(file.fileno(), 1000 if is_cut else SIZE)
        if not is_cut:
            theirs.close()
        body = Body(rig.mover, rig.mover.native.send_file(ours.fileno(), file.fileno(), 0, SIZE, 0))
        with pytest.raises(EOFError if is_cut else BrokenPipeError):
            await body.end(ANY_PACE)


@in_loop
async def test_body_that_nobody_waits_behind_goes_out_whole_and_is_accounted_by_slices() -> None:
    with Rig() as rig:
        task, reader = rig.sending("a")
        data = await read(reader, SIZE + 4)
        await task
        turns = rig.scheduler.enqueue("b", "b", 1, 0.0)
        rig.scheduler.cancel(turns)
    # Numbers are taken by two sends and by each of 64 slices.
    assert data == b"head" + CONTENT and turns.turn == 1 + SIZE // SLICE + 1


@in_loop
async def test_newcomer_has_its_turn_after_the_slice_that_goes_out() -> None:
    with Rig() as rig:
        first, slow = rig.sending("a")
        await read(slow, 4 + 10 * SLICE)
        second, reader = rig.sending("b")
        # The first reader takes the rest of its slice, and what its socket holds by then, and no more.
        data, came = asyncio.create_task(read(reader, 4 + SLICE)), 0
        while not data.done():
            came += len(await read(slow, 1000)) if came < 16 * SLICE else 0
            await asyncio.sleep(0)
        assert (await data) == b"head" + CONTENT[:SLICE]
        await asyncio.gather(read(reader, SIZE - SLICE), read(slow, SIZE - 10 * SLICE - came), first, second)
    assert came <= 16 * SLICE


class Ahead:
    """A body that has sent more by the time it is shortened than it had when it was asked."""

    def __init__(self, body: Body) -> None:
        self._body = body
        self._answers = [False]

    def progress(self) -> BodyProgress:
        return BodyProgress(0, 0.0)

    def shorten(self, size: int) -> bool:
        return self._answers.pop() if self._answers else self._body.shorten(size)


@in_loop
async def test_slice_that_ends_as_a_newcomer_comes_stays_with_its_send() -> None:
    with Rig() as rig:
        first, slow = rig.sending("a")
        await read(slow, 4)
        (under_way,) = rig.sender._runs.values()
        assert under_way.body is not None
        under_way.body = cast(Body, Ahead(under_way.body))
        second, reader = rig.sending("b")
        await asyncio.sleep(0)
        client = under_way.piece.send.client
        await asyncio.gather(read(slow, SIZE), read(reader, SIZE + 4), first, second)
    assert client == "a"


class Stalled:
    """A body of which nothing moves for too long."""

    async def end(self, *bounds: object) -> int:
        return 0


@in_loop
async def test_head_goes_out_once_though_nothing_of_the_body_could_follow_it(monkeypatch: pytest.MonkeyPatch) -> None:
    start, stalled = Connection.start_views, iter([cast(Body, Stalled())])
    monkeypatch.setattr(Connection, "start_views", lambda *given: next(stalled, None) or start(*given))
    with Rig() as rig:
        task, reader = rig.sending("a")
        assert await read(reader, SIZE + 4) == b"head" + CONTENT
        await task


@in_loop
async def test_bodies_that_come_and_go_beside_each_other_keep_their_slots_apart() -> None:
    with Rig(slots=2) as rig:

        async def client(name: str) -> None:
            for _ in range(3):
                task, reader = rig.sending(name)
                assert await read(reader, SIZE + 4) == b"head" + CONTENT
                await task

        await asyncio.gather(*map(client, "abcd"))


@in_loop
async def test_sender_that_is_cancelled_as_it_is_granted_gives_its_slot_back() -> None:
    with Rig() as rig:
        first, _ = rig.sending("a")
        await asyncio.sleep(0)
        second, _ = rig.sending("b")
        await asyncio.sleep(0)
        first.cancel()
        # The first one ends now, and the second has its slice, but has not gone on.
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.gather(first, second, return_exceptions=True)


# The rate at which the server fills its link.


def test_clients_of_a_slow_link_all_get_their_bodies() -> None:
    sending = SchedulerSettings(slots=2, slice_bytes=20_000, link_bits_s=2e7)
    with running_server(sending=sending) as server, ThreadPoolExecutor(5) as threads:
        data = object_bytes(1, 200_000)
        assert ask(server, "PUT", 1, data)[0].status == 201
        assert [body for _, body in threads.map(functools.partial(ask, server, "GET"), [1] * 5)] == [data] * 5
