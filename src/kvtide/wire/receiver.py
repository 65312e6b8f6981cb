"""Puts an object together from sections that arrive in any order, late, or never; and the frame format.

A frame (version 1, docs/format.md) is one section of an object on its own, on the wire; it names its object by the
version tag. Invariant: nothing is handed out that a checksum and the object's table do not vouch for. What does not
belong is refused, a damaged section is as if it had not come, and memory is bounded by the object's own size.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from typing import NamedTuple

import numpy as np
import xxhash

from kvtide.errors import CorruptPayload
from kvtide.types import Section
from kvtide.wire.object import ENTRY_BYTES, OBJECT_BYTES_MAX, SectionEntry, StoredObject

FRAME_HEADER_BYTES = 96

_MAGIC = b"\x89KVTFR\r\n"
_VERSION = 1
_PREFIX = struct.Struct("<8sHHI16s")
_CHECKSUM_OFFSET = _PREFIX.size + ENTRY_BYTES
# What the bookkeeping of one section takes at most.
_SECTION_BYTES = 1 << 10

assert _CHECKSUM_OFFSET + 16 == FRAME_HEADER_BYTES


class FrameHeader(NamedTuple):
    """The object that a section belongs to, by its version tag, and the section's entry in that object's table."""

    version_tag: bytes
    entry: SectionEntry

    @property
    def frame_bytes(self) -> int:
        """The length of the whole frame."""
        return FRAME_HEADER_BYTES + self.entry.size


def frame_header(stored: StoredObject, position: int) -> bytes:
    """Return what goes before the bytes of the section at this place in the object's table."""
    header = _PREFIX.pack(_MAGIC, _VERSION, FRAME_HEADER_BYTES, 0, stored.version_tag)
    header += stored.entries[position].to_bytes()
    return header + xxhash.xxh3_128_digest(header)


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


def parse_frame(data: bytes | bytearray | memoryview) -> tuple[FrameHeader, memoryview]:
    """Return a whole frame's header and a view of its section's bytes. CorruptPayload if anything is off."""
    header = parse_frame_header(data)
    if len(data) != header.frame_bytes:
        raise CorruptPayload(f"frame of {header.entry.id} has {header.frame_bytes} bytes, {len(data)} came")
    body = memoryview(data)[FRAME_HEADER_BYTES:]
    if xxhash.xxh3_128_digest(body) != header.entry.checksum:
        raise CorruptPayload(f"checksum of the frame's section {header.entry.id} does not match")
    return header, body


class Receiver:
    """The bytes of an object so far, in their places. A section that is good is not written again. Not thread-safe."""

    def __init__(self, stored: StoredObject) -> None:
        self.stored = stored
        self._head = stored.head
        self._position_of = {entry: position for position, entry in enumerate(stored.entries)}
        self._offsets = [entry.offset for entry in stored.entries]
        self._is_here = [False] * len(stored.entries)
        # Bytes of each section that came in one unbroken run from its first on.
        self._filled = [0] * len(stored.entries)
        # Of the whole object, made when it is needed; pages that no section reaches take no memory.
        self._memory: memoryview | None = None
        for position, entry in enumerate(stored.entries):
            if entry.size == 0 and entry.checksum == xxhash.xxh3_128_digest(b""):
                self._settle(position)

    def offer(self, frame: bytes | bytearray | memoryview) -> bool:
        """Copy a frame. False if its section is here already; CorruptPayload if it is damaged or not of this object."""
        header, data = parse_frame(frame)
        position = self._position_of.get(header.entry)
        if header.version_tag != self.stored.version_tag or position is None:
            raise CorruptPayload(f"section {header.entry.id} is of another object than {self.stored.meta.id}")
        if self._is_here[position]:
            return False
        self._place(position)[:] = data
        self._settle(position)
        return True

    def offer_bytes(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Take bytes of the object from `offset` on. They count where they continue a section from what is here of it.

        CorruptPayload for bytes of another object, and once a section proves damaged, which is dropped: others count.
        """
        view, stop, damaged = memoryview(data), offset + len(data), ""
        known = self._head[offset : offset + len(view)]
        if stop > self.stored.object_bytes or known != view[: len(known)]:
            raise CorruptPayload(f"{len(view)} bytes at {offset} are of another object than {self.stored.meta.id}")
        for position in range(max(0, bisect_right(self._offsets, offset) - 1), len(self._offsets)):
            entry = self.stored.entries[position]
            if entry.offset >= stop:
                break
            # Of a section that is here all is filled: none of its bytes are taken again.
            start, filled = entry.offset + self._filled[position], min(stop, entry.offset + entry.size)
            if not offset <= start < filled:
                continue
            place = self._place(position)
            place[self._filled[position] : filled - entry.offset] = view[start - offset : filled - offset]
            self._filled[position] = filled - entry.offset
            if self._filled[position] < entry.size:
                continue
            if xxhash.xxh3_128_digest(place) == entry.checksum:
                self._settle(position)
            else:
                self._filled[position] = 0
                damaged += f" {entry.id}"
        if damaged:
            raise CorruptPayload(f"{self.stored.meta.id}: checksums don't match:{damaged}")

    def missing(self) -> list[int]:
        """Return the places in the table of the sections that have not arrived."""
        return [position for position, is_here in enumerate(self._is_here) if not is_here]

    def has_range(self, start: int, stop: int) -> bool:
        """Tell whether every section that has a byte in [start, stop) of the object has arrived."""
        # A section without bytes is one too, where it stands. Servers ask for 64 ranges of 8,192 sections.
        first = bisect_left(self._offsets, start)
        if first == len(self._offsets) or self._offsets[first] > start:
            first -= 1
        return all(self._is_here[max(0, first) : bisect_left(self._offsets, stop)])

    @property
    def memory(self) -> memoryview:
        """The object, good where `has_range` says so; that stays valid and unchanged."""
        return self._bytes.toreadonly()

    def whole(self) -> bytes | None:
        """Return the object as it is stored, None unless every section of it has arrived."""
        return bytes(self._bytes) if all(self._is_here) else None

    @property
    def held_bytes(self) -> int:
        """A bound on the memory that this takes, once all has come."""
        return self.stored.object_bytes + _SECTION_BYTES * len(self._offsets)

    def missing_ranges(self) -> list[tuple[int, int]]:
        """Return the [start, stop) of the object's bytes that no section has yet, in order, neighbours as one."""
        ranges: list[tuple[int, int]] = []
        for position in self.missing():
            entry = self.stored.entries[position]
            start, stop = entry.offset + self._filled[position], entry.offset + entry.size
            if ranges and ranges[-1][1] == start:
                ranges[-1] = (ranges[-1][0], stop)
            else:
                ranges.append((start, stop))
        return ranges

    def sections(self) -> list[Section]:
        """Return the sections that are here, in stored order, for `Codec.decode`: views that stay valid."""
        entries = enumerate(self.stored.entries)
        return [Section(entry.id, self._place(at).toreadonly()) for at, entry in entries if self._is_here[at]]

    @property
    def _bytes(self) -> memoryview:
        if self._memory is None:
            # Not a bytearray, which would write zeros to every page.
            self._memory = np.empty(self.stored.object_bytes, dtype=np.uint8).data
            self._memory[: len(self._head)] = self._head
        return self._memory

    def _place(self, position: int) -> memoryview:
        start = self._offsets[position]
        return self._bytes[start : start + self.stored.entries[position].size]

    def _settle(self, position: int) -> None:
        self._is_here[position] = True
        self._filled[position] = self.stored.entries[position].size

    def check(self) -> None:
        """Assert that what is here is what the table says."""
        for position, entry in enumerate(self.stored.entries):
            assert 0 <= self._filled[position] <= entry.size
            if self._is_here[position]:
                assert xxhash.xxh3_128_digest(self._place(position)) == entry.checksum
