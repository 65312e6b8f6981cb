"""A region and its centre: what a regional server reads through, sends on in the background, and knows of the centre.

Objects never change, so only records, and what is known to exist, can be out of date. Stored names are each server's
own: servers ask each other by tenant, namespace and generation, and one that is of another generation is a miss.
"""

from __future__ import annotations

import logging
import struct
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextvars import copy_context
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from kvtide.clock import Clock
from kvtide.config import Limits
from kvtide.errors import NotAllowed, RequestRefused, TierUnavailable
from kvtide.evict import Hint
from kvtide.server.names import Names
from kvtide.server.records import CentralRecords, Records
from kvtide.server.settings import ServerSettings, records_path
from kvtide.tier import LastingFault, Repeater, tiers_of
from kvtide.tier.base import Buffer, Tier, WrappedTier
from kvtide.tier.buffers import aligned_buffer
from kvtide.tier.files import Files
from kvtide.tier.http import PeerSettings, http_tier
from kvtide.tier.http.records import RecordsClient, backed_up, records_clients
from kvtide.tier.stack import TierStack
from kvtide.types import DIGEST_BYTES, BlockKey, Name, NamedId, Namespace, ObjectId
from kvtide.wire import HEADER_BYTES, object_bytes, object_quality
from kvtide.wire.protocol import Header

_log = logging.getLogger(__name__)

PENDING_MAX = 1 << 18
# The file is written again when it has more records than this: 73 bytes each.
RECORDS_MAX = 4 * PENDING_MAX
# Sequence number, stored namespace, key, kind. A name takes two: generation, stored and own namespace; then the tenant.
_RECORD = struct.Struct("<Q32s32sB")
_ADDED, _DONE, _NAME, _TENANT = range(4)
_FILE_BYTES_MAX = 2 * RECORDS_MAX * _RECORD.size
# Objects that were read, the first ones, among which the next to send is chosen.
HOT_MAX = 1024
RETRY_S = 0.5
# The synchroniser's wait when there is nothing to send, or nobody to send it to.
IDLE_S = 0.2
# A region's wait for its centre, and the centre's for all of its regions: soon enough for the region that asked.
LATEST_S_MAX = 2.0
ASKED_S_MAX = 1.0
# A body may take longer than that by its size over this.
BYTES_S_MIN = 1e6
# Regions that are asked at the same time.
ASKING_THREADS = 16
TRIES_MAX = 3
# A server that was silent twice is left alone.
_PEER = PeerSettings(tries_max=1, faults_max=2, open_s=2.0)
_LOCAL_ONLY = ((Header.LOCAL, "1"),)
_LATEST = ((Header.FORCE, "1"),)


class Manifest:
    """The objects that wait, by sequence number. Thread-safe between `open` and `close`."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        self._file: BinaryIO | None = None
        self._pending: OrderedDict[ObjectId, int] = OrderedDict()
        self._uses: Counter[ObjectId] = Counter()
        self._names: dict[Namespace, Name] = {}
        self._sequence = 0
        # False after a fault: what was written last may be cut, and all behind it would be read as something else.
        self._is_whole = True
        # What `next` has returned last.
        self._taken: tuple[ObjectId, int] | None = None

    def open(self) -> None:
        """Read what waits, and write it again without what is done. OSError if that can't be done."""
        with self._lock:
            data = Files().content(self._path, _FILE_BYTES_MAX) if self._path.exists() else b""
            # A record that a crash cut off is of an object that is stored once more or misses.
            named: tuple[int, Namespace, Namespace] | None = None
            for number, first, second, kind in _RECORD.iter_unpack(data[: len(data) // _RECORD.size * _RECORD.size]):
                if kind == _NAME:
                    named = (number, Namespace(first), Namespace(second))
                elif kind == _TENANT and named is not None:
                    tenant = (first + second).rstrip(b"\0").decode("latin-1")
                    if tenant.isascii() and tenant.isprintable():
                        self._names[named[1]] = Name(tenant, named[2], named[0])
                elif kind in {_ADDED, _DONE}:
                    object_id = ObjectId(Namespace(first), BlockKey(second))
                    self._sequence = max(self._sequence, number)
                    if kind == _DONE:
                        self._pending.pop(object_id, None)
                    # A fault may have taken its name, by which alone the centre could get it.
                    elif object_id.namespace in self._names:
                        self._pending[object_id] = number
            self._rewrite()

    def close(self) -> None:
        """Close the file. Idempotent."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, object_id: NamedId) -> None:
        """Note an object and its name; what is being sent goes once more. The oldest goes if too many wait."""
        with self._lock:
            is_waiting = object_id in self._pending
            self._sequence += 1
            self._pending[object_id] = self._sequence
            if is_waiting:
                return
            if self._names.get(object_id.namespace) != object_id.name:
                self._names[object_id.namespace] = object_id.name
                self._append(_packed_name(object_id.namespace, object_id.name))
            self._append(_RECORD.pack(self._sequence, *object_id, _ADDED))
            if len(self._pending) > PENDING_MAX:
                oldest, sequence = self._pending.popitem(last=False)
                self._uses.pop(oldest, None)
                self._append(_RECORD.pack(sequence, *oldest, _DONE))

    def note_use(self, object_id: ObjectId) -> None:
        """Count a read: what is read often is sent first. Never waits: one is left out while the disk is written."""
        if self._lock.acquire(blocking=False):
            if object_id in self._pending:
                self._uses[object_id] += 1
            self._lock.release()

    def next(self) -> NamedId | None:
        """Return what to send next: the one that was read most, of those the oldest. None if nothing waits."""
        with self._lock:
            found = next(iter(self._pending), None)
            if self._uses:
                found = max(islice(self._uses, HOT_MAX), key=lambda each: (self._uses[each], -self._pending[each]))
            if found is None:
                return None
            self._taken = (found, self._pending[found])
            return NamedId.of(found, self._names[found.namespace])

    def done(self, object_id: ObjectId) -> None:
        """Forget an object: the centre has it, or nobody has. Not if it was added again after `next` returned it."""
        with self._lock:
            taken = self._taken
            if taken is not None and taken[0] == object_id and taken[1] != self._pending.get(object_id):
                return
            self._uses.pop(object_id, None)
            sequence = self._pending.pop(object_id, None)
            if sequence is not None:
                self._append(_RECORD.pack(sequence, *object_id, _DONE))

    def _append(self, data: bytes) -> None:
        if self._file is None:
            return
        # Another server, which may have ended since, may have put its own there.
        is_whole, self._is_whole = self._is_whole and not Files().is_unlinked(self._file.fileno()), False
        is_full = self._file.tell() + len(data) > RECORDS_MAX * _RECORD.size
        if not is_whole or is_full or self._file.write(data) != len(data):
            self._rewrite()
        self._is_whole = True

    def _rewrite(self) -> None:
        """Write again what waits, without what is done, and go on after it."""
        used = {object_id.namespace for object_id in self._pending}
        self._names = {stored: name for stored, name in self._names.items() if stored in used}
        names = [_packed_name(*each) for each in self._names.items()]
        waiting = [_RECORD.pack(n, *object_id, _ADDED) for object_id, n in self._pending.items()]
        Files().save(self._path, b"".join([*names, *waiting]))
        if self._file is not None:
            self._file.close()
        self._file = self._path.open("ab", buffering=0)


def _packed_name(stored: Namespace, name: Name) -> bytes:
    tenant = name.tenant.encode("ascii")
    first = _RECORD.pack(name.generation, stored, name.namespace, _NAME)
    return first + _RECORD.pack(0, tenant[:DIGEST_BYTES], tenant[DIGEST_BYTES:], _TENANT)


class Recovery:
    """Asks regions for their generations until all have answered, or once where no record is missing."""

    def __init__(self, regions: Sequence[RecordsClient], records: Records) -> None:
        self._regions, self._records = list(regions), records
        self._asking = Repeater(self._ask, "kvtide-recovery")
        self.stop = self._asking.stop
        self._fault = LastingFault(_log, "the centre waits for what its regions know")
        self.is_over = False

    def open(self) -> None:
        """Begin to ask."""
        for region in self._regions:
            region.open()
        self._asking.open()

    def close(self) -> None:
        """Stop asking. Idempotent."""
        self._asking.close()
        for region in self._regions:
            region.close()

    def _ask(self) -> float:
        with ThreadPoolExecutor(min(ASKING_THREADS, len(self._regions)), "kvtide-recovery") as pool:
            faults = list(filter(None, pool.map(self._recovered, self._regions)))
        with self._fault.caught(RequestRefused, TierUnavailable):
            if faults and not self._records.is_complete:
                raise faults[0]
            self._records.settle()
            self.is_over = True
            self.stop()
        return RETRY_S

    def _recovered(self, region: RecordsClient) -> RequestRefused | TierUnavailable | None:
        """Take over what a region knows; return why if it can't be asked."""
        try:
            self._records.recover(backed_up([region]))
        except (RequestRefused, TierUnavailable) as error:
            return error
        return None


class CentralTier(WrappedTier):
    """The centre behind a region's own tiers: read through by name, and written later by the synchroniser."""

    def __init__(self, central: Tier, manifest: Manifest) -> None:
        super().__init__(central)
        self.name, self.is_own, self.is_batched, self.takes_advice = "central", False, True, True
        self._manifest = manifest

    def contains(self, object_id: ObjectId) -> bool:
        return isinstance(object_id, NamedId) and super().contains(object_id)

    def get_into(self, object_id: ObjectId, buffer: memoryview, offset: int = 0) -> int | None:
        return super().get_into(object_id, buffer, offset) if isinstance(object_id, NamedId) else None

    def put_from(self, object_id: ObjectId, buffer: Buffer) -> bool:
        """Note that the centre should get the object. False: it is not there yet."""
        if not isinstance(object_id, NamedId):
            raise TierUnavailable(f"{object_id} has no name by which the centre could get it")
        try:
            self._manifest.add(object_id)
        except OSError as error:
            raise TierUnavailable(f"can't note what the centre should get: {error}") from error
        return False

    def delete(self, object_id: ObjectId, reason: str) -> bool:
        return isinstance(object_id, NamedId) and super().delete(object_id, reason)

    def removed_reason(self, object_id: ObjectId) -> str | None:
        """Return nothing: a miss crosses to the centre once, not twice."""
        return None

    def count_leading(self, object_ids: Sequence[ObjectId]) -> int:
        return self.tier.count_leading(object_ids)

    def contains_each(self, object_ids: Sequence[ObjectId]) -> list[bool]:
        if all(isinstance(each, NamedId) for each in object_ids):
            return self.tier.contains_each(object_ids)
        return [self.contains(object_id) for object_id in object_ids]

    def advise(self, object_ids: Sequence[ObjectId], hint: Hint) -> None:
        """Pass a prompt's advice on: the centre sees nothing of what regions hit."""
        if all(isinstance(each, NamedId) for each in object_ids):
            self.tier.advise(object_ids, hint)


@dataclass(eq=False)
class Synchroniser:
    """A thread that sends what the manifest names to the centre, hot first, at most `_bytes_s_max`."""

    _local: TierStack
    _central: Tier
    manifest: Manifest
    _names: Names
    _bytes_s_max: float
    _object_bytes_max: int
    _clock: Clock

    def __post_init__(self) -> None:
        self._sending = Repeater(self._send, "kvtide-sync")
        self.stop = self._sending.stop
        self._buffer = memoryview(b"")
        self._tries: Counter[ObjectId] = Counter()
        self.sent_objects = self.given_up = 0

    def open(self) -> None:
        """Read the manifest and start."""
        self.manifest.open()
        self._central.open()
        self._sending.open()

    def close(self) -> None:
        """Stop after what is under way; the manifest keeps the rest. Idempotent."""
        self._sending.close()
        self._central.close()
        self.manifest.close()

    def _send(self) -> float:
        started_s = self._clock.monotonic_s()
        try:
            size = self.step()
        except (TierUnavailable, OSError) as error:
            _log.debug("nothing is sent to the centre now: %s", error)
            return IDLE_S
        least_s = IDLE_S if size is None else size / self._bytes_s_max
        return max(0.0, least_s - (self._clock.monotonic_s() - started_s))

    def step(self) -> int | None:
        """Send the next object; return the bytes that took, None if none waits. TierUnavailable if it isn't taken."""
        object_id = self.manifest.next()
        if object_id is None:
            return None
        found: memoryview | None = None
        try:
            is_lacking = self._names.is_current(object_id.name) and (
                not self._central.contains(object_id)
                or stored_quality(self._local, object_id) < stored_quality(self._central, object_id)
            )
            if is_lacking and (found := read_whole(self._local, object_id, self._object_bytes_max, self._take)):
                self._tries[object_id] += 1
                self.sent_objects += self._central.put_from(object_id, found)
        except TierUnavailable as error:
            # The centre answers, but does not take this one, now or ever: after some tries it is given up.
            if not isinstance(error, NotAllowed) and self._tries[object_id] < TRIES_MAX:
                raise
            self.given_up += 1
            _log.debug("the centre does not take %s, it stays here: %s", object_id, error)
        del self._tries[object_id]
        self.manifest.done(object_id)
        return 0 if found is None else len(found)

    def _take(self, size: int) -> memoryview:
        if size > len(self._buffer):
            self._buffer = aligned_buffer(size)
        return self._buffer


def stored_quality(tier: Tier, object_id: ObjectId) -> float:
    """Quality that an object states; inf if it is not there."""
    head = bytearray(HEADER_BYTES)
    return object_quality(head[: tier.get_into(object_id, memoryview(head)) or 0])


def read_whole(tier: Tier, object_id: ObjectId, size_max: int, take: Callable[[int], memoryview]) -> memoryview | None:
    """Read an object of unknown size into a buffer of `take`; None if it is not there."""
    head = bytearray(HEADER_BYTES)
    size = object_bytes(head[: tier.get_into(object_id, memoryview(head)) or 0])
    if not HEADER_BYTES <= size <= size_max:
        return None
    buffer = take(size)[:size]
    return buffer if tier.get_into(object_id, buffer) == size else None


class Latest:
    """Servers that may have what we lack: for a region the centre, which asks others; for the centre its regions."""

    def __init__(self, sources: Sequence[Tier], store: Tier, object_bytes_max: int) -> None:
        self._sources, self._store, self._object_bytes_max = list(sources), store, object_bytes_max
        self._workers: ThreadPoolExecutor | None = None

    def open(self) -> None:
        """Open the sources, and start what asks them."""
        for source in self._sources:
            source.open()
        self._workers = ThreadPoolExecutor(ASKING_THREADS, thread_name_prefix="kvtide-latest")

    def close(self) -> None:
        """Close the sources. Idempotent."""
        if self._workers is not None:
            self._workers.shutdown(wait=True, cancel_futures=True)
            self._workers = None
        for source in self._sources:
            source.close()

    def bring(self, object_id: ObjectId, take: Callable[[int], memoryview]) -> bool:
        """Copy an object into our store from whoever has it. False if nobody has, RequestRefused (503) if unknown."""
        workers, problem = self._workers, None
        if workers is None:
            raise RequestRefused(503, "the server is ending", retry_after_s=1.0)
        # All are asked at the same time: who is silent holds nobody up whom another has an answer for.
        asked = {workers.submit(copy_context().run, source.contains, object_id): source for source in self._sources}
        for answer in as_completed(asked):
            found = None
            try:
                if answer.result():
                    found = read_whole(asked[answer], object_id, self._object_bytes_max, take)
            except TierUnavailable as error:
                problem = error
            if found is not None:
                return self._store.put_from(object_id, found)
        if problem is not None:
            raise RequestRefused(503, f"the latest state was asked for and can't be had: {problem}", retry_after_s=1.0)
        return False


@dataclass(eq=False)
class Backing:
    """A server's sources of answers, not yet opened: tiers, records, names, and other regions if there are any.

    `store` is what requests are answered from, `local` the part of it that is here. A centre has `latest` and
    `recovery`, a regional server `latest` and its centre's.
    """

    store: TierStack
    records: Records
    names: Names
    local: TierStack
    latest: Latest | None = None
    central: CentralRecords | None = None
    synchroniser: Synchroniser | None = None
    recovery: Recovery | None = None

    def __post_init__(self) -> None:
        self._background = [part for part in (self.synchroniser, self.central, self.recovery) if part is not None]
        self._parts = [self.records, self.store, *([self.latest] if self.latest else []), *self._background]

    def open(self) -> None:
        """Open all of it, the records first: they say what is out of date. TierUnavailable or OSError if one can't."""
        for part in self._parts:
            part.open()

    def stop(self) -> None:
        """Begin nothing more with other regions but what is asked for. Does not wait."""
        for part in self._background:
            part.stop()

    def close(self) -> None:
        """Close all of it. Idempotent."""
        for part in reversed(self._parts):
            part.close()

    def as_of_s(self) -> float | None:
        """Wall time until which we know what the centre has written; None at the centre, or if it never answered."""
        return self.central.as_of_s if self.central is not None else None


def backing_for(settings: ServerSettings, clock: Clock) -> Backing:
    """Make what the settings name. ValueError for a bad URL, or a region without a manifest."""
    records = Records(records_path(settings), clock)
    names = Names(records.generation)
    limits, size_max = settings.limits, settings.limits.object_bytes_max
    of_tiers = Limits(memory_bytes_max=limits.memory_bytes_max, disk_bytes_max=limits.disk_bytes_max)
    local = tiers_of(settings.tiers, of_tiers, clock, lambda key: False)
    if settings.central is None:
        if not settings.regions:
            return Backing(local, records, names, local)
        asked = [client for url in settings.regions for client in records_clients(url, clock, ASKED_S_MAX)]
        sources = [http_tier(url, clock, _PEER, ASKED_S_MAX, _LOCAL_ONLY, BYTES_S_MIN) for url in settings.regions]
        latest = Latest(sources, local, size_max)
        return Backing(local, records, names, local, latest, recovery=Recovery(asked, records))
    central = settings.central
    if settings.manifest is None:
        raise ValueError("a regional server needs a file for its manifest: --manifest PATH")
    if not central.startswith("http"):
        raise ValueError(f"a centre is a kvtide server, as in http://host:port, got {central!r}")
    asking = records_clients(central, clock, LATEST_S_MAX)
    if len(asking) != 1:
        raise ValueError(f"a centre is one server: it alone says what the latest is, got {central!r}")
    manifest = Manifest(settings.manifest)
    behind = CentralTier(http_tier(central, clock, _PEER, LATEST_S_MAX, (), BYTES_S_MIN), manifest)
    latest = Latest([http_tier(central, clock, _PEER, LATEST_S_MAX, _LATEST, BYTES_S_MIN)], local, size_max)
    # Nobody waits for what is sent: the centre may take its time to store it.
    sent_to, bytes_s_max = http_tier(central, clock, bytes_s_min=BYTES_S_MIN), settings.sync_bytes_s_max
    synchroniser = Synchroniser(local, sent_to, manifest, names, bytes_s_max, size_max, clock)
    store = TierStack([local, behind], written_last=[behind])
    return Backing(store, records, names, local, latest, CentralRecords(asking[0], records, clock), synchroniser)
