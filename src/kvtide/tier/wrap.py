"""A tier around another tier: what a subclass does not change is passed on."""

from __future__ import annotations

from collections.abc import Iterator

from kvtide.tier.base import Buffer, ObjectInfo, OnRemoved, Reporting, Tier, TierStats
from kvtide.types import ObjectId


class WrappedTier:
    """Passes everything on. Subclasses see each transfer and look-up before it happens, in `before`."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier

    @property
    def name(self) -> str:
        """Return the wrapped tier's name."""
        return self.tier.name

    def before(self, verb: str, size: int) -> None:
        """Called before a verb (`contains`, `get`, `put`, `delete`) with the bytes of the caller's buffer."""

    def open(self) -> None:
        """Open the wrapped tier."""
        self.tier.open()

    def close(self) -> None:
        """Close the wrapped tier."""
        self.tier.close()

    def contains(self, object_id: ObjectId) -> bool:
        """Ask the wrapped tier."""
        self.before("contains", 0)
        return self.tier.contains(object_id)

    def get_into(self, object_id: ObjectId, buffer: memoryview, offset: int = 0) -> int | None:
        """Read from the wrapped tier."""
        self.before("get", len(buffer))
        return self.tier.get_into(object_id, buffer, offset)

    def put_from(self, object_id: ObjectId, buffer: Buffer) -> bool:
        """Store in the wrapped tier."""
        self.before("put", len(buffer))
        return self.tier.put_from(object_id, buffer)

    def delete(self, object_id: ObjectId, reason: str) -> bool:
        """Remove from the wrapped tier."""
        self.before("delete", 0)
        return self.tier.delete(object_id, reason)

    def report_to(self, on_removed: OnRemoved) -> None:
        """Pass it on if the wrapped tier reports."""
        if isinstance(self.tier, Reporting):
            self.tier.report_to(on_removed)

    def removed_reason(self, object_id: ObjectId) -> str | None:
        """Ask the wrapped tier."""
        return self.tier.removed_reason(object_id)

    def objects(self) -> Iterator[ObjectInfo]:
        """List the wrapped tier."""
        return self.tier.objects()

    def stats(self) -> TierStats:
        """Return the wrapped tier's counters."""
        return self.tier.stats()
