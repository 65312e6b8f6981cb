"""Stores of several machines side by side, each as kvtide uses it, and Mooncake's own client; all on this machine.

Every store runs as real processes. They take turns, a few values at a time; ratios are medians over rounds.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import msgspec

from kvtide.config import Limits
from kvtide.tier.buffers import aligned_buffer
from kvtide_lab.bench.services import kvtide_pool, mooncake_servers, pool_url, s3_server, valkey_cluster
from kvtide_lab.bench.store_clients import TierClient, bench_id, bench_object, move
from kvtide_lab.measuring import quartiles

_VALUE_BYTES = 4 << 20
_VALUES = 16
_SLICE = 8
# As many as a cache has for what is far away.
_THREADS = Limits().load_threads
# A section as a narrow codec has it, from the middle of a value.
_SECTION_BYTES = 256 << 10
_SECTION_OFFSET = 1 << 20
_SEED = 7
_BUCKET = "kvtide-bench"
# Whose figures kvtide's are compared with, on the same store.
_OWN = "mooncake's client"
_OURS = "mooncake"


class StoresBenchRow(msgspec.Struct, frozen=True):
    """One store; medians over rounds. `missing` says why there are none. look_ups_ms: of all keys at once."""

    store: str
    copies: int
    processes: int
    put_gb_s: float | None = None
    get_gb_s: float | None = None
    section_ms: float | None = None
    look_ups_ms: float | None = None
    missing: str = ""


class StoresBenchResult(msgspec.Struct, frozen=True):
    """Ratios of kvtide on Mooncake to the fastest ways of Mooncake's own client; spreads are quartiles over rounds."""

    get_vs_client: float
    put_vs_client: float
    section_vs_client: float
    get_vs_client_spread: tuple[float, float]
    put_vs_client_spread: tuple[float, float]
    section_vs_client_spread: tuple[float, float]
    mooncake: str
    value_bytes: int
    threads: int
    rounds: int
    rows: list[StoresBenchRow]


class _TierStore(TierClient):
    """A tier, also asked for sections and whether keys are there."""

    def section(self, number: int) -> None:
        size = self.tier.get_into(bench_id(number), self._buffers[0][:_SECTION_BYTES], _SECTION_OFFSET)
        assert size == _SECTION_BYTES

    def look_up(self) -> None:
        ids = [bench_id(number) for number in range(_VALUES)]
        present = self.tier.contains_each(ids)
        assert sum(present) == _VALUES

    def remove(self, number: int) -> None:
        self.tier.delete(bench_id(number), "removed")


class _OwnClient:
    """Mooncake's client as its documents use it: values go from and to memory that is registered, without a copy."""

    def __init__(self, url: str, value_bytes: int) -> None:
        from mooncake.store import MooncakeDistributedStore

        self._store: Any = MooncakeDistributedStore()
        master = url.partition("//")[2].partition("?")[0]
        code = self._store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 64 << 20, "tcp", "", master)
        assert code == 0, code
        self._buffers = [aligned_buffer(value_bytes) for _ in range(_THREADS)]
        self._addresses = [ctypes.addressof(ctypes.c_char.from_buffer(buffer)) for buffer in self._buffers]
        for address in self._addresses:
            self._store.register_buffer(address, value_bytes)

    def put(self, number: int, value: bytes) -> None:
        address = ctypes.cast(ctypes.c_char_p(value), ctypes.c_void_p).value
        assert self._store.put_from(self._key(number), address, len(value)) == 0

    def get(self, number: int) -> memoryview | bytes:
        buffer = self._buffers[number % _THREADS]
        size = self._store.get_into(self._key(number), self._addresses[number % _THREADS], len(buffer))
        return buffer[:size]

    def section(self, number: int) -> None:
        ranges = [[[0]]], [[[_SECTION_OFFSET]]], [[[_SECTION_BYTES]]]
        assert self._store.get_into_ranges(self._addresses[:1], [[self._key(number)]], *ranges) == ranges[2]

    def look_up(self) -> None:
        keys = [self._key(number) for number in range(_VALUES)]
        assert self._store.batch_is_exist(keys).count(1) == _VALUES

    def remove(self, number: int) -> None:
        self._store.remove(self._key(number), True)

    def close(self) -> None:
        self._store.close()

    def _key(self, number: int) -> str:
        return f"{type(self).__name__}:{number}"


class _OwnRanges(_OwnClient):
    """The same, reading whole values as ranges: its fastest way over TCP."""

    def get(self, number: int) -> memoryview | bytes:
        place, buffer = number % _THREADS, self._buffers[number % _THREADS]
        ranges = [[[0]]], [[[0]]], [[[len(buffer)]]]
        assert self._store.get_into_ranges([self._addresses[place]], [[self._key(number)]], *ranges) == ranges[2]
        return buffer


class _OwnBytes(_OwnClient):
    """The same, with `put` and `get` of bytes."""

    def put(self, number: int, value: bytes) -> None:
        assert self._store.put(self._key(number), value) == 0

    def get(self, number: int) -> memoryview | bytes:
        found: bytes = self._store.get(self._key(number))
        return found


_Store = _TierStore | _OwnClient


class _Case(NamedTuple):
    copies: int
    processes: int
    make: Callable[[], AbstractContextManager[_Store]]


@contextmanager
def _closing(store: _Store) -> Iterator[_Store]:
    try:
        yield store
    finally:
        store.close()


@contextmanager
def _valkey(size: int) -> Iterator[_Store]:
    with valkey_cluster() as services:
        hosts = ",".join(f"127.0.0.1:{service.port}" for service in services[:3])
        with _closing(_TierStore(f"valkey://{hosts}?wait_s_max=20", size, _THREADS)) as store:
            yield store


@contextmanager
def _pool(size: int) -> Iterator[_Store]:
    with (
        kvtide_pool(3) as services,
        _closing(_TierStore(pool_url([service.port for service in services]), size, _THREADS)) as store,
    ):
        yield store


@contextmanager
def _s3(size: int) -> Iterator[_Store]:
    with s3_server(_BUCKET) as service:
        options = "allow_http=true&skip_signature=true&region=nowhere"
        url = f"s3://{_BUCKET}/bench?endpoint=http://127.0.0.1:{service.port}&{options}"
        with _closing(_TierStore(url, size, _THREADS)) as store:
            yield store


def _cases(mooncake: str, size: int) -> dict[str, _Case]:
    def tier(options: str) -> Callable[[], AbstractContextManager[_Store]]:
        return lambda: _closing(_TierStore(f"{mooncake}&wait_s_max=20{options}", size, _THREADS))

    def own(kind: type[_OwnClient]) -> Callable[[], AbstractContextManager[_Store]]:
        return lambda: _closing(kind(mooncake, size))

    return {
        _OURS: _Case(1, 3, tier("")),
        f"{_OURS}, replicas=2": _Case(2, 3, tier("&prefix=twice&replicas=2")),
        f"{_OWN}, get_into": _Case(1, 3, own(_OwnClient)),
        f"{_OWN}, get_into_ranges": _Case(1, 3, own(_OwnRanges)),
        f"{_OWN}, get": _Case(1, 3, own(_OwnBytes)),
        "valkey, a cluster": _Case(2, 6, partial(_valkey, size)),
        "pool": _Case(2, 3, partial(_pool, size)),
        "s3, SeaweedFS": _Case(1, 1, partial(_s3, size)),
    }


# Seconds a round, by store and verb.
_Figures = dict[tuple[str, str], list[float]]
_VERBS = ("put", "get", "section", "look_up")


def run(quick: bool) -> StoresBenchResult:
    """Start the stores and measure. Quick means fewer rounds. ValueError if Mooncake can't run here."""
    rounds = 4 if quick else 15
    values = [bench_object(bench_id(n), random.Random(n).randbytes(_VALUE_BYTES)) for n in range(_VALUES)]
    size = len(values[0])
    figures: _Figures = {}
    missing: dict[str, str] = {}
    rng = random.Random(_SEED)
    with ExitStack() as stack:
        servers = stack.enter_context(mooncake_servers(stores=2, store_mb=1024))
        cases = _cases(servers.url, size)
        stores: dict[str, _Store] = {}
        for name, case in cases.items():
            try:
                stores[name] = stack.enter_context(case.make())
            except (ValueError, ModuleNotFoundError) as error:
                missing[name] = str(error)
        for turn in range(rounds + 1):
            found = _round(rng, stores, values)
            # The first round takes memory from the system.
            for key, took_s in found.items() if turn else ():
                figures.setdefault(key, []).append(took_s)
    own = [name for name in cases if name.startswith(_OWN)]
    ratios = {verb: _ratios(figures, verb, own) for verb in _VERBS}
    return StoresBenchResult(
        get_vs_client=statistics.median(ratios["get"]),
        put_vs_client=statistics.median(ratios["put"]),
        section_vs_client=statistics.median(ratios["section"]),
        get_vs_client_spread=quartiles(ratios["get"]),
        put_vs_client_spread=quartiles(ratios["put"]),
        section_vs_client_spread=quartiles(ratios["section"]),
        mooncake=importlib.metadata.version("mooncake-transfer-engine-non-cuda"),
        value_bytes=size,
        threads=_THREADS,
        rounds=rounds,
        rows=[_row(figures, name, case, missing.get(name, "")) for name, case in cases.items()],
    )


def _round(rng: random.Random, stores: dict[str, _Store], values: Sequence[bytes]) -> dict[tuple[str, str], float]:
    """Return the seconds of each store and verb for all values; nothing stays stored."""
    took: dict[tuple[str, str], float] = {}
    for verb in _VERBS:
        for start in range(0, _VALUES, _SLICE):
            # Each time another order: what one store leaves to do in the background falls on all of the others.
            for name in rng.sample(list(stores), len(stores)):
                seconds = _slice_s(stores[name], verb, range(start, start + _SLICE), values)
                took[name, verb] = took.get((name, verb), 0.0) + seconds
    for store in stores.values():
        wrong = sum(store.get(number) != values[number] for number in range(0, _VALUES, 5))
        assert wrong == 0, f"{wrong} wrong values"
        for number in range(_VALUES):
            store.remove(number)
    return took


def _slice_s(store: _Store, verb: str, numbers: range, values: Sequence[bytes]) -> float:
    if verb in {"put", "get"}:
        return move([store] * _THREADS, verb, numbers, values).wall_s
    started_s = time.perf_counter()
    for number in numbers:
        if verb == "section":
            store.section(number)
        else:
            store.look_up()
    return time.perf_counter() - started_s


def _ratios(figures: _Figures, verb: str, others: list[str]) -> list[float]:
    """Return by round how much longer the others' fastest way takes."""
    fastest = min((figures[other, verb] for other in others), key=statistics.median)
    return [theirs / ours for theirs, ours in zip(fastest, figures[_OURS, verb], strict=True)]


def _row(figures: _Figures, store: str, case: _Case, missing: str) -> StoresBenchRow:
    if missing:
        return StoresBenchRow(store, case.copies, case.processes, missing=missing)
    put_s, get_s, section_s, look_up_s = (statistics.median(figures[store, verb]) for verb in _VERBS)
    moved_gb = _VALUES * _VALUE_BYTES / 1e9
    times_ms = (1e3 * section_s / _VALUES, 1e3 * look_up_s / _VALUES)
    return StoresBenchRow(store, case.copies, case.processes, moved_gb / put_s, moved_gb / get_s, *times_ms)
