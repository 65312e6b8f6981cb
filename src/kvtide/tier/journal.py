"""A bounded record of what left a store and why, so that `kvtide explain` can name the reason."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from kvtide.types import ObjectId

__all__ = ["RemovalJournal"]

JOURNAL_BYTES_MAX = 1 << 20


class RemovalJournal:
    """Appends one line a removal; the older half goes before the file passes its bound. Losing a line does no harm."""

    def __init__(self, path: Path, bytes_max: int = JOURNAL_BYTES_MAX) -> None:
        self._path = path
        self._bytes_max = bytes_max

    def append(self, object_ids: Iterable[ObjectId], reason: str, wall_s: float) -> None:
        """Note removals, the last ones if all don't fit. OSError if the file can't be written."""
        lines = [f"{wall_s:.0f} {reason} {item.namespace.hex()} {item.key.hex()}\n".encode() for item in object_ids]
        if not lines:
            return
        # Half of the bound at once, so that the file with them stays under it after it has been halved.
        data = b"".join(lines[-max(1, self._bytes_max // 2 // len(lines[0])) :])
        if self._size() + len(data) > self._bytes_max:
            self._halve()
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, data)
        finally:
            os.close(descriptor)

    def _size(self) -> int:
        try:
            return self._path.stat().st_size
        except FileNotFoundError:
            return 0

    def _halve(self) -> None:
        lines = self._path.read_bytes().splitlines(keepends=True)
        aside = self._path.with_suffix(".part")
        aside.write_bytes(b"".join(lines[len(lines) // 2 :]))
        aside.rename(self._path)

    def reason(self, object_id: ObjectId) -> str | None:
        """Return the last noted reason for this object, or None."""
        try:
            text = self._path.read_text(encoding="ascii", errors="replace")
        except OSError:
            return None
        key, reason = object_id.key.hex(), None
        for line in text.splitlines():
            fields = line.split(" ")
            if len(fields) == 4 and fields[3] == key:
                reason = fields[1]
        return reason
