"""Clients of stores, measured in turns so that whatever else the machine does falls on all of them alike."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol

from kvtide.block import BlockLayout, BlockMeta, KVDtype
from kvtide.clock import SystemClock
from kvtide.config import Limits
from kvtide.tier import open_tier
from kvtide.tier.buffers import aligned_buffer
from kvtide.types import BlockKey, Namespace, ObjectId, Section, SectionId, SectionKind
from kvtide.wire import pack_object

_LAYOUT = BlockLayout(1, 1, 1, 1, KVDtype.FLOAT16)


class StoreClient(Protocol):
    """A measured client: one connection's worth of it."""

    def put(self, number: int, value: bytes) -> None:
        """Store a value under a number."""

    def get(self, number: int) -> memoryview | bytes:
        """Read a value; a view is good until the next one."""

    def close(self) -> None:
        """Disconnect."""


class TierClient:
    """A tier by its URL, with a buffer for each thread, used again. Numbers are dealt to threads in turn."""

    def __init__(self, url: str, value_bytes: int, threads: int = 1) -> None:
        self.tier = open_tier(url, Limits(), SystemClock(), lambda key: False)
        self.tier.open()
        self._buffers = [aligned_buffer(value_bytes + 1) for _ in range(threads)]

    def put(self, number: int, value: bytes) -> None:
        """Store a value under a number."""
        self.tier.put_from(bench_id(number), value)

    def get(self, number: int) -> memoryview:
        """Read a value; the view is good until the next one."""
        buffer = self._buffers[number % len(self._buffers)]
        size = self.tier.get_into(bench_id(number), buffer)
        assert size is not None
        return buffer[:size]

    def close(self) -> None:
        """Close the tier."""
        self.tier.close()


class Took(NamedTuple):
    """Wall time, and CPU time of this process."""

    wall_s: float
    cpu_s: float

    def plus(self, other: Took) -> Took:
        """Return the sum."""
        return Took(self.wall_s + other.wall_s, self.cpu_s + other.cpu_s)


def bench_id(number: int) -> ObjectId:
    """Return the id of a value."""
    digest = hashlib.sha256(b"bench %d" % number).digest()
    return ObjectId(Namespace(digest), BlockKey(digest))


def bench_object(object_id: ObjectId, data: bytes) -> bytes:
    """Return an object as servers take it, with these bytes."""
    meta = BlockMeta(object_id, BlockKey(object_id.namespace), 0, _LAYOUT, "bench")
    return bytes(pack_object(meta, "raw-1", [Section(SectionId(SectionKind.DATA, 0, 0, 1), data)]))


def move(clients: Sequence[StoreClient], verb: str, numbers: range, values: Sequence[bytes]) -> Took:
    """Put or get values by the clients, a thread each."""

    def work(position: int) -> None:
        for number in numbers[position :: len(clients)]:
            if verb == "put":
                clients[position].put(number, values[number])
            else:
                clients[position].get(number)

    started_s, started_cpu_s = time.perf_counter(), time.process_time()
    if len(clients) == 1:
        work(0)
    else:
        with ThreadPoolExecutor(len(clients)) as workers:
            list(workers.map(work, range(len(clients))))
    return Took(time.perf_counter() - started_s, time.process_time() - started_cpu_s)
