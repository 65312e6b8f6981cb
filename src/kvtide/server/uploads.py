"""Objects that come in pieces: what is here of each until it is whole, rests too long, or has to make room.

Invariant: bytes of all and of each owner, and their number, are bounded; what is being read or stored stays till then.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain

from kvtide.errors import RequestRefused
from kvtide.server.settings import ServerLimits
from kvtide.tier.base import LentObject
from kvtide.types import ObjectId
from kvtide.wire import HEADER_BYTES, StoredObject, header_and_table_bytes, parse_header
from kvtide.wire.protocol import etag
from kvtide.wire.ranges import parse_ranges
from kvtide.wire.receiver import Receiver, is_frame, parse_frame_header


class Upload:
    """An object of which some sections are here. Thread-safe."""

    def __init__(self, object_id: ObjectId, owner: str, stored: StoredObject, now_s: float) -> None:
        """CorruptPayload for a table out of bounds."""
        self.name = (object_id, stored.version_tag)
        self.owner = owner
        self.stored = stored
        self.receiver = Receiver(stored)
        self.held_bytes = self.receiver.held_bytes
        self.used_s = now_s
        # Those that read or store it now, and whether it goes when they are done.
        self.users = 0
        self.is_over = False
        self._lock = threading.Lock()

    def offer(self, frames: memoryview) -> None:
        """Take frames, one behind the other. CorruptPayload for a damaged or foreign one; those before it count."""
        while frames:
            size = parse_frame_header(frames).frame_bytes
            with self._lock:
                self.receiver.offer(frames[:size])
            frames = frames[size:]

    def has_part(self, asked: str) -> bool:
        """True if all that a Range header asks for is here."""
        try:
            return all(self.receiver.has_range(*part) for part in parse_ranges(asked, self.stored.object_bytes))
        except RequestRefused:
            return False


class Uploads:
    """The uploads that are not over. Thread-safe; `limits` gives the bounds as they are now."""

    def __init__(self, limits: Callable[[], ServerLimits], monotonic_s: Callable[[], float]) -> None:
        self._limits = limits
        self._monotonic_s = monotonic_s
        self._lock = threading.Lock()
        # By object and version tag, as they began.
        self._uploads: dict[tuple[ObjectId, bytes], Upload] = {}

    def take(
        self,
        object_id: ObjectId,
        claimed: ObjectId,
        owner: str,
        body: memoryview,
        is_wanted: Callable[[StoredObject], bool],
    ) -> Upload | None:
        """Take an object's header and table, frames, or both in this order; None if the object is not wanted.

        CorruptPayload for other bytes. RequestRefused: 404 for frames of what was not announced, 413, 503 without room.
        """
        head_bytes = 0 if is_frame(body) else header_and_table_bytes(body)
        if head_bytes:
            announced = parse_header(bytes(body[:head_bytes]), claimed)
            if not is_wanted(announced):
                return None
            upload = self._begun(object_id, owner, announced)
        else:
            upload = self._found(object_id, parse_frame_header(body).version_tag)
        upload.offer(body[head_bytes:])
        return upload

    def _begun(self, object_id: ObjectId, owner: str, stored: StoredObject) -> Upload:
        """Return the upload of an object, a new one if there is none."""
        self.drop_idle()
        new = Upload(object_id, owner, stored, self._monotonic_s())
        with self._lock:
            if new.name not in self._uploads:
                self._make_room(new)
            upload = self._uploads.setdefault(new.name, new)
            upload.used_s = new.used_s
            return upload

    def _found(self, object_id: ObjectId, version_tag: bytes) -> Upload:
        with self._lock:
            upload = self._uploads.get((object_id, version_tag))
            if upload is None:
                raise RequestRefused(404, "no such object was announced, or it had to make room")
            upload.used_s = self._monotonic_s()
            return upload

    def _make_room(self, new: Upload) -> None:
        """Drop what rests longest until a new upload fits: of its owner, then of whoever holds most."""
        limits = self._limits()
        size_max = min(limits.uploads_bytes_max, limits.tenant_uploads_bytes_max)
        if new.held_bytes > size_max:
            raise RequestRefused(413, f"objects in pieces may take {size_max} bytes here, this one {new.held_bytes}")
        while True:
            held, counts = Counter[str](), Counter[str]()
            for each in chain(self._uploads.values(), [new]):
                held[each.owner] += each.held_bytes
                counts[each.owner] += 1
            idle = sorted((each for each in self._uploads.values() if not each.users), key=lambda each: each.used_s)
            if held[new.owner] > limits.tenant_uploads_bytes_max:
                victim = next((each for each in idle if each.owner == new.owner), None)
            elif held.total() > limits.uploads_bytes_max:
                victim = max(idle, key=lambda each: held[each.owner], default=None)
            elif counts.total() > limits.uploads_max:
                victim = max(idle, key=lambda each: counts[each.owner], default=None)
            else:
                return
            if victim is None:
                raise RequestRefused(503, "objects in pieces hold all that they may", retry_after_s=1.0)
            del self._uploads[victim.name]

    def lend(self, object_id: ObjectId, method: str, headers: Mapping[str, str]) -> LentObject | None:
        """Lend an object to a GET for a range of which all is here, else None; of several versions the first one."""
        asked = headers.get("range")
        if method != "GET" or asked is None:
            return None
        with self._lock:
            upload = next((each for (of, _), each in self._uploads.items() if of == object_id), None)
            if upload is None or upload.is_over or not upload.has_part(asked):
                return None
            tag = etag(upload.stored.version_tag)
            return self._lent(upload) if headers.get("if-range", tag) == tag else None

    def lend_whole(self, upload: Upload) -> LentObject:
        """Lend an object of which every section is here, as one view."""
        with self._lock:
            return self._lent(upload)

    def _lent(self, upload: Upload) -> LentObject:
        upload.users += 1
        upload.used_s = self._monotonic_s()
        memory, release = upload.receiver.memory, partial(self._release, upload)
        return LentObject(len(memory), bytes(memory[:HEADER_BYTES]), [memory], None, release)

    def _release(self, upload: Upload) -> None:
        with self._lock:
            upload.users -= 1
            if upload.is_over and not upload.users:
                self._uploads.pop(upload.name, None)

    def drop(self, object_id: ObjectId, version_tag: bytes | None = None) -> None:
        """Forget what has come of an object, of one version or of all; what is being read goes when that is done."""
        self._drop(lambda upload: upload.name == (object_id, version_tag or upload.stored.version_tag))

    def drop_idle(self) -> None:
        """Forget what has rested too long."""
        latest_s = self._monotonic_s() - self._limits().uploads_idle_s_max
        self._drop(lambda upload: upload.used_s < latest_s and not upload.users)

    def _drop(self, is_over: Callable[[Upload], bool]) -> None:
        with self._lock:
            for upload in [each for each in self._uploads.values() if is_over(each)]:
                upload.is_over = True
                if not upload.users:
                    del self._uploads[upload.name]

    def check(self) -> None:
        """AssertionError if the bounds don't hold or something is lent. Call it while no request is under way."""
        limits, uploads = self._limits(), list(self._uploads.values())
        assert len(uploads) <= limits.uploads_max
        assert sum(each.held_bytes for each in uploads) <= limits.uploads_bytes_max
        for upload in uploads:
            assert not upload.users, f"{upload.name[0]} is lent to nobody"
            upload.receiver.check()
