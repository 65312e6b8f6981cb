"""What a region has stored and the centre has not: numbered, in a file, so that a restart goes on where it was.

Invariant: an object is forgotten only after the centre has it, or because the bound is passed (then it is counted).
"""

from __future__ import annotations

import struct
import threading
from collections import Counter, OrderedDict
from pathlib import Path
from typing import BinaryIO

from kvtide.types import BlockKey, Namespace, ObjectId

__all__ = ["PENDING_MAX", "Manifest"]

PENDING_MAX = 1 << 18
# Sequence number, namespace, key, and whether the centre has it now.
_RECORD = struct.Struct("<Q32s32s?")


class Manifest:
    """The objects that wait, by sequence number. Thread-safe between `open` and `close`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._file: BinaryIO | None = None
        self._pending: OrderedDict[ObjectId, int] = OrderedDict()
        self._uses: Counter[ObjectId] = Counter()
        self._sequence = 0
        self.dropped = 0

    def open(self) -> None:
        """Read what waits, and write it anew without what is done. OSError if that can't be done."""
        with self._lock:
            data = self._path.read_bytes() if self._path.exists() else b""
            # A record that a crash cut off is of an object that is stored once more or misses.
            for record in _RECORD.iter_unpack(data[: len(data) // _RECORD.size * _RECORD.size]):
                sequence, namespace, key, is_done = record
                object_id = ObjectId(Namespace(namespace), BlockKey(key))
                self._sequence = max(self._sequence, sequence)
                if is_done:
                    self._pending.pop(object_id, None)
                else:
                    self._pending[object_id] = sequence
            aside = self._path.with_suffix(".new")
            aside.write_bytes(b"".join(_RECORD.pack(n, *object_id, False) for object_id, n in self._pending.items()))
            aside.replace(self._path)
            self._file = self._path.open("ab", buffering=0)

    def close(self) -> None:
        """Close the file. Idempotent."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, object_id: ObjectId) -> None:
        """Note a new object. The oldest is dropped if too many wait."""
        with self._lock:
            if object_id in self._pending:
                return
            self._sequence += 1
            self._pending[object_id] = self._sequence
            self._write(self._sequence, object_id, is_done=False)
            if len(self._pending) > PENDING_MAX:
                oldest, sequence = self._pending.popitem(last=False)
                self._write(sequence, oldest, is_done=True)
                self.dropped += 1

    def note_use(self, object_id: ObjectId) -> None:
        """Count a read: what is read often is sent first."""
        with self._lock:
            if object_id in self._pending:
                self._uses[object_id] += 1

    def next(self) -> ObjectId | None:
        """Return what to send next: the one that was read most, of those the oldest. None if nothing waits."""
        with self._lock:
            if self._uses:
                return max(self._uses, key=lambda each: (self._uses[each], -self._pending[each]))
            return next(iter(self._pending), None)

    def done(self, object_id: ObjectId) -> None:
        """Forget an object: the centre has it, or nobody has."""
        with self._lock:
            self._uses.pop(object_id, None)
            sequence = self._pending.pop(object_id, None)
            if sequence is not None:
                self._write(sequence, object_id, is_done=True)

    def _write(self, sequence: int, object_id: ObjectId, is_done: bool) -> None:
        if self._file is not None:
            self._file.write(_RECORD.pack(sequence, object_id.namespace, object_id.key, is_done))
