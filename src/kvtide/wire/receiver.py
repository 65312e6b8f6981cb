"""Puts the objects of a run together from sections that arrive in any order, late, or never; and the frame format.

A frame (version 1, docs/format.md) is one section of an object on its own, on the wire; it names its object by the
version tag. Invariant: nothing is handed out that a checksum and the object's table do not vouch for. What does not
belong is refused, a damaged section is as if it had not come, and memory is bounded by the objects' own sizes.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import NamedTuple

import numpy as np
import xxhash

from kvtide.errors import CorruptPayload
from kvtide.types import Section, SectionId
from kvtide.wire.object import ENTRY_BYTES, OBJECT_BYTES_MAX, SectionEntry, StoredObject

__all__ = ["FRAME_HEADER_BYTES", "OfferOutcome", "Receiver", "frame_header", "is_frame", "parse_frame_header"]

FRAME_HEADER_BYTES = 96
# Default bound on the bytes of all objects that one receiver puts together.
RECEIVE_BYTES_MAX = 4 << 30

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


class Arrival:
    """The bytes of an object so far, in their places. A section with a good checksum is never written again."""

    def __init__(self, stored: StoredObject) -> None:
        self.stored = stored
        self._head = stored.head
        self._position_of = {entry.id: position for position, entry in enumerate(stored.entries)}
        self._offsets = [entry.offset for entry in stored.entries]
        self._is_here = [False] * len(stored.entries)
        # Bytes of each section that came in one unbroken run from its first on.
        self._filled = [0] * len(stored.entries)
        # Of the whole object, made when it is needed; pages that no section reaches take no memory.
        self._memory: memoryview | None = None
        for position, entry in enumerate(stored.entries):
            if entry.size == 0 and entry.checksum == xxhash.xxh3_128_digest(b""):
                self._settle(position)

    def position_of(self, entry: SectionEntry) -> int | None:
        """Return where this very entry stands in the table, None if it does not."""
        position = self._position_of.get(entry.id)
        return position if position is not None and self.stored.entries[position] == entry else None

    def is_here(self, position: int) -> bool:
        """Tell whether the section at this place in the table has arrived."""
        return self._is_here[position]

    def differs_from_head(self, offset: int, data: memoryview) -> bool:
        """Tell whether bytes at `offset` contradict the header and table that we know."""
        known = self._head[offset : offset + len(data)]
        return known != data[: len(known)]

    def put(self, position: int, data: memoryview) -> None:
        """Take a section that is not here, whole, its checksum verified by the caller."""
        assert not self._is_here[position]
        self._place(position)[:] = data
        self._settle(position)

    def fill(self, offset: int, data: memoryview) -> Iterator[tuple[int, bool]]:
        """Take bytes of the object at `offset`; yield each section that they complete, and whether it is good.

        Bytes count where they continue a section from what is here of it. A section that proves damaged is dropped.
        """
        stop = offset + len(data)
        for position in range(max(0, bisect_right(self._offsets, offset) - 1), len(self._offsets)):
            entry = self.stored.entries[position]
            if entry.offset >= stop:
                return
            # Of a section that is here all is filled: none of its bytes are taken again.
            start, filled = entry.offset + self._filled[position], min(stop, entry.offset + entry.size)
            if not offset <= start < filled:
                continue
            place = self._place(position)
            place[self._filled[position] : filled - entry.offset] = data[start - offset : filled - offset]
            self._filled[position] = filled - entry.offset
            if self._filled[position] == entry.size:
                is_good = xxhash.xxh3_128_digest(place) == entry.checksum
                if is_good:
                    self._settle(position)
                else:
                    self._filled[position] = 0
                yield position, is_good

    @property
    def memory(self) -> memoryview:
        """The object's bytes in their places, those that have not come whatever was there."""
        if self._memory is None:
            # Not a bytearray, which would write zeros to every page.
            self._memory = np.empty(self.stored.object_bytes, dtype=np.uint8).data
            self._memory[: len(self._head)] = self._head
        return self._memory

    @property
    def held_bytes(self) -> int:
        """A bound on the memory that this takes, once all has come."""
        return self.stored.object_bytes + _SECTION_BYTES * len(self._offsets)

    def _place(self, position: int) -> memoryview:
        start = self._offsets[position]
        return self.memory[start : start + self.stored.entries[position].size]

    def _settle(self, position: int) -> None:
        self._is_here[position] = True
        self._filled[position] = self.stored.entries[position].size

    def missing_ranges(self) -> list[tuple[int, int]]:
        """Return the [start, stop) of the object's bytes that no section has yet, in order, neighbours as one."""
        ranges: list[tuple[int, int]] = []
        for entry, filled, is_here in zip(self.stored.entries, self._filled, self._is_here, strict=True):
            start, stop = entry.offset + filled, entry.offset + entry.size
            if is_here:
                continue
            if ranges and ranges[-1][1] == start:
                ranges[-1] = (ranges[-1][0], stop)
            else:
                ranges.append((start, stop))
        return ranges

    def sections(self) -> list[Section]:
        """Return the sections that are here, in stored order: views that stay valid."""
        entries = enumerate(self.stored.entries)
        return [Section(entry.id, self._place(at).toreadonly()) for at, entry in entries if self._is_here[at]]

    def check(self) -> None:
        """Assert that what is here is what the table says."""
        for position, entry in enumerate(self.stored.entries):
            assert 0 <= self._filled[position] <= entry.size
            if self._is_here[position]:
                assert xxhash.xxh3_128_digest(self._place(position)) == entry.checksum


class OfferOutcome(Enum):
    """The fate of bytes that were offered."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    REFUSED = "refused"


class Offer(NamedTuple):
    """The outcome; which block's which section it was, as far as that is known; why it was refused."""

    outcome: OfferOutcome
    block: int | None = None
    section: SectionId | None = None
    reason: str = ""


class Missing(NamedTuple):
    """A section that has not arrived: of which block, and where in its table."""

    block: int
    position: int


class Receiver:
    """Takes frames, or bytes of objects by their number, and hands out what is whole. Not thread-safe."""

    def __init__(self, objects: Sequence[StoredObject], bytes_max: int = RECEIVE_BYTES_MAX) -> None:
        """ValueError for no objects, one twice, or more than `bytes_max`."""
        object_bytes = sum(stored.object_bytes for stored in objects)
        if not objects or object_bytes > bytes_max:
            raise ValueError(f"expected objects of at most {bytes_max} bytes, got {len(objects)} of {object_bytes}")
        self._block_of = {stored.version_tag: block for block, stored in enumerate(objects)}
        if len(self._block_of) != len(objects):
            raise ValueError("one object was given twice")
        self._arrivals = [Arrival(stored) for stored in objects]

    def offer(self, frame: bytes | bytearray | memoryview) -> Offer:
        """Take a frame, if it belongs here and is whole. The bytes are copied."""
        try:
            header, data = parse_frame(frame)
        except CorruptPayload as error:
            return Offer(OfferOutcome.REFUSED, reason=str(error))
        block, section = self._block_of.get(header.version_tag), header.entry.id
        if block is None:
            return Offer(OfferOutcome.REFUSED, section=section, reason="a section of another object")
        arrival = self._arrivals[block]
        position = arrival.position_of(header.entry)
        if position is None:
            return Offer(OfferOutcome.REFUSED, block, section, "the object's table has no such section")
        if arrival.is_here(position):
            return Offer(OfferOutcome.DUPLICATE, block, section)
        arrival.put(position, data)
        return Offer(OfferOutcome.ACCEPTED, block, section)

    def offer_bytes(self, block: int, offset: int, data: bytes | bytearray | memoryview) -> list[Offer]:
        """Take bytes of a block's object from `offset` on; return an offer for each section that they complete.

        Chunks may be of any size. They count where they continue a section from its first byte on, and are copied
        once. Bytes that contradict the header and table, or lie beyond the object, are refused.
        """
        arrival, view = self._arrival(block), memoryview(data)
        if offset < 0:
            raise ValueError(f"the offset must not be negative, got {offset}")
        if offset + len(view) > arrival.stored.object_bytes:
            reason = f"{len(view)} bytes at {offset} of an object of {arrival.stored.object_bytes}"
            return [Offer(OfferOutcome.REFUSED, block, reason=reason)]
        if arrival.differs_from_head(offset, view):
            return [Offer(OfferOutcome.REFUSED, block, reason="bytes of another object")]
        offers = []
        for position, is_good in arrival.fill(offset, view):
            section = arrival.stored.entries[position].id
            if is_good:
                offers.append(Offer(OfferOutcome.ACCEPTED, block, section))
            else:
                offers.append(Offer(OfferOutcome.REFUSED, block, section, "checksum of the section does not match"))
        return offers

    def missing(self) -> list[Missing]:
        """Return the sections that have not arrived, by block, in stored order."""
        return [
            Missing(block, position)
            for block, arrival in enumerate(self._arrivals)
            for position in range(len(arrival.stored.entries))
            if not arrival.is_here(position)
        ]

    def has_range(self, block: int, start: int, stop: int) -> bool:
        """Tell whether every section that has a byte in [start, stop) of a block's object has arrived."""
        arrival = self._arrival(block)
        # A section without bytes is one too, where it stands.
        return all(
            arrival.is_here(position) or not (entry.offset < stop and start < entry.offset + max(entry.size, 1))
            for position, entry in enumerate(arrival.stored.entries)
        )

    def memory(self, block: int) -> memoryview:
        """Return a block's object, good where `has_range` says so; that stays valid and unchanged."""
        return self._arrival(block).memory.toreadonly()

    def sections(self, block: int) -> list[Section]:
        """Return what has arrived of a block, for `Codec.decode`. The data stay valid and unchanged."""
        return self._arrival(block).sections()

    def missing_ranges(self, block: int) -> list[tuple[int, int]]:
        """Return the [start, stop) of a block's object that have not been taken, in order, neighbours as one."""
        return self._arrival(block).missing_ranges()

    def whole(self, block: int) -> bytes | None:
        """Return a block's object as it is stored, None unless every section of it has arrived."""
        arrival = self._arrival(block)
        is_whole = all(map(arrival.is_here, range(len(arrival.stored.entries))))
        return bytes(arrival.memory) if is_whole else None

    @property
    def held_bytes(self) -> int:
        """A bound on the memory that this takes, once all has arrived."""
        return sum(arrival.held_bytes for arrival in self._arrivals)

    def _arrival(self, block: int) -> Arrival:
        if not 0 <= block < len(self._arrivals):
            raise ValueError(f"block must be from 0 to {len(self._arrivals) - 1}, got {block}")
        return self._arrivals[block]

    def check(self) -> None:
        """Assert every invariant; for tests."""
        for block, arrival in enumerate(self._arrivals):
            assert self._block_of[arrival.stored.version_tag] == block
            arrival.check()
