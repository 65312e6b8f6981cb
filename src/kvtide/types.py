"""Names that every other module shares. Values only: nothing here reads, writes or decides."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import NamedTuple, NewType

import msgspec

DIGEST_BYTES = 32
# Ranges of an object in one request: as many fit into a head.
RANGES_MAX = 64

# 32-byte digests; see keys.py for how they are made.
BlockKey = NewType("BlockKey", bytes)
Namespace = NewType("Namespace", bytes)


class ObjectId(NamedTuple):
    """Names one stored object. The key alone is unique; the namespace says whose it is and groups it."""

    namespace: Namespace
    key: BlockKey

    def __str__(self) -> str:
        return f"{self.namespace.hex()[:12]}/{self.key.hex()[:16]}"


class Name(NamedTuple):
    """The full name of a namespace: its tenant, the tenant's namespace, and the generation that is meant."""

    tenant: str
    namespace: Namespace
    generation: int


class NamedId(ObjectId):
    """An object's id with its namespace's name, for servers. is_latest: only one that looked everywhere may answer."""

    name: Name
    is_latest: bool

    @classmethod
    def of(cls, object_id: ObjectId, name: Name, is_latest: bool = False) -> NamedId:
        """Return the id with this name."""
        named = cls(*object_id)
        named.name, named.is_latest = name, is_latest
        return named


class SectionKind(IntEnum):
    """The kind of a section's content. The numbers are stored (docs/format.md)."""

    DATA = 0
    ANCHOR = 1
    DELTA = 2


class SectionId(NamedTuple):
    """Addresses one section: layers `[layer_start, layer_stop)` at one refinement step, 0 = base."""

    kind: SectionKind
    refinement: int
    layer_start: int
    layer_stop: int


class Section(NamedTuple):
    """One independently decodable piece of an object, as a codec makes and reads it."""

    id: SectionId
    data: bytes | bytearray | memoryview


class TierStats(msgspec.Struct, frozen=True):
    """Counters of a tier: objects and bytes now, and events since it was opened. Servers send it as JSON."""

    name: str
    objects: int
    used_bytes: int
    bytes_max: int
    hits: int
    misses: int
    evictions: int
    faults: int

    @classmethod
    def sum_of(cls, name: str, parts: Iterable[TierStats]) -> TierStats:
        """Return the sums over several tiers under a name; an object in two of them counts twice."""
        columns = zip([0] * 7, *(msgspec.structs.astuple(part)[1:] for part in parts), strict=True)
        return cls(name, *map(sum, columns))
