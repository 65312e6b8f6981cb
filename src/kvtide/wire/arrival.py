"""One object that arrives section by section: what is here, and how far each layer is usable."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvtide.errors import CorruptPayload
from kvtide.types import Section, SectionId, SectionKind
from kvtide.wire.object import SectionEntry, StoredObject

# Bound on (refinement step, layer) pairs of one object, so that a foreign table can't make us allocate much.
LAYER_STEPS_MAX = 1 << 20
# What the bookkeeping of one section takes at most.
_SECTION_BYTES = 1 << 10


class LayerQuality:
    """Counts the sections that each layer still lacks at each refinement step.

    A layer is usable once its base (step 0) is whole. Its quality is then the number of refinements that count: of
    nested ones the longest unbroken run, of deltas, which don't need each other, all that are here.
    """

    def __init__(self, layers: int, sections: Sequence[SectionId]) -> None:
        """CorruptPayload for more steps and layers than LAYER_STEPS_MAX."""
        steps = sorted({0, *(section.refinement for section in sections)})
        if len(steps) * layers > LAYER_STEPS_MAX:
            raise CorruptPayload(f"{len(steps)} refinement steps of {layers} layers are more than {LAYER_STEPS_MAX}")
        self._row = {refinement: row for row, refinement in enumerate(steps)}
        self._lacking: NDArray[np.int32] = np.zeros((len(steps), layers), dtype=np.int32)
        is_delta = np.ones(len(steps), dtype=bool)
        for section in sections:
            self._layers_of(section)[:] += 1
            is_delta[self._row[section.refinement]] &= section.kind is SectionKind.DELTA
        # A layer that no base section covers is never usable.
        self._lacking[0, self._lacking[0] == 0] = 1
        self._is_delta = is_delta[1:]
        self._by_layer: NDArray[np.int64] | None = None
        self.held_bytes = self._lacking.nbytes

    def _layers_of(self, section: SectionId) -> NDArray[np.int32]:
        return self._lacking[self._row[section.refinement], section.layer_start : section.layer_stop]

    def arrive(self, section: SectionId) -> None:
        """Count a section of the table that was not here yet."""
        self._layers_of(section)[:] -= 1
        self._by_layer = None

    def by_layer(self) -> NDArray[np.int64]:
        """Return the quality of each layer: -1 not usable, 0 base alone, n with n refinements. Valid until `arrive`."""
        if self._by_layer is None:
            is_whole = self._lacking == 0
            refined = is_whole[1:]
            nested = np.logical_and.accumulate(refined[~self._is_delta], axis=0).sum(axis=0)
            self._by_layer = np.where(is_whole[0], nested + refined[self._is_delta].sum(axis=0), -1)
        return self._by_layer


class Arrival:
    """The bytes of an object so far, in their places.

    A section is here once all its bytes are and their checksum is that of the table; it is never written again.
    """

    def __init__(self, stored: StoredObject) -> None:
        """CorruptPayload for a table of more refinement steps and layers than LAYER_STEPS_MAX."""
        self.stored = stored
        self.quality = LayerQuality(stored.meta.layout.layers, stored.section_ids)
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
        return self.stored.object_bytes + _SECTION_BYTES * len(self._offsets) + self.quality.held_bytes

    def _place(self, position: int) -> memoryview:
        start = self._offsets[position]
        return self.memory[start : start + self.stored.entries[position].size]

    def _settle(self, position: int) -> None:
        self._is_here[position] = True
        self._filled[position] = self.stored.entries[position].size
        self.quality.arrive(self.stored.entries[position].id)

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
        """Assert that what is here is what the table says, and that the quality follows from it."""
        fresh = LayerQuality(self.stored.meta.layout.layers, self.stored.section_ids)
        for position, entry in enumerate(self.stored.entries):
            assert 0 <= self._filled[position] <= entry.size
            if self._is_here[position]:
                assert xxhash.xxh3_128_digest(self._place(position)) == entry.checksum
                fresh.arrive(entry.id)
        assert np.array_equal(fresh.by_layer(), self.quality.by_layer())
