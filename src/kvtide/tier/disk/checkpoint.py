"""The catalog as one file, so that a large store opens without reading its headers (docs/format.md, "Checkpoint").

Invariant: a checkpoint is a hint that can be rebuilt: any doubt about it, or about one segment in it, means a scan.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import xxhash

from kvtide.tier.disk.catalog import CatalogEntry
from kvtide.tier.record import RecordHeader, SegmentHeader
from kvtide.types import BlockKey, Namespace, ObjectId
from kvtide.wire import ObjectLabel

_MAGIC = b"\x89KVCHK\r\n"
_VERSION = 2
_HEADER = struct.Struct("<8sHHIQ")
_SEGMENT = struct.Struct("<QQQQQ")
_ENTRY = struct.Struct("<32s32s16s32sIQQQQQ")
_CHECKSUM_BYTES = 16


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
