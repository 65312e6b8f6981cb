"""Fronts of blocks that are stored as `packed`: what is read of an object before its chunks are asked for. No I/O."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from kvtide.block import BlockMeta
from kvtide.codec.packed import PackedBase, PackedCodec
from kvtide.errors import CorruptPayload
from kvtide.types import Section, SectionId, SectionKind
from kvtide.wire import SectionEntry, StoredObject


def stop_of(entry: SectionEntry) -> int:
    """Return where a section ends in its object."""
    return entry.offset + entry.size


class FrontsWanted(NamedTuple):
    """The fronts that count: read until then by the monotonic clock, no coarser, stored in an order if that matters."""

    deadline_s: float = math.inf
    quality_max: float = math.inf
    is_ordered: bool = False


ALL_FRONTS = FrontsWanted()


class PackedPart(NamedTuple):
    """One block: its object's head, how its tokens are stored, and where each chunk lies."""

    meta: BlockMeta
    stored: StoredObject
    base: PackedBase
    position_of: dict[SectionId, int]
    ahead_chunks: int

    def runs(self, chunks: Sequence[tuple[int, int]], gap_bytes: int) -> list[Sequence[SectionEntry]]:
        """Return the sections to read for chunks (layer, number), by read. CorruptPayload if the object has not all."""
        names = [SectionId(SectionKind.DELTA, 1 + number, layer, layer + 1) for layer, number in chunks]
        entries, runs = self.stored.entries, list[tuple[int, int]]()
        if not all(name in self.position_of for name in names):
            raise CorruptPayload(f"{self.meta.id}: some of the chunks {chunks} are not in the object")
        for position in sorted(self.position_of[name] for name in names):
            if runs and entries[position].offset - stop_of(entries[runs[-1][1]]) <= gap_bytes:
                runs[-1] = (runs[-1][0], position)
            else:
                runs.append((position, position))
        return [entries[first : last + 1] for first, last in runs]


class PackedFront(NamedTuple):
    """A block's object up to the end of its leading chunks, as it was read."""

    part: PackedPart
    codec: PackedCodec
    base: list[Section]
    leading: list[SectionEntry]
    data: memoryview
