"""Objects made up of layered sections, and sources that are slow, break off or lie."""

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
from tests.suites import block_meta

from kvtide.block import BlockLayout, BlockMeta, KVDtype
from kvtide.clock import SystemClock
from kvtide.codec import CodecRegistry
from kvtide.errors import TierUnavailable
from kvtide.index import LruPolicy, RadixIndex
from kvtide.plan import Judge, PrefillSpeed
from kvtide.store.load import LoadAccess, LoadWorkers
from kvtide.store.load.run import FetchJob, LoadRequest, layered_job
from kvtide.tier.base import Buffer, ObjectInfo, Take, Tier
from kvtide.tier.breaker import caller_deadline_s
from kvtide.tier.source import read_from_any
from kvtide.tier.stack import TierStack
from kvtide.types import ObjectId, Section, SectionId, SectionKind, TierStats
from kvtide.wire import StoredObject, pack_object, parse_object

LAYOUT = BlockLayout(layers=2, tokens=10, kv_heads=1, head_dim=4, dtype=KVDtype.FLOAT32)
STEP_BYTES = (3000, 2000, 5000)
KL = (0.5, 0.1, 0.01)


def made_objects(blocks: int, sizes: Sequence[int] = STEP_BYTES, seed: int = 0) -> dict[ObjectId, bytes]:
    """Return packed objects of consecutive blocks; each step has half its bytes in each layer."""
    rng, found = np.random.default_rng(seed), {}
    for block in range(blocks):
        meta: BlockMeta = block_meta(LAYOUT, seed, block)
        sections = [
            Section(SectionId(SectionKind.DATA, step, layer, layer + 1), rng.bytes(size // 2))
            for step, size in enumerate(sizes)
            for layer in range(2)
        ]
        found[meta.id] = bytes(pack_object(meta, "made-1", sections))
    return found


def made_job(
    objects: dict[ObjectId, bytes], deadline_s: float, tokens_per_s: float = 1.0, goal: float = 0.0
) -> FetchJob:
    """Return the job of loading all objects, a chunk each."""
    stored = parsed(objects)
    spans = [(10 * i, 10 * i + 10) for i in range(len(stored))]
    return layered_job(stored, spans, KL, LoadRequest(PrefillSpeed(tokens_per_s), deadline_s, goal))


def parsed(objects: dict[ObjectId, bytes]) -> list[StoredObject]:
    return [parse_object(data, object_id) for object_id, data in objects.items()]


class MadeSource:
    """Serves objects at a rate, in parts; a read ends with a fault after `cut_bytes`, any of them while `is_down`."""

    def __init__(
        self, objects: dict[ObjectId, bytes], bytes_per_s: float = 1e9, part: int = 500, cut_bytes: int | None = None
    ) -> None:
        self.name = "made"
        self.objects = dict(objects)
        self.is_down = False
        self.served: list[tuple[ObjectId, int, int]] = []
        self.reading = self.reading_max = 0
        self._bytes_per_s, self._part, self._cut_bytes = bytes_per_s, part, cut_bytes
        self._link, self._lock = threading.Lock(), threading.Lock()

    def read_range(self, object_id: ObjectId, start: int, stop: int, take: Take) -> bool:
        with self._lock:
            self.reading += 1
            self.reading_max = max(self.reading_max, self.reading)
        try:
            return self._read(object_id, start, stop, take)
        finally:
            with self._lock:
                self.reading -= 1

    def _read(self, object_id: ObjectId, start: int, stop: int, take: Take) -> bool:
        if object_id not in self.objects:
            return False
        cut = stop if self._cut_bytes is None else min(stop, start + self._cut_bytes)
        while start < cut:
            if self.is_down or time.monotonic() >= caller_deadline_s():
                raise TierUnavailable("made to fail")
            part = self.objects[object_id][start : min(cut, start + self._part)]
            if not part:
                return False
            with self._link:
                time.sleep(len(part) / self._bytes_per_s)
            with self._lock:
                self.served.append((object_id, start, start + len(part)))
            start += len(part)
            if not take(memoryview(part)):
                return True
        if cut < stop:
            raise TierUnavailable("made to break off")
        return True

    @property
    def served_bytes(self) -> int:
        with self._lock:
            return sum(stop - start for _, start, stop in self.served)


class MadeTier(Tier):
    """A source as a tier of a stack, which others have filled."""

    name = "made"

    def __init__(self, source: MadeSource) -> None:
        self.source = source

    def read_range(self, object_id: ObjectId, start: int, stop: int, take: Take) -> bool:
        return self.source.read_range(object_id, start, stop, take)

    def contains(self, object_id: ObjectId) -> bool:
        return object_id in self.source.objects

    def get_into(self, object_id: ObjectId, buffer: memoryview, offset: int = 0) -> int | None:
        data = self.source.objects.get(object_id)
        if data is None:
            return None
        part = data[offset : offset + len(buffer)]
        buffer[: len(part)] = part
        return len(part)

    def put_from(self, object_id: ObjectId, buffer: Buffer) -> bool:
        return False

    def delete(self, object_id: ObjectId, reason: str) -> bool:
        return self.source.objects.pop(object_id, None) is not None

    def objects(self) -> Iterator[ObjectInfo]:
        return iter(())

    def stats(self) -> TierStats:
        return TierStats.sum_of(self.name, [])


def access_of(source: MadeSource | TierStack, judge: Judge | None = None) -> LoadAccess:
    """Return what loads work on, over one source."""
    tiers, clock = source if isinstance(source, TierStack) else TierStack([MadeTier(source)]), SystemClock()
    if tiers is not source:
        tiers.open()
    index = RadixIndex(clock, lambda blocks_max: LruPolicy(), 1000)
    means = (CodecRegistry(), clock, judge or Judge(), lambda object_id: None, LoadWorkers(2))
    access = LoadAccess(tiers, index, math.inf, *means)
    access.open()
    return access


class AnyOf:
    """Several sources as one, as a stack of tiers is."""

    def __init__(self, *sources: MadeSource) -> None:
        self._sources = sources

    def read_range(self, object_id: ObjectId, start: int, stop: int, take: Take) -> bool:
        reads = [partial(each.read_range, object_id) for each in self._sources]
        return read_from_any(reads, start, stop, take, lambda position, error: None)


class MadeEngine:
    """Computes at a speed; remembers what."""

    def __init__(self, tokens_per_s: float) -> None:
        self.spans: list[tuple[int, int]] = []
        self._tokens_per_s = tokens_per_s

    def compute(self, start: int, stop: int, is_wanted: Callable[[], bool]) -> bool:
        for _ in range(start, stop):
            time.sleep(1 / self._tokens_per_s)
            if not is_wanted():
                return False
        self.spans.append((start, stop))
        return True


class IdleEngine:
    """Must not be asked."""

    def compute(self, start: int, stop: int, is_wanted: Callable[[], bool]) -> bool:
        raise AssertionError(f"asked to compute [{start}, {stop})")
