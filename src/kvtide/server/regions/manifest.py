"""The objects that a region has stored and the centre has not: numbered, in a file, so that a restart goes on.

Stored namespaces stand in it with what they are called, since the centre is asked by that name. Invariant: an object
is forgotten only after the centre has it, nobody wants it, or the bound is passed (then it is counted).
"""

from __future__ import annotations

import struct
import threading
from collections import Counter, OrderedDict
from pathlib import Path
from typing import BinaryIO

from kvtide.tier.files import Files
from kvtide.types import BlockKey, Name, NamedId, Namespace, ObjectId

PENDING_MAX = 1 << 18
# The file is written again when it has more records than this: 73 bytes each.
RECORDS_MAX = 4 * PENDING_MAX
# Sequence number, stored namespace, key, kind. A name takes two: generation, stored and own namespace; then the tenant.
_RECORD = struct.Struct("<Q32s32sB")
_ADDED, _DONE, _NAME, _TENANT = range(4)
_TENANT_BYTES = 64
_FILE_BYTES_MAX = 2 * RECORDS_MAX * _RECORD.size


class Manifest:
    """The objects that wait, by sequence number. Thread-safe between `open` and `close`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._file: BinaryIO | None = None
        self._pending: OrderedDict[ObjectId, int] = OrderedDict()
        self._uses: Counter[ObjectId] = Counter()
        self._names: dict[Namespace, Name] = {}
        self._sequence = self._records = 0
        # What `next` has returned last.
        self._taken: tuple[ObjectId, int] | None = None
        self.dropped = 0

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
                    tenant = (first + second).rstrip(b"\0").decode("ascii", errors="replace")
                    self._names[named[1]] = Name(tenant, named[2], named[0])
                elif kind in {_ADDED, _DONE}:
                    self._replay(number, ObjectId(Namespace(first), BlockKey(second)), kind == _DONE)
            self._rewrite()

    def _replay(self, sequence: int, object_id: ObjectId, is_done: bool) -> None:
        self._sequence = max(self._sequence, sequence)
        if is_done:
            self._pending.pop(object_id, None)
        elif object_id.namespace in self._names:
            self._pending[object_id] = sequence
        else:
            # A fault took its name, by which alone the centre could get it.
            self.dropped += 1

    def close(self) -> None:
        """Close the file. Idempotent."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, object_id: NamedId) -> None:
        """Note a new object, and what its namespace is called. The oldest is dropped if too many wait.

        One that waits already, or is being sent, is sent once more as it is then.
        """
        with self._lock:
            if object_id in self._pending:
                self._sequence += 1
                self._pending[object_id] = self._sequence
                return
            if self._names.get(object_id.namespace) != object_id.name:
                self._names[object_id.namespace] = object_id.name
                self._append(_packed_name(object_id.namespace, object_id.name), 2)
            self._sequence += 1
            self._pending[object_id] = self._sequence
            self._write(self._sequence, object_id, _ADDED)
            if len(self._pending) > PENDING_MAX:
                oldest, sequence = self._pending.popitem(last=False)
                self._uses.pop(oldest, None)
                self._write(sequence, oldest, _DONE)
                self.dropped += 1

    def note_use(self, object_id: ObjectId) -> None:
        """Count a read: what is read often is sent first."""
        with self._lock:
            if object_id in self._pending:
                self._uses[object_id] += 1

    def next(self) -> NamedId | None:
        """Return what to send next: the one that was read most, of those the oldest. None if nothing waits."""
        with self._lock:
            found = next(iter(self._pending), None)
            if self._uses:
                found = max(self._uses, key=lambda each: (self._uses[each], -self._pending[each]))
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
                self._write(sequence, object_id, _DONE)

    def _write(self, sequence: int, object_id: ObjectId, kind: int) -> None:
        self._append(_RECORD.pack(sequence, object_id.namespace, object_id.key, kind), 1)

    def _append(self, data: bytes, records: int) -> None:
        if self._file is not None:
            self._file.write(data)
            self._records += records
            if self._records > RECORDS_MAX:
                self._rewrite()

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
        self._records = len(waiting) + 2 * len(names)


def _packed_name(stored: Namespace, name: Name) -> bytes:
    tenant = name.tenant.encode("ascii").ljust(_TENANT_BYTES, b"\0")
    half = _TENANT_BYTES // 2
    first = _RECORD.pack(name.generation, stored, name.namespace, _NAME)
    return first + _RECORD.pack(0, tenant[:half], tenant[half:], _TENANT)
