"""A bounded record of what left a store and why, and of what engines decided, so that `kvtide explain` can tell."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from kvtide.outcomes import Decided, decisions_text, parse_decisions
from kvtide.tier.files import Files
from kvtide.types import ObjectId

JOURNAL_BYTES_MAX = 1 << 20


class RemovalJournal:
    """Appends lines; the older half goes before the file passes its bound. Losing a line does no harm.

    A removal is time, reason, namespace and key; a decision time, the word `decided` and counts (kvtide.outcomes).
    """

    def __init__(self, path: Path, bytes_max: int = JOURNAL_BYTES_MAX) -> None:
        self._path = path
        self._bytes_max = bytes_max
        self._files = Files()

    def append(self, object_ids: Iterable[ObjectId], reason: str, wall_s: float) -> None:
        """Note removals, the last ones if all don't fit. OSError if the file can't be written."""
        lines = [f"{wall_s:.0f} {reason} {item.namespace.hex()} {item.key.hex()}\n".encode() for item in object_ids]
        if lines:
            self._append(lines)

    def note_decisions(self, counts: Mapping[Decided, int], wall_s: float) -> None:
        """Note how many tokens engines decided about. OSError if the file can't be written."""
        if counts:
            self._append([f"{wall_s:.0f} decided {decisions_text(counts)}\n".encode()])

    def decisions(self) -> dict[Decided, int]:
        """Return what was decided, as far back as there are lines; lines that are no counts are passed over."""
        counts: Counter[Decided] = Counter()
        for line in self._lines():
            fields = line.split(" ")
            if len(fields) == 3 and fields[1] == "decided":
                with contextlib.suppress(ValueError):
                    counts.update(parse_decisions(fields[2]))
        return dict(counts)

    def _append(self, lines: Sequence[bytes]) -> None:
        # Half of the bound at once, so that the file with them stays under it after it has been halved.
        data = b"".join(lines[-max(1, self._bytes_max // 2 // len(lines[0])) :])
        if self._files.length(self._path) + len(data) > self._bytes_max:
            lines_now = self._files.content(self._path, self._bytes_max).splitlines(keepends=True)
            self._files.save(self._path, b"".join(lines_now[len(lines_now) // 2 :]))
        descriptor = self._files.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            os.write(descriptor, data)
        finally:
            self._files.close(descriptor)

    def reason(self, object_id: ObjectId) -> str | None:
        """Return the last noted reason for this object, or None."""
        key, reason = object_id.key.hex(), None
        for line in self._lines():
            fields = line.split(" ")
            if len(fields) == 4 and fields[3] == key:
                reason = fields[1]
        return reason

    def _lines(self) -> list[str]:
        try:
            return self._files.content(self._path, self._bytes_max).decode("ascii", errors="replace").splitlines()
        except OSError:
            return []
