"""Objects in Mooncake's distributed store: one key, one value, in the memory of the stores that its master knows.

A URL is `mooncake://HOST[:PORT][?OPTION=VALUE…]` of the master. Invariant: bytes come to the caller's memory only after
the store has said that all of the range was read.
"""

from __future__ import annotations

import importlib.util
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import NamedTuple
from urllib.parse import parse_qsl, urlsplit

import msgspec

from kvtide.clock import Clock
from kvtide.errors import TierFull, TierUnavailable
from kvtide.tier.base import Buffer, ObjectInfo, RangeRead, Removals, Tier
from kvtide.tier.breaker import caller_deadline_s
from kvtide.tier.buffers import copy_bytes
from kvtide.tier.mooncake.client import Lane, MooncakeClient
from kvtide.types import BlockKey, Namespace, ObjectId, TierStats

_PORT = 50051
_PREFIX = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
_HOST = re.compile(r"[A-Za-z0-9_.-]+")
_NAME = re.compile(r"([0-9a-f]{64}):([0-9a-f]{64})")
_METRIC = re.compile(r"^(master_\w+) (\d+)", re.MULTILINE)
# Keys in one look-up, which the child takes in one message, and in one question about sizes, which has them in its URL.
KEYS_MAX = 256
LISTED_MAX = 20
METRICS_BYTES_MAX = 1 << 20
KEY_BYTES_MAX = 4096
LIST_S_MAX = 30.0
# Mooncake's codes of an object that is not here, or not yet, or no longer; and of one that finds no room.
_ABSENT = frozenset({-703, -704, -710, -712})
_NO_ROOM = frozenset({-10, -200})


class MooncakeOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of a URL. ValueError for one out of its range.

    admin: the port of the master's HTTP, for listings and figures. metadata, protocol, devices, host: as Mooncake's
    client takes them. `wait_s_max`: a call that takes longer, besides its bytes, has failed.
    """

    prefix: str = "kvtide"
    admin: int = 9003
    metadata: str = "P2PHANDSHAKE"
    protocol: str = "tcp"
    devices: str = ""
    host: str = ""
    replicas: int = 1
    value_bytes_max: int = 64 << 20
    wait_s_max: float = 2.0

    def __post_init__(self) -> None:
        if not _PREFIX.fullmatch(self.prefix):
            raise ValueError(f"prefix takes 1 to 64 letters, digits and _.:-, got {self.prefix!r}")
        if not (1 <= self.replicas <= 16 and 0 < self.value_bytes_max <= 1 << 30 and 0 < self.wait_s_max < 3600):
            raise ValueError(
                "expected 1 to 16 replicas, value_bytes_max of at most 1 GiB and 0 < wait_s_max < 3600, "
                f"got {self.replicas}, {self.value_bytes_max} and {self.wait_s_max}"
            )
        if not 0 < self.admin < 1 << 16:
            raise ValueError(f"expected a port for admin, got {self.admin}")


class MooncakeTarget(NamedTuple):
    """A parsed URL: the master, and options."""

    host: str
    port: int
    options: MooncakeOptions

    def __str__(self) -> str:
        return f"mooncake://{self.host}:{self.port}"


def parse_mooncake_url(url: str) -> MooncakeTarget:
    """Parse a URL. ValueError that says what is wrong."""
    parts = urlsplit(url)
    host, _, port = parts.netloc.partition(":")
    number = int(port) if port.isdecimal() else 0 if port else _PORT
    if not _HOST.fullmatch(host) or not 0 < number < 1 << 16 or parts.path.strip("/"):
        raise ValueError(f"expected mooncake://HOST[:PORT][?OPTION=VALUE…] of the master, got {url!r}")
    try:
        options = msgspec.convert(dict(parse_qsl(parts.query, keep_blank_values=True)), MooncakeOptions, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(f"options of mooncake://{parts.netloc}: {error}") from error
    return MooncakeTarget(host, number, options)


class _Replica(msgspec.Struct):
    size_: int


class _Listed(msgspec.Struct):
    """Replicas of one key in memory, as the master lists them."""

    values: list[_Replica] | None = None


class _Listing(msgspec.Struct):
    data: dict[str, _Listed]


class MooncakeTier(Tier):
    """A tier in a store that others may use too: what it stores begins with the URL's prefix. The master evicts.

    ValueError for a bad URL, ModuleNotFoundError without Mooncake's package.
    """

    name = "mooncake"
    is_batched = can_replace = True

    def __init__(self, url: str, clock: Clock) -> None:
        self._target = target = parse_mooncake_url(url)
        if importlib.util.find_spec("mooncake") is None:
            raise ModuleNotFoundError("Mooncake's client", name="mooncake-transfer-engine-non-cuda")
        self._options = options = target.options
        limit, master = options.value_bytes_max, f"{target.host}:{target.port}"
        setup = (options.host, options.metadata, 0, limit, options.protocol, options.devices, master)
        self._client = MooncakeClient(setup, options.replicas, limit, options.wait_s_max, clock)
        self._clock = clock
        self._removals = Removals()
        self._lock = threading.Lock()
        self._hits = self._misses = self._faults = 0
        self._evicted_before = 0

    def open(self) -> None:
        """Connect; a master that can't be reached now is tried again and again."""
        self._client.open()
        self._evicted_before = self._figures().get("master_evicted_key_count", 0)

    def close(self) -> None:
        """Disconnect. Idempotent."""
        self._client.close()

    def contains(self, object_id: ObjectId) -> bool:
        """Ask the master. It takes a store that died for alive until its `client_ttl` is over."""
        return self.contains_each([object_id])[0]

    def count_leading(self, object_ids: Sequence[ObjectId]) -> int:
        """Ask the master for KEYS_MAX at a time."""
        present = self.contains_each(object_ids)
        return next((number for number, is_here in enumerate(present) if not is_here), len(present))

    def contains_each(self, object_ids: Sequence[ObjectId]) -> list[bool]:
        """Ask the master for KEYS_MAX at a time."""
        present: list[bool] = []
        for start in range(0, len(object_ids), KEYS_MAX):
            keys = [self._key(object_id) for object_id in object_ids[start : start + KEYS_MAX]]
            with self._lane() as lane:
                answers = self._client.ask(lane, 0, "exist", *keys)
                if min(answers) < 0:
                    raise self._fault(min(answers), "look-up")
            present += [answer == 1 for answer in answers]
        return present

    def get_into(self, object_id: ObjectId, buffer: memoryview, offset: int = 0) -> int | None:
        """Read a range, through memory that is shared with the client; in pieces if it is longer than that."""
        if offset < 0:
            raise ValueError(f"offset must not be negative, got {offset}")
        key, done, is_over = self._key(object_id), 0, False
        with self._lane() as lane:
            while not is_over:
                view = lane.view[: len(buffer) - done]
                (came,) = self._client.ask(lane, len(view), "read", key, offset + done, len(view))
                if came in _ABSENT:
                    self._note(is_hit=False)
                    return None
                if came < 0:
                    raise self._fault(came, f"read of {object_id}")
                copy_bytes(buffer[done : done + came], view[:came])
                done += came
                is_over = came < len(view) or done == len(buffer)
        self._note(is_hit=True)
        return done

    def get_ranges_into(self, object_id: ObjectId, ranges: Sequence[RangeRead]) -> list[int] | None:
        """Read several ranges by one call; one after the other if the object ends within one, or they are too long."""
        offsets, sizes = [offset for offset, _ in ranges], [len(buffer) for _, buffer in ranges]
        with self._lane() as lane:
            is_fitting = sum(sizes) <= len(lane.view)
            words = ("read_ranges", self._key(object_id), offsets, sizes)
            came = self._client.ask(lane, sum(sizes), *words) if is_fitting else []
            if came == sizes:
                at = 0
                for _, buffer in ranges:
                    copy_bytes(buffer, lane.view[at : at + len(buffer)])
                    at += len(buffer)
        if came != sizes:
            found = [self.get_into(object_id, buffer, offset) for offset, buffer in ranges]
            return None if None in found else [size or 0 for size in found]
        self._note(is_hit=True)
        return sizes

    def put_from(self, object_id: ObjectId, buffer: Buffer) -> bool:
        """Store an object unless it is here. TierFull if it is larger than the URL allows, or nobody has room."""
        return self._put(object_id, buffer, "put")

    def replace(self, object_id: ObjectId, buffer: Buffer) -> bool:
        """Put another form of the object in its place; see `Tier.replace`."""
        return self._put(object_id, buffer, "replace")

    def _put(self, object_id: ObjectId, buffer: Buffer, verb: str) -> bool:
        limit = self._options.value_bytes_max
        if len(buffer) > limit:
            raise TierFull(f"{object_id} has {len(buffer)} bytes, a value of the mooncake tier may have {limit}")
        if not len(buffer):
            return False
        with self._lane() as lane:
            copy_bytes(lane.view[: len(buffer)], buffer)
            (code,) = self._client.ask(lane, len(buffer), verb, self._key(object_id), len(buffer))
            if code < 0:
                raise self._fault(code, f"{verb} of {object_id}")
        return code == 0

    def delete(self, object_id: ObjectId, reason: str) -> bool:
        """Remove an object, also while others read it: they find out by its checksums."""
        with self._lane() as lane:
            (code,) = self._client.ask(lane, 0, "remove", self._key(object_id))
            if code < 0 and code not in _ABSENT:
                raise self._fault(code, f"removal of {object_id}")
        if code == 0:
            self._removals.note(object_id, reason)
        return code == 0

    def removed_reason(self, object_id: ObjectId) -> str | None:
        """Return why this process removed the object last."""
        return self._removals.reason(object_id)

    def objects(self) -> Iterator[ObjectInfo]:
        """Yield what is stored under the prefix, with last uses unknown. Not for the hot path: it walks all keys."""
        prefix, names = f"{self._options.prefix}:", dict[str, ObjectId]()
        with self._asked_master("/get_all_keys", LIST_S_MAX) as answer:
            while line := answer.readline(KEY_BYTES_MAX).decode(errors="replace").rstrip("\n"):
                name = _NAME.fullmatch(line.removeprefix(prefix)) if line.startswith(prefix) else None
                if name:
                    namespace, key = (bytes.fromhex(digits) for digits in name.groups())
                    names[line] = ObjectId(Namespace(namespace), BlockKey(key))
                if len(names) == LISTED_MAX:
                    yield from self._infos(names)
                    names.clear()
        yield from self._infos(names)

    def _infos(self, names: dict[str, ObjectId]) -> Iterator[ObjectInfo]:
        if not names:
            return
        with self._asked_master(f"/batch_query_keys?keys={','.join(names)}", LIST_S_MAX) as answer:
            found = msgspec.json.decode(answer.read(METRICS_BYTES_MAX), type=_Listing).data
        for key, listed in found.items():
            if key in names and listed.values:
                yield ObjectInfo(names[key], listed.values[0].size_, 0.0)

    def stats(self) -> TierStats:
        """Return the master's figures, all keys of it, and this process's counters. Zeros while it can't be asked."""
        figures = self._figures()
        objects, used_bytes, bytes_max, evicted = (
            figures.get(f"master_{name}", 0)
            for name in ("key_count", "allocated_bytes", "total_capacity_bytes", "evicted_key_count")
        )
        with self._lock:
            evictions = max(0, evicted - self._evicted_before)
            return TierStats(
                self.name, objects, used_bytes, bytes_max, self._hits, self._misses, evictions, self._faults
            )

    def _figures(self) -> dict[str, int]:
        if not self._client.is_connected():
            return {}
        try:
            with self._asked_master("/metrics", self._options.wait_s_max) as answer:
                text = answer.read(METRICS_BYTES_MAX).decode(errors="replace")
        except TierUnavailable:
            return {}
        return {name: int(figure) for name, figure in _METRIC.findall(text)}

    @contextmanager
    def _asked_master(self, path: str, wait_s_max: float) -> Iterator[HTTPResponse]:
        """Ask the master by HTTP. TierUnavailable if it does not answer as it should, until the `with` is left."""
        wait_s = min(wait_s_max, caller_deadline_s() - self._clock.monotonic_s())
        place = f"the master's HTTP at {self._target.host}:{self._options.admin} (option admin)"
        connection = HTTPConnection(self._target.host, self._options.admin, timeout=max(wait_s, 0.001))
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            if answer.status != 200:
                raise TierUnavailable(f"{place} answers {answer.status} to {path[:40]}")
            yield answer
        except (OSError, HTTPException, msgspec.MsgspecError) as error:
            raise TierUnavailable(f"{place} can't be asked: {error}") from error
        finally:
            connection.close()

    def _key(self, object_id: ObjectId) -> str:
        return f"{self._options.prefix}:{object_id.namespace.hex()}:{object_id.key.hex()}"

    @contextmanager
    def _lane(self) -> Iterator[Lane]:
        """Lend a lane; what goes wrong with it is counted."""
        try:
            with self._client.lane() as lane:
                yield lane
        except TierUnavailable:
            with self._lock:
                self._faults += 1
            raise

    def _fault(self, code: int, what: str) -> TierUnavailable:
        """Return the error that a code of Mooncake's is for us."""
        kind = TierFull if code in _NO_ROOM else TierUnavailable
        return kind(f"{self._target}: {what} failed, Mooncake's code {code}")

    def _note(self, is_hit: bool) -> None:
        with self._lock:
            self._hits += is_hit
            self._misses += not is_hit
