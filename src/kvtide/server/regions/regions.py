"""A region and its centre: what a regional server reads through, sends on in the background, and knows of the centre.

Objects never change, so only records, and what is known to exist, can be out of date. Stored names are each server's
own: servers ask each other by tenant, namespace and generation, and one that is of another generation is a miss.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvtide.clock import Clock
from kvtide.errors import RequestRefused, TierUnavailable
from kvtide.evict import Hint
from kvtide.server.names import Names
from kvtide.server.regions.central import CentralRecords, Recovery
from kvtide.server.regions.records import Records
from kvtide.server.regions.requests import Manifest
from kvtide.tier import Repeater
from kvtide.tier.base import Buffer, Tier, WrappedTier
from kvtide.tier.buffers import aligned_buffer
from kvtide.tier.http import PeerSettings, http_tier
from kvtide.tier.http.records import records_clients
from kvtide.tier.stack import TierStack
from kvtide.types import NamedId, ObjectId
from kvtide.wire import HEADER_BYTES, object_bytes, object_quality
from kvtide.wire.protocol import FORCE_HEADER, LOCAL_HEADER

_log = logging.getLogger(__name__)

# How long the synchroniser waits when there is nothing to send, or nobody to send it to.
IDLE_S = 0.2
# A region waits so long for its centre to say something, about objects and records; and the centre, which asks all of
# its regions at the same time, for them: soon enough for the region that asked.
LATEST_S_MAX = 2.0
ASKED_S_MAX = 1.0
# A body may take longer than that by its size over this.
BYTES_S_MIN = 1e6
# Regions that are asked at the same time.
ASKING_THREADS = 16
TRIES_MAX = 3
# A server that was silent twice is left alone.
_PEER = PeerSettings(tries_max=1, faults_max=2, open_s=2.0)
_LOCAL_ONLY = ((LOCAL_HEADER, "1"),)
_LATEST = ((FORCE_HEADER, "1"),)


@dataclass(frozen=True, slots=True)
class RegionSettings:
    """Bounds of what a region sends to its centre. ValueError for one that is not positive."""

    sync_bytes_s_max: float = 50e6
    object_bytes_max: int = 256 << 20

    def __post_init__(self) -> None:
        if not (self.sync_bytes_s_max > 0 and self.object_bytes_max > 0):
            raise ValueError(f"the bounds of a region are positive, got {self}")


class CentralTier(WrappedTier):
    """The centre behind a region's own tiers: read through, and written later by the synchroniser.

    It is asked by name: of ids without one, which are places of this server, it knows nothing.
    """

    def __init__(self, central: Tier, manifest: Manifest) -> None:
        super().__init__(central)
        self.name, self.is_own, self.is_batched, self.takes_advice = "central", False, True, True
        self._manifest = manifest

    def contains(self, object_id: ObjectId) -> bool:
        """Ask the centre."""
        return isinstance(object_id, NamedId) and super().contains(object_id)

    def get_into(self, object_id: ObjectId, buffer: memoryview, offset: int = 0) -> int | None:
        """Read from the centre."""
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
        """Remove from the centre."""
        return isinstance(object_id, NamedId) and super().delete(object_id, reason)

    def removed_reason(self, object_id: ObjectId) -> str | None:
        """Return nothing: a miss crosses to the centre once, not twice."""
        return None

    def count_leading(self, object_ids: Sequence[ObjectId]) -> int:
        """Ask the centre in one request."""
        return self.tier.count_leading(object_ids)

    def contains_each(self, object_ids: Sequence[ObjectId]) -> list[bool]:
        """Ask the centre in one request."""
        if all(isinstance(each, NamedId) for each in object_ids):
            return self.tier.contains_each(object_ids)
        return [self.contains(object_id) for object_id in object_ids]

    def advise(self, object_ids: Sequence[ObjectId], hint: Hint) -> None:
        """Pass a prompt's advice on: the centre keeps what regions evict, and sees nothing of what they hit."""
        if all(isinstance(each, NamedId) for each in object_ids):
            self.tier.advise(object_ids, hint)


class Synchroniser:
    """A thread that sends what the manifest names to the centre, hot first, no faster than the settings allow."""

    def __init__(
        self,
        local: TierStack,
        central: Tier,
        manifest: Manifest,
        names: Names,
        settings: RegionSettings,
        clock: Clock,
    ) -> None:
        self._local = local
        self._central = central
        self._names = names
        self._manifest = manifest
        self._settings = settings
        self._clock = clock
        self._sending = Repeater(self._send, "kvtide-sync")
        self._buffer = memoryview(b"")
        self._tries: Counter[ObjectId] = Counter()
        self.sent_objects = self.sent_bytes = self.given_up = 0

    @property
    def waiting(self) -> int:
        """The number of objects that the centre has not got yet."""
        return len(self._manifest)

    def open(self) -> None:
        """Read the manifest and start."""
        self._manifest.open()
        self._central.open()
        self._sending.open()

    def stop(self) -> None:
        """Send nothing more after what is under way. Does not wait."""
        self._sending.stop()

    def close(self) -> None:
        """Stop after what is under way; the manifest keeps the rest. Idempotent."""
        self._sending.close()
        self._central.close()
        self._manifest.close()

    def _send(self) -> float:
        started_s = self._clock.monotonic_s()
        try:
            size = self.step()
        except (TierUnavailable, OSError) as error:
            _log.debug("nothing is sent to the centre now: %s", error)
            return IDLE_S
        least_s = IDLE_S if size is None else size / self._settings.sync_bytes_s_max
        return max(0.0, least_s - (self._clock.monotonic_s() - started_s))

    def step(self) -> int | None:
        """Send the next object; return how many bytes that took, None if nothing waits.

        One that is gone here, or there already and as good, or of an earlier generation, costs none. TierUnavailable
        if the centre does not answer or take it.
        """
        object_id = self._manifest.next()
        if object_id is None:
            return None
        is_wanted = self._names.is_current(object_id.name) and self._is_lacking(object_id)
        found = self._whole(object_id) if is_wanted else None
        if found is not None:
            self._tries[object_id] += 1
            try:
                is_stored = self._central.put_from(object_id, found)
            except TierUnavailable as error:
                # The centre answers, but does not take this one: after some tries it is given up.
                if self._tries[object_id] < TRIES_MAX:
                    raise
                self.given_up += 1
                _log.warning("the centre does not take %s, it stays here: %s", object_id, error)
            else:
                self.sent_objects += is_stored
                self.sent_bytes += len(found)
        del self._tries[object_id]
        self._manifest.done(object_id)
        return 0 if found is None else len(found)

    def _is_lacking(self, object_id: ObjectId) -> bool:
        """Tell whether the centre has nothing, or something coarser than what is here."""
        if not self._central.contains(object_id):
            return True
        return stored_quality(self._local, object_id) < stored_quality(self._central, object_id)

    def _whole(self, object_id: ObjectId) -> memoryview | None:
        found, self._buffer = read_whole(self._local, object_id, self._buffer, self._settings.object_bytes_max)
        return found


def stored_quality(tier: Tier, object_id: ObjectId) -> float:
    """Return the quality that an object states; inf if it is not there."""
    head = bytearray(HEADER_BYTES)
    return object_quality(head[: tier.get_into(object_id, memoryview(head)) or 0])


def read_whole(
    tier: Tier,
    object_id: ObjectId,
    buffer: memoryview,
    size_max: int,
    take: Callable[[int], memoryview] = aligned_buffer,
) -> tuple[memoryview | None, memoryview]:
    """Read an object of unknown size; return it, or None if it is not there, and the buffer, or a larger one.

    `take` gives that.
    """
    head = memoryview(bytearray(HEADER_BYTES))
    came = tier.get_into(object_id, head)
    if came != HEADER_BYTES:
        return None, buffer
    size = object_bytes(bytes(head))
    if not HEADER_BYTES <= size <= size_max:
        return None, buffer
    if size > len(buffer):
        buffer = take(size)
    return (buffer[:size] if tier.get_into(object_id, buffer[:size]) == size else None), buffer


class Latest:
    """Servers that may have what we lack: for a region the centre, which asks others; for the centre its regions."""

    def __init__(self, sources: Sequence[Tier], store: Tier, settings: RegionSettings) -> None:
        self._sources = list(sources)
        self._store = store
        self._settings = settings
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

    def bring(self, object_id: ObjectId, take: Callable[[int], memoryview] = aligned_buffer) -> bool:
        """Copy an object into our store from whoever has it, through memory that `take` gives. False if nobody has.

        RequestRefused (503) if it was not found and somebody could not be asked: then nobody knows.
        """
        workers, problem = self._workers, None
        if workers is None:
            raise RequestRefused(503, "the server is ending", retry_after_s=1.0)
        # All are asked at the same time: who is silent holds nobody up whom another has an answer for.
        asked = {workers.submit(copy_context().run, source.contains, object_id): source for source in self._sources}
        for answer in as_completed(asked):
            try:
                found = self._whole(asked[answer], object_id, take) if answer.result() else None
            except TierUnavailable as error:
                problem = error
                continue
            if found is not None:
                return self._store.put_from(object_id, found)
        if problem is not None:
            raise RequestRefused(503, f"the latest state was asked for and can't be had: {problem}", retry_after_s=1.0)
        return False

    def _whole(self, source: Tier, object_id: ObjectId, take: Callable[[int], memoryview]) -> memoryview | None:
        return read_whole(source, object_id, memoryview(b""), self._settings.object_bytes_max, take)[0]


class Region:
    """A server's links to other regions: a centre has `latest` alone, a regional server also its centre's.

    `store` is what requests are answered from, `local` the part of it that is here. Records and names are the
    server's, which opens and closes them.
    """

    def __init__(
        self,
        store: TierStack,
        local: TierStack,
        latest: Latest,
        central: CentralRecords | None = None,
        synchroniser: Synchroniser | None = None,
        manifest: Manifest | None = None,
        recovery: Recovery | None = None,
    ) -> None:
        self.store = store
        self.local = local
        self.latest = latest
        self.central = central
        self.synchroniser = synchroniser
        self.recovery = recovery
        self._manifest = manifest

    def open(self) -> None:
        """Start synchronising. The store is opened by its owner, before."""
        self.latest.open()
        if self.synchroniser is not None:
            self.synchroniser.open()
        if self.central is not None:
            self.central.open()
        if self.recovery is not None:
            self.recovery.open()

    def stop(self) -> None:
        """Begin nothing more with other regions but what is asked for. Does not wait."""
        if self.central is not None:
            self.central.stop()
        if self.synchroniser is not None:
            self.synchroniser.stop()
        if self.recovery is not None:
            self.recovery.stop()

    def close(self) -> None:
        """Stop synchronising. Idempotent; the store is closed by its owner, after."""
        if self.central is not None:
            self.central.close()
        if self.synchroniser is not None:
            self.synchroniser.close()
        if self.recovery is not None:
            self.recovery.close()
        self.latest.close()

    def require_recovered(self) -> None:
        """RequestRefused (503) at a centre that may have lost what its regions know."""
        if self.recovery is not None:
            self.recovery.require_over()

    def note_use(self, object_id: ObjectId) -> None:
        """Count a read, so that what is hot is synchronised first."""
        if self._manifest is not None:
            self._manifest.note_use(object_id)

    def as_of_s(self) -> float | None:
        """Return until when we know what the centre has written; None at the centre, or if it never answered."""
        return self.central.as_of_s if self.central is not None else None


def region_of(
    local: TierStack,
    central: str,
    manifest: Path,
    settings: RegionSettings,
    records: Records,
    names: Names,
    clock: Clock,
) -> Region:
    """Return a region in front of the centre that an http:// or https:// URL names. ValueError for a bad URL."""
    if not central.startswith("http"):
        raise ValueError(f"a centre is a kvtide server, as in http://host:port, got {central!r}")
    asking = records_clients(central, clock, LATEST_S_MAX)
    if len(asking) != 1:
        raise ValueError(f"a centre is one server: it alone says what the latest is, got {central!r}")
    waiting = Manifest(manifest)
    asked = partial(http_tier, clock=clock, settings=_PEER, bytes_s_min=BYTES_S_MIN)
    behind = CentralTier(asked(central, operation_s_max=LATEST_S_MAX), waiting)
    store = TierStack([local, behind], write_back=[behind])
    latest = Latest([asked(central, operation_s_max=LATEST_S_MAX, extra=_LATEST)], local, settings)
    # Nobody waits for what is sent: the centre may take its time to store it.
    synchroniser = Synchroniser(local, http_tier(central, clock), waiting, names, settings, clock)
    return Region(store, local, latest, CentralRecords(asking[0], records, clock), synchroniser, waiting)


def centre_of(
    store: TierStack, regions: Sequence[str], settings: RegionSettings, records: Records, clock: Clock
) -> Region:
    """Return a centre that asks these regions, by URL, for what it lacks when the latest is asked for."""
    sources = [http_tier(url, clock, _PEER, ASKED_S_MAX, _LOCAL_ONLY, bytes_s_min=BYTES_S_MIN) for url in regions]
    asked = [client for url in regions for client in records_clients(url, clock, ASKED_S_MAX)]
    return Region(store, store, Latest(sources, store, settings), recovery=Recovery(asked, records))
