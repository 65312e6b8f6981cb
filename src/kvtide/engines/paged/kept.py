"""The last blocks as the engine's pages hold them, in this process: a load is a copy, without a tier and a codec.

Invariant: never more than `bytes_max`; what was used last goes last.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

from kvtide.engines.paged.pages import Captured
from kvtide.types import ObjectId

# Blocks loaded once are remembered, so that what is loaded a second time is kept.
LOADED_MAX = 1 << 14


class KeptBlocks:
    """Captured blocks of one size, by name. Thread-safe. Those of an id that `is_valid` no more are not here."""

    def __init__(self, bytes_max: int, block_bytes: int, is_valid: Callable[[ObjectId], bool]) -> None:
        self._count_max = bytes_max // block_bytes
        self._is_valid = is_valid
        self._lock = threading.Lock()
        # With the id that was current then: equal ids may be of different generations.
        self._blocks: OrderedDict[ObjectId, tuple[ObjectId, Captured]] = OrderedDict()
        self._loaded: OrderedDict[ObjectId, None] = OrderedDict()

    def leading(self, object_ids: Sequence[ObjectId]) -> list[Captured]:
        """Return the longest leading run of blocks that are here; they stay valid."""
        found = []
        with self._lock:
            for object_id in object_ids:
                named, block = self._blocks.get(object_id, (object_id, None))
                if block is None or not self._is_valid(named):
                    break
                self._blocks.move_to_end(object_id)
                found.append(block)
        return found

    def put(self, object_id: ObjectId, block: Captured) -> None:
        """Keep a block in place of those that were not used for longest."""
        with self._lock:
            self._blocks[object_id] = (object_id, block)
            self._blocks.move_to_end(object_id)
            while len(self._blocks) > self._count_max:
                self._blocks.popitem(last=False)

    def is_loaded_again(self, object_id: ObjectId) -> bool:
        """Note a load from a tier; tell whether the block has earned a place by it. Never where no block has room."""
        if self._count_max == 0:
            return False
        with self._lock:
            if object_id in self._loaded:
                del self._loaded[object_id]
                return True
            self._loaded[object_id] = None
            if len(self._loaded) > LOADED_MAX:
                self._loaded.popitem(last=False)
        return False

    def check(self) -> None:
        """AssertionError if more is kept than may be."""
        with self._lock:
            assert len(self._blocks) <= self._count_max
            assert len(self._loaded) <= LOADED_MAX
