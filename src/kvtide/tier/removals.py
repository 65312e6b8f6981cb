"""Why objects were removed, for tiers whose store does not remember: the latest ones, in this process."""

from __future__ import annotations

import threading
from collections import OrderedDict

from kvtide.types import ObjectId

REMEMBERED_MAX = 4096


class Removals:
    """The last REMEMBERED_MAX reasons. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reasons: OrderedDict[ObjectId, str] = OrderedDict()

    def note(self, object_id: ObjectId, reason: str) -> None:
        """Remember a reason, and forget the oldest one if there are too many."""
        with self._lock:
            self._reasons[object_id] = reason
            self._reasons.move_to_end(object_id)
            while len(self._reasons) > REMEMBERED_MAX:
                self._reasons.popitem(last=False)

    def reason(self, object_id: ObjectId) -> str | None:
        """Return the reason, or None if it was never known or is forgotten."""
        with self._lock:
            return self._reasons.get(object_id)
