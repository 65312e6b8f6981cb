"""Objects in a bucket: S3 and whatever speaks it, Google's and Azure's stores, through obstore.

Names begin with two digits of the key, so that requests spread over the store's partitions: XX/NAMESPACE/KEY.
"""

from __future__ import annotations

import math
import re
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from datetime import timedelta
from functools import cache, partial
from typing import Any, Literal, NamedTuple, TypeVar
from urllib.parse import parse_qsl, urlsplit

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    NotFoundError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import from_url

from kvtide.clock import Clock
from kvtide.errors import TierUnavailable
from kvtide.tier.base import Buffer, CountingTier, ObjectInfo, RangeRead
from kvtide.tier.breaker import Breaker, caller_deadline_s, until
from kvtide.tier.buffers import copy_bytes
from kvtide.types import BlockKey, Namespace, ObjectId, TierStats

_Result = TypeVar("_Result")

# One request moves at most so much; larger objects are read and written in parts, some at a time.
PART_BYTES = 8 << 20
PARTS_AT_ONCE = 4
CONNECT_S_MAX = 2
# A store that is silent for so long while something is read has failed; tries of one request begin within it.
SILENCE_S_MAX = 4
# One part, in or out.
REQUEST_S_MAX = 30
RETRIES_MAX = 2
# After so many faults in a row the store is left alone for a while.
FAULTS_MAX = 2
OPEN_S = 5.0
# What a listing found counts for so long: it costs a request for every thousand objects.
STATS_AGE_S_MAX = 60.0
# A client's bounds are fixed when it is made: callers with a deadline share the one of the longest of these that fits.
_DEADLINES_S = tuple(0.1 * 1.5**step for step in range(15))
_NAME = re.compile(r"[0-9a-f]{2}/([0-9a-f]{64})/([0-9a-f]{64})")


class _Counted(NamedTuple):
    objects: int
    used_bytes: int
    at_s: float


class _Part(NamedTuple):
    """The object that a part is of: its size and its entity tag, None where the store gives none."""

    size: int
    e_tag: str | None


class S3Tier(CountingTier):
    """A tier in a bucket, `s3://BUCKET[/PREFIX][?OPTION=VALUE…]`, also `gs://` and `az://`.

    Options are obstore's settings of the store (`region`, `endpoint`, `allow_http`, …); credentials come from where the
    store's own tools take them. Nothing is evicted: the bucket's lifecycle rules do that. ValueError for a bad URL.
    """

    name = "s3"
    can_replace = True

    def __init__(self, url: str, clock: Clock) -> None:
        super().__init__()
        parts = urlsplit(url)
        self._shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        if not parts.netloc:
            raise ValueError(f"expected a bucket, as in s3://bucket/prefix, got {self._shown!r}")
        try:
            options: dict[str, Any] = dict(parse_qsl(parts.query, strict_parsing=bool(parts.query)))
            plain = {"allow_http": True} if options.pop("allow_http", "false") == "true" else {}
            self._stores = cache(partial(_store, partial(from_url, self._shown, config=options), plain))
            self._stores(math.inf, is_write=False)
        except (BaseError, ValueError) as error:
            # The error may quote the options, and those may hold a secret.
            raise ValueError(f"bad options of {self._shown}: {type(error).__name__}") from None
        self._clock = clock
        self._breaker = Breaker(FAULTS_MAX, OPEN_S, clock, REQUEST_S_MAX)
        # For the parts of one range, and for ranges, which wait for their parts.
        self._workers: ThreadPoolExecutor | None = None
        self._rangers: ThreadPoolExecutor | None = None
        self._counted: _Counted | None = None

    def _client(self, is_write: bool = False) -> Any:
        """Return a client for a request of this thread's caller. TierUnavailable if it is too late for one."""
        left_s = caller_deadline_s() - self._clock.monotonic_s()
        if left_s < _DEADLINES_S[0]:
            raise TierUnavailable(f"the caller's deadline passed before {self._shown} could be asked")
        is_free = left_s > REQUEST_S_MAX + SILENCE_S_MAX
        request_s_max = math.inf if is_free else _DEADLINES_S[bisect_right(_DEADLINES_S, left_s) - 1]
        return self._stores(request_s_max, is_write=is_write)

    def open(self) -> None:
        """Start the threads that read parts. The store is asked only when something is needed of it."""
        self._workers = self._workers or ThreadPoolExecutor(PARTS_AT_ONCE, thread_name_prefix="kvtide-s3")
        self._rangers = self._rangers or ThreadPoolExecutor(PARTS_AT_ONCE, thread_name_prefix="kvtide-s3-range")

    def close(self) -> None:
        for workers in (self._rangers, self._workers):
            if workers is not None:
                workers.shutdown(wait=True)
        self._workers = self._rangers = None

    def contains(self, object_id: ObjectId) -> bool:
        return self._size(object_id) is not None

    def get_into(self, object_id: ObjectId, buffer: memoryview, offset: int = 0) -> int | None:
        """Read a range of the object; a long one in parts, several at a time."""
        if offset < 0:
            raise ValueError(f"offset must not be negative, got {offset}")
        path = _path(object_id)
        if not len(buffer):
            return 0 if self.contains(object_id) else None
        self._require_store()
        try:
            first = self._read(path, buffer[:PART_BYTES], offset)
        except (NotFoundError, FileNotFoundError):
            self._breaker.note_success()
            self._note(is_hit=False)
            return None
        except BaseError as error:
            # A range after the object's end is refused, in words that differ from store to store.
            if offset == 0 or (self._size(object_id) or math.inf) > offset:
                raise self._fault(error) from error
            return 0
        self._breaker.note_success()
        view = buffer[: first.size - offset]
        starts = range(PART_BYTES, len(view), PART_BYTES)
        reads = [partial(self._read, path, view[start:][:PART_BYTES], offset + start) for start in starts]
        parts = self._side_by_side(self._workers, reads)
        found = self._asked(lambda: [part.result() for part in parts], None)
        if found is None or any(part != first for part in found):
            raise TierUnavailable(f"{path} was replaced while it was read")
        self._note(is_hit=True)
        return len(view)

    def get_ranges_into(self, object_id: ObjectId, ranges: Sequence[RangeRead]) -> list[int] | None:
        """Read some ranges at a time: a bucket answers a request with one."""
        reads = self._side_by_side(
            self._rangers, [partial(self.get_into, object_id, buffer, at) for at, buffer in ranges]
        )
        sizes = [size for size in (each.result() for each in reads) if size is not None]
        return sizes if len(sizes) == len(ranges) else None

    def _side_by_side(
        self, workers: ThreadPoolExecutor | None, reads: Sequence[Callable[[], _Result]]
    ) -> list[Future[_Result]]:
        """Run reads until the caller's deadline, some at a time; all have ended when it returns the buffers."""
        if workers is None:
            raise TierUnavailable(f"{self._shown} is not open")
        deadline_s = caller_deadline_s()

        def in_time(read: Callable[[], _Result]) -> _Result:
            with until(deadline_s):
                return read()

        pending = [workers.submit(in_time, read) for read in reads]
        wait(pending)
        return pending

    def _read(self, path: str, view: memoryview, start: int) -> _Part:
        """Read the part of an object that fits into the view; return whose part it is."""
        found = obstore.get(self._client(), path, options={"range": (start, start + len(view))})
        size = int(found.meta["size"])
        data = memoryview(found.bytes())
        if len(data) != min(size - start, len(view)):
            raise TierUnavailable(f"{path}: expected {min(size - start, len(view))} bytes, got {len(data)}")
        copy_bytes(view[: len(data)], data)
        return _Part(size, found.meta["e_tag"])

    def put_from(self, object_id: ObjectId, buffer: Buffer) -> bool:
        """Store an object unless it is here; the store refuses the second of two writers. In parts if it is long."""
        # Stores make only whole writes conditional. The second of two long ones replaces equal bytes.
        is_long = len(buffer) > PART_BYTES
        if not (is_long and self._size(object_id) is not None):
            self._put(object_id, buffer, "overwrite" if is_long else "create")
        return True

    def replace(self, object_id: ObjectId, buffer: Buffer) -> bool:
        self._put(object_id, buffer, "overwrite")
        return True

    def _put(self, object_id: ObjectId, buffer: Buffer, mode: Literal["create", "overwrite"]) -> None:
        def put() -> bool:
            with suppress(AlreadyExistsError, PreconditionError):
                obstore.put(
                    self._client(is_write=True),
                    _path(object_id),
                    memoryview(buffer),
                    mode=mode,
                    # Each of several requests may take as long as the client's bounds say.
                    use_multipart=len(buffer) > PART_BYTES and caller_deadline_s() == math.inf,
                    chunk_size=PART_BYTES,
                    max_concurrency=PARTS_AT_ONCE,
                )
                return True
            return False

        if self._asked(put, False):
            with self._lock:
                if self._counted is not None:
                    objects, used_bytes, at_s = self._counted
                    self._counted = _Counted(objects + 1, used_bytes + len(buffer), at_s)

    def delete(self, object_id: ObjectId, reason: str) -> bool:
        if self._size(object_id) is None:
            return False
        self._asked(lambda: obstore.delete(self._client(), _path(object_id)), None)
        with self._lock:
            self._removals[object_id] = reason
            self._counted = None
        return True

    def _size(self, object_id: ObjectId) -> int | None:
        return self._asked(lambda: int(obstore.head(self._client(), _path(object_id))["size"]), None)

    def objects(self) -> Iterator[ObjectInfo]:
        """Yield what the bucket lists; when an object was used last is not known, when it was stored is."""
        self._require_store()
        try:
            for chunk in obstore.list(self._stores(math.inf, is_write=False)):
                for meta in chunk:
                    if name := _NAME.fullmatch(meta["path"]):
                        namespace, key = (bytes.fromhex(digits) for digits in name.groups())
                        object_id = ObjectId(Namespace(namespace), BlockKey(key))
                        yield ObjectInfo(object_id, meta["size"], meta["last_modified"].timestamp())
        except BaseError as error:
            raise self._fault(error) from error

    def stats(self) -> TierStats:
        """Return counters, and what a listing at most STATS_AGE_S_MAX ago found; zeros without one."""
        now_s, counted = self._clock.monotonic_s(), self._counted
        if counted is None or now_s - counted.at_s > STATS_AGE_S_MAX:
            try:
                sizes = [info.size for info in self.objects()]
                counted = _Counted(len(sizes), sum(sizes), now_s)
            except TierUnavailable:
                counted = None
            with self._lock:
                self._counted = counted
        objects, used_bytes = counted[:2] if counted else (0, 0)
        return TierStats(self.name, objects, used_bytes, sys.maxsize, self._hits, self._misses, 0, self._faults)

    def _asked(self, request: Callable[[], _Result], absent: _Result) -> _Result:
        self._require_store()
        try:
            found = request()
        except (NotFoundError, FileNotFoundError):
            found = absent
        except BaseError as error:
            raise self._fault(error) from error
        self._breaker.note_success()
        return found

    def _require_store(self) -> None:
        # First: who comes too late to ask is no trial.
        self._client()
        if not self._breaker.allows():
            raise TierUnavailable(f"{self._shown} failed {FAULTS_MAX} times in a row; left alone for {OPEN_S} s")

    def _fault(self, error: BaseError) -> TierUnavailable:
        fault = TierUnavailable(f"{self._shown}: {str(error).splitlines()[0][:300]}")
        self._note_fault(fault)
        left_s = caller_deadline_s() - self._clock.monotonic_s()
        if left_s < SILENCE_S_MAX and not self._breaker.is_open:
            # Who could not wait for longer says nothing of the store, but ends a trial.
            return fault
        if isinstance(error, PermissionDeniedError | UnauthenticatedError):
            # It answers, and others of our requests it may grant.
            self._breaker.note_success()
        else:
            self._breaker.note_fault()
        return fault


def _store(make: Callable[..., Any], plain: Mapping[str, bool], request_s_max: float, is_write: bool) -> Any:
    """Make a client whose requests end, retries included, within so long; within the bounds above if it is infinity."""
    # Of a deadline, tries begin in the first fifth, and each may take the rest.
    is_bounded = request_s_max < math.inf
    try_s, retry_s = (0.8 * request_s_max, 0.1 * request_s_max) if is_bounded else (REQUEST_S_MAX, SILENCE_S_MAX)
    waits = {"timeout": timedelta(seconds=try_s), "connect_timeout": timedelta(seconds=min(CONNECT_S_MAX, try_s))}
    if not is_write:
        # Nothing comes back while a body goes out, so that silence counts for reading alone.
        waits["read_timeout"] = timedelta(seconds=min(SILENCE_S_MAX, try_s))
    retry: dict[str, Any] = {"max_retries": RETRIES_MAX, "retry_timeout": timedelta(seconds=retry_s)}
    if is_bounded:
        backoff = {"init_backoff": timedelta(seconds=retry_s / 4), "max_backoff": timedelta(seconds=retry_s)}
        retry["backoff"] = {**backoff, "base": 2}
    return make(client_options={**plain, **waits}, retry_config=retry)


def _path(object_id: ObjectId) -> str:
    key = object_id.key.hex()
    return f"{key[:2]}/{object_id.namespace.hex()}/{key}"
