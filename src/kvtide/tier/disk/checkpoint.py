"""Files beside the segments: the catalog, so that a large store opens without reading its headers, and a journal.

The journal is a bounded record of what left and why, and of what engines decided, for `kvtide explain`. Invariant: both
are hints (docs/format.md): any doubt about a checkpoint, or about one segment in it, means a scan.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import xxhash

from kvtide.outcomes import Decided, decisions_text, parse_decisions
from kvtide.tier.disk.catalog import CatalogEntry
from kvtide.tier.disk.record import RecordHeader, SegmentHeader
from kvtide.tier.files import Files
from kvtide.types import BlockKey, Namespace, ObjectId
from kvtide.wire import ObjectLabel

_MAGIC = b"\x89KVCHK\r\n"
_VERSION = 2
_HEADER = struct.Struct("<8sHHIQ")
_SEGMENT = struct.Struct("<QQQQQ")
_ENTRY = struct.Struct("<32s32s16s32sIQQQQQ")
_CHECKSUM_BYTES = 16
JOURNAL_BYTES_MAX = 1 << 20


class SegmentSummary(NamedTuple):
    """A segment as it was scanned: all records before `tail` are in `entries` unless they were removed."""

    header: SegmentHeader
    tail: int
    entries: list[CatalogEntry]


def pack_checkpoint(summaries: list[SegmentSummary]) -> bytes:
    """Return the file's bytes."""
    parts = [_HEADER.pack(_MAGIC, _VERSION, 0, len(summaries), sum(len(item.entries) for item in summaries))]
    for header, tail, entries in summaries:
        parts.append(_SEGMENT.pack(header.number, header.created_ms, header.removals, tail, len(entries)))
    for summary in summaries:
        for entry in summary.entries:
            record = entry.header
            names = (record.id.namespace, record.id.key, *record.label)
            fields = (record.sequence, record.offset, record.size, record.stored_ms, entry.last_use_ms)
            parts.append(_ENTRY.pack(*names, *fields))
    body = b"".join(parts)
    return xxhash.xxh3_128_digest(body) + body


def parse_checkpoint(data: bytes) -> list[SegmentSummary]:
    """Return what a checkpoint says; nothing if anything in it is off."""
    body = memoryview(data)[_CHECKSUM_BYTES:]
    if len(body) < _HEADER.size or xxhash.xxh3_128_digest(body) != data[:_CHECKSUM_BYTES]:
        return []
    magic, version, _, segment_count, entry_count = _HEADER.unpack_from(body)
    size = _HEADER.size + segment_count * _SEGMENT.size + entry_count * _ENTRY.size
    if (magic, version, len(body)) != (_MAGIC, _VERSION, size):
        return []
    entries_at = _HEADER.size + segment_count * _SEGMENT.size
    segments = list(_SEGMENT.iter_unpack(body[_HEADER.size : entries_at]))
    if sum(fields[4] for fields in segments) != entry_count:
        return []
    found = _ENTRY.iter_unpack(body[entries_at:])
    summaries = []
    for number, created_ms, removals, tail, count in segments:
        entries = [_entry(number, *next(found)) for _ in range(count)]
        summaries.append(SegmentSummary(SegmentHeader(number, created_ms, removals), tail, entries))
    return summaries


def _entry(
    segment: int,
    namespace: bytes,
    key: bytes,
    codec: bytes,
    parent: bytes,
    start: int,
    sequence: int,
    offset: int,
    size: int,
    stored_ms: int,
    last_use_ms: int,
) -> CatalogEntry:
    object_id = ObjectId(Namespace(namespace), BlockKey(key))
    label = ObjectLabel(codec, parent, start)
    return CatalogEntry(RecordHeader(object_id, label, segment, sequence, offset, size, stored_ms), last_use_ms)


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
