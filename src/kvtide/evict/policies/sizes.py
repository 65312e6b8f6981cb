"""Sizes of what one holder has: how many objects fit, and what room a block takes beside those of other namespaces.

Invariant: `used_bytes` are those of the objects that entered and did not leave.
"""

from __future__ import annotations

from collections import OrderedDict

from kvtide.evict.hint import TENANTS_MAX
from kvtide.index import USUAL_SIZE
from kvtide.types import Namespace, ObjectId

# Objects whose mean size says how many fit, and how far the plan may be off.
_COUNT_MIN = 16
_PLAN_SLACK = 1.25
# Each object moves its namespace's size by this part of the difference; less of a difference than this is none.
_RATE = 1 / 16
_ALIKE = 1.1


class Sizes:
    """Bytes of objects, all together and by namespace; the first one has the usual size. Not thread-safe."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._of: dict[ObjectId, int] = {}
        self.used_bytes = 0
        self._usual_bytes = 0
        # Means of the namespaces heard of lately.
        self._means: OrderedDict[Namespace, float] = OrderedDict()

    def enter(self, object_id: ObjectId, size: int) -> None:
        """Note an object that is here from now on."""
        self._of[object_id] = size
        self.used_bytes += size
        self._usual_bytes = self._usual_bytes or max(1, size)
        mean = self._means.pop(object_id.namespace, float(size))
        self._means[object_id.namespace] = mean + _RATE * (size - mean)
        if len(self._means) > TENANTS_MAX:
            self._means.popitem(last=False)

    def leave(self, object_id: ObjectId) -> None:
        """Note that an object is here no more; one that did not enter is ignored."""
        self.used_bytes -= self._of.pop(object_id, 0)

    def fitting(self, planned_blocks: int) -> int:
        """Return how many objects of the mean size fit; what is planned if that is about as many, or few are here."""
        if len(self._of) < _COUNT_MIN or not self.used_bytes:
            return planned_blocks
        blocks = max(1, self._bytes_max * len(self._of) // self.used_bytes)
        return planned_blocks if 1 / _PLAN_SLACK <= blocks / planned_blocks <= _PLAN_SLACK else blocks

    def of(self, namespace: Namespace) -> int:
        """Return the size that a namespace's next blocks will have; of one not heard of, as large as the mean."""
        mean = self._means.get(namespace, self.used_bytes / max(1, len(self._of)))
        return self.measured(mean) if mean else USUAL_SIZE

    def measured(self, size: float) -> int:
        """Return the size of an object of so many bytes, as an index takes it."""
        share = size / self._usual_bytes
        return USUAL_SIZE if 1 / _ALIKE < share < _ALIKE else max(1, round(USUAL_SIZE * share))
