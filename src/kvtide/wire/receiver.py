"""Puts the objects of a run together from sections that arrive in any order, late, or never.

Invariant: nothing is handed out that its object's table does not name and vouch for. What does not belong is refused, a
damaged section is as if it had not come, and memory is bounded by the objects' own sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from itertools import groupby
from typing import NamedTuple

from kvtide.errors import CorruptPayload
from kvtide.types import Section, SectionId
from kvtide.wire.arrival import Arrival
from kvtide.wire.frame import parse_frame
from kvtide.wire.object import SectionEntry, StoredObject

# Default bound on the bytes of all objects that one receiver puts together.
RECEIVE_BYTES_MAX = 4 << 30


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


class Usable(NamedTuple):
    """Layers `[layer_start, layer_stop)` of tokens `[token_start, token_stop)`, and how many refinements they have."""

    layer_start: int
    layer_stop: int
    token_start: int
    token_stop: int
    refinements: int


class Missing(NamedTuple):
    """A section that has not arrived: of which block, where in its table, and where it lies in that block's object."""

    block: int
    position: int
    entry: SectionEntry


class Receiver:
    """Takes frames, or bytes of the objects, and says at any moment what is usable. Not thread-safe.

    Blocks are numbered as the objects were given.
    """

    def __init__(self, objects: Sequence[StoredObject], bytes_max: int = RECEIVE_BYTES_MAX) -> None:
        """ValueError for no objects, one twice, or more than `bytes_max`; CorruptPayload for a table out of bounds."""
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

    def usable(self) -> list[Usable]:
        """Return what can be decoded now: by block, then by layer, in runs of one quality."""
        found = []
        for arrival in self._arrivals:
            meta = arrival.stored.meta
            tokens = (meta.start, meta.start + meta.layout.tokens)
            layer = 0
            for refinements, run in groupby(arrival.quality.by_layer().tolist()):
                start, layer = layer, layer + len(list(run))
                if refinements >= 0:
                    found.append(Usable(start, layer, *tokens, refinements))
        return found

    def is_ready(self, layer: int, refinements: int = 0) -> bool:
        """Tell whether a layer of all blocks can be decoded with at least so many refinements."""
        layers = min(arrival.stored.meta.layout.layers for arrival in self._arrivals)
        if not 0 <= layer < layers:
            raise ValueError(f"layer must be from 0 to {layers - 1}, got {layer}")
        return all(arrival.quality.by_layer()[layer] >= refinements for arrival in self._arrivals)

    def missing(self, refinement_max: int | None = None) -> list[Missing]:
        """Return the sections that have not arrived, up to a refinement step if asked: by block, in stored order."""
        return [
            Missing(block, position, entry)
            for block, arrival in enumerate(self._arrivals)
            for position, entry in enumerate(arrival.stored.entries)
            if not arrival.is_here(position) and (refinement_max is None or entry.id.refinement <= refinement_max)
        ]

    def has_range(self, block: int, start: int, stop: int) -> bool:
        """Tell whether every section that has a byte in [start, stop) of a block's object has arrived."""
        arrival = self._arrival(block)
        for position, entry in enumerate(arrival.stored.entries):
            # A section without bytes is one too, where it stands.
            if entry.offset < stop and start < entry.offset + max(entry.size, 1) and not arrival.is_here(position):
                return False
        return True

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
        """Return how much memory this takes at most, once all has arrived."""
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
