"""Processes to be killed while they write: forks of one that has imported what they need, so that dozens start soon."""

import itertools
import multiprocessing
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
from tests.servers import START_S_MAX
from tests.store.load.test_sparse import CODEC, METAS
from tests.stores import open_disk
from tests.suites.tier_suite import object_bytes, object_id

from kvtide.clock import SystemClock
from kvtide.importance import packing_orders
from kvtide.tier.http import http_tier
from kvtide.wire import pack_object, parse_object

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["pytest", __name__])


@contextmanager
def writing(write: Callable[..., None], *arguments: Any) -> Iterator[tuple[BaseProcess, Connection]]:
    """Run a function of this module in a process, killed in the end; give it once it is ready, and what it says."""
    hears, says = _FORKS.Pipe(duplex=False)
    process = _FORKS.Process(target=write, args=(*arguments, says))
    process.start()
    says.close()
    with hears:
        try:
            assert hears.poll(START_S_MAX) and hears.recv() == "ready"
            yield process, hears
        finally:
            process.kill()
            process.join()
            process.close()


def heard(hears: Connection) -> Iterator[Any]:
    """Give what a process that was killed had said; what the kill cut off it has told nobody."""
    while True:
        try:
            yield hears.recv()
        except (EOFError, OSError):
            return


def append_objects(store: Path, bytes_max: int, first: int, seed: int, says: Connection) -> None:
    """Append objects to a disk tier and remove a fifth; say number and size of what is committed, and if it stays."""
    rng = random.Random(seed)
    tier = open_disk(store, bytes_max, clock=SystemClock())
    says.send("ready")
    for number in range(first, first + 10_000):
        size = rng.randrange(1, 200_000)
        if tier.put_from(object_id(number), object_bytes(number, size)):
            says.send((number, (size, number % 5 > 0)))
        if number % 5 == 2:
            tier.delete(object_id(number - 2), "removed")


def pack_blocks(store: Path, bytes_max: int, seed: int, says: Connection) -> None:
    """Pack a store's blocks in orders by chance, one after the other."""
    tier = open_disk(store, bytes_max, clock=SystemClock())
    rng, buffer = np.random.default_rng(seed), memoryview(bytearray(1 << 20))
    says.send("ready")
    for meta in itertools.cycle(METAS):
        stored = parse_object(buffer[: tier.get_into(meta.id, buffer)], meta.id)
        orders = packing_orders(rng.random((meta.layout.layers, meta.layout.tokens), dtype=np.float32))
        sections = CODEC.repack(meta, stored.sections(), orders)
        assert tier.replace(meta.id, pack_object(meta, CODEC.codec_id, sections, CODEC.profile))


def use_server(url: str, says: Connection) -> None:
    """Remove, store and read objects of a server over and over."""
    tier = http_tier(url, SystemClock())
    tier.open()
    says.send("ready")
    buffer = memoryview(bytearray(1 << 20))
    while True:
        for number in range(8):
            tier.delete(object_id(number), "removed")
            tier.put_from(object_id(number), object_bytes(number, 900_000))
            tier.get_into(object_id(number), buffer)
