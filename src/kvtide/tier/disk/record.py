"""The segment log's headers as bytes (docs/format.md, "Segment log"). Pure: packs and checks, reads nothing.

Invariants: a header that parses has passed its checksum and stands where it was written: segment and offset are in it.
Every time that is stored comes from `stamp_ms`, so that it fits its field.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import xxhash

from kvtide.tier.buffers import ALIGN_BYTES
from kvtide.types import BlockKey, Namespace, ObjectId
from kvtide.wire import ObjectLabel

_RECORD_MAGIC = b"\x89KVREC\r\n"
_SEGMENT_MAGIC = b"\x89KVSEG\r\n"
_VERSION = 2
_RECORD = struct.Struct("<8sHHI32s32s16sQQQQQ32sI68s")
_SEGMENT = struct.Struct("<8sHHIQQQ200s")
_CHECKED_BYTES = 240
_HEADER_BYTES = 256
# The end of the year 9999: times after it are a clock's fault.
_WALL_S_MAX = 253_402_300_799.0

assert _RECORD.size == _CHECKED_BYTES
assert _SEGMENT.size == _CHECKED_BYTES


class RecordState(IntEnum):
    """The state of a record: whether its object may be served. The numbers are stored."""

    LIVE = 1
    REMOVED = 2


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """One record: whose object it holds, where it stands and how long the object is."""

    id: ObjectId
    label: ObjectLabel
    segment: int
    sequence: int
    offset: int
    size: int
    stored_ms: int
    state: RecordState = RecordState.LIVE


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """One segment file. `removals` counts records marked removed, so that a checkpoint shows its age."""

    number: int
    created_ms: int
    removals: int


def align_up(size: int) -> int:
    """Return the next multiple of ALIGN_BYTES."""
    return -(-size // ALIGN_BYTES) * ALIGN_BYTES


def record_bytes(size: int) -> int:
    """Return the bytes that a record of an object of this size takes: a header page and whole pages of body."""
    return ALIGN_BYTES + align_up(size)


def stamp_ms(wall_s: float) -> int:
    """Return a wall time as headers have it, in milliseconds; before 1970 is 1970, after 9999 its end."""
    return int(min(max(0.0, wall_s), _WALL_S_MAX) * 1000)


def pack_record_header(header: RecordHeader) -> bytes:
    """Return the record's header page."""
    fields = _RECORD.pack(
        _RECORD_MAGIC,
        _VERSION,
        _HEADER_BYTES,
        header.state,
        header.id.key,
        header.id.namespace,
        header.label.codec,
        header.segment,
        header.sequence,
        header.offset,
        header.size,
        header.stored_ms,
        header.label.parent,
        header.label.start,
        b"",
    )
    return (fields + xxhash.xxh3_128_digest(fields)).ljust(ALIGN_BYTES, b"\0")


def header_seal(page: bytes | memoryview) -> bytes:
    """Return the checksum in a header page, unchecked: equal ones are of equal headers."""
    return bytes(page[_CHECKED_BYTES:_HEADER_BYTES])


def record_state(page: memoryview, expected: RecordHeader) -> RecordState | None:
    """Return the state of the expected record by its header page; None if it is not what stands here."""
    found = parse_record_header(page, expected.segment, expected.offset)
    return found.state if found is not None and replace(found, state=expected.state) == expected else None


def parse_record_header(page: bytes | bytearray | memoryview, segment: int, offset: int) -> RecordHeader | None:
    """Return the record header at this place; None if there is none or anything is off."""
    fields = _checked_fields(page, _RECORD, _RECORD_MAGIC)
    if fields is None:
        return None
    state, key, namespace, codec, number, sequence, at, size, stored_ms, parent, start = fields[3:14]
    if (number, at) != (segment, offset) or state not in RecordState.__members__.values():
        return None
    object_id = ObjectId(Namespace(namespace), BlockKey(key))
    label = ObjectLabel(codec, parent, start)
    return RecordHeader(object_id, label, number, sequence, at, size, stored_ms, RecordState(state))


def pack_segment_header(header: SegmentHeader) -> bytes:
    """Return the segment's first page."""
    fields = (_SEGMENT_MAGIC, _VERSION, _HEADER_BYTES, 0, header.number, header.created_ms, header.removals, b"")
    packed = _SEGMENT.pack(*fields)
    return (packed + xxhash.xxh3_128_digest(packed)).ljust(ALIGN_BYTES, b"\0")


def parse_segment_header(page: bytes | bytearray | memoryview) -> SegmentHeader | None:
    """Return the segment header; None if anything is off."""
    fields = _checked_fields(page, _SEGMENT, _SEGMENT_MAGIC)
    return None if fields is None else SegmentHeader(*fields[4:7])


def is_of_other_version(page: bytes | bytearray | memoryview) -> bool:
    """Tell whether this whole segment header is of a version that this code does not read."""
    return _is_whole(page, _SEGMENT_MAGIC) and _SEGMENT.unpack_from(page)[1] != _VERSION


def _checked_fields(
    page: bytes | bytearray | memoryview, layout: struct.Struct, magic: bytes
) -> tuple[Any, ...] | None:
    if not _is_whole(page, magic):
        return None
    fields = layout.unpack_from(page)
    return fields if fields[1:3] == (_VERSION, _HEADER_BYTES) else None


def _is_whole(page: bytes | bytearray | memoryview, magic: bytes) -> bool:
    view = memoryview(page)
    if len(view) < _HEADER_BYTES or view[: len(magic)] != magic:
        return False
    return xxhash.xxh3_128_digest(view[:_CHECKED_BYTES]) == view[_CHECKED_BYTES:_HEADER_BYTES]
