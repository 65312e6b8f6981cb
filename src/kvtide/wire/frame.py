"""The frame format, version 1 (docs/format.md): one section of an object on its own, on the wire.

Invariant: nothing of a frame is handed out before its header's checksum, its length and its section's checksum hold.
Which object it belongs to is for the receiver to compare: a frame names it by its version tag.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import xxhash

from kvtide.errors import CorruptPayload
from kvtide.wire.object import ENTRY_BYTES, OBJECT_BYTES_MAX, SectionEntry, StoredObject

__all__ = ["parse_frame"]

FRAME_HEADER_BYTES = 96

_MAGIC = b"\x89KVTFR\r\n"
_VERSION = 1
_PREFIX = struct.Struct("<8sHHI16s")
_CHECKSUM_OFFSET = _PREFIX.size + ENTRY_BYTES

assert _CHECKSUM_OFFSET + 16 == FRAME_HEADER_BYTES


class FrameHeader(NamedTuple):
    """The object that a section belongs to, by its version tag, and the section's entry in that object's table."""

    version_tag: bytes
    entry: SectionEntry

    @property
    def frame_bytes(self) -> int:
        """Return how long the whole frame is."""
        return FRAME_HEADER_BYTES + self.entry.size


class Frame(NamedTuple):
    """A checked frame. `data` is a view of the bytes that were parsed, valid as long as those are not reused."""

    header: FrameHeader
    data: memoryview


def frame_header(stored: StoredObject, position: int) -> bytes:
    """Return what goes before the bytes of the section at this place in the object's table."""
    header = _PREFIX.pack(_MAGIC, _VERSION, FRAME_HEADER_BYTES, 0, stored.version_tag)
    header += stored.entries[position].to_bytes()
    return header + xxhash.xxh3_128_digest(header)


def pack_frame(stored: StoredObject, position: int) -> bytes:
    """Return one section as a frame. CorruptPayload if the object's bytes are not all there, or damaged."""
    return frame_header(stored, position) + stored.section(position).data


def is_frame(data: bytes | bytearray | memoryview) -> bool:
    """Tell whether these bytes begin as a frame does."""
    return data[: len(_MAGIC)] == _MAGIC


def parse_frame_header(data: bytes | bytearray | memoryview) -> FrameHeader:
    """Check the header at the begin of `data`, of whose frame not all need be here. CorruptPayload if it is none."""
    if len(data) < FRAME_HEADER_BYTES:
        raise CorruptPayload(f"a frame has at least {FRAME_HEADER_BYTES} bytes, got {len(data)}")
    view = memoryview(data)
    magic, version, header_bytes, zero, version_tag = _PREFIX.unpack_from(view)
    if magic != _MAGIC:
        raise CorruptPayload(f"not a kvtide frame: it begins with {magic!r}")
    if (version, header_bytes, zero) != (_VERSION, FRAME_HEADER_BYTES, 0):
        raise CorruptPayload(f"frame version {version} with a {header_bytes}-byte header; this code reads {_VERSION}")
    if xxhash.xxh3_128_digest(view[:_CHECKSUM_OFFSET]) != bytes(view[_CHECKSUM_OFFSET:FRAME_HEADER_BYTES]):
        raise CorruptPayload("checksum of the frame's header does not match")
    entry = SectionEntry.parse(view[_PREFIX.size : _CHECKSUM_OFFSET])
    if entry.offset + entry.size > OBJECT_BYTES_MAX:
        raise CorruptPayload(f"the frame's section ends at {entry.offset + entry.size}, beyond any object")
    return FrameHeader(version_tag, entry)


def parse_frame(data: bytes | bytearray | memoryview) -> Frame:
    """Check a whole frame and return it. CorruptPayload if anything is off, bytes missing or too many included."""
    header = parse_frame_header(data)
    if len(data) != header.frame_bytes:
        raise CorruptPayload(f"frame of {header.entry.id} has {header.frame_bytes} bytes, {len(data)} came")
    body = memoryview(data)[FRAME_HEADER_BYTES:]
    if xxhash.xxh3_128_digest(body) != header.entry.checksum:
        raise CorruptPayload(f"checksum of the frame's section {header.entry.id} does not match")
    return Frame(header, body)
