"""A bounded record of what left a store and why, so that `kvtide explain` can name the reason."""

from __future__ import annotations

import os
from pathlib import Path

from kvtide.types import ObjectId

__all__ = ["RemovalJournal"]

JOURNAL_BYTES_MAX = 1 << 20


class RemovalJournal:
    """Appends one line a removal; the older half goes when the file passes its bound. Losing a line does no harm."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def append(self, object_id: ObjectId, reason: str, wall_s: float) -> None:
        """Note a removal. OSError if the file can't be written."""
        line = f"{wall_s:.0f} {reason} {object_id.namespace.hex()} {object_id.key.hex()}\n".encode()
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, line)
            size = os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)
        if size > JOURNAL_BYTES_MAX:
            self._halve()

    def _halve(self) -> None:
        lines = self._path.read_bytes().splitlines(keepends=True)
        aside = self._path.with_suffix(f".{os.getpid()}")
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
