"""Which blocks come before a block in its prompt, as far as a store has them.

Example: blocks A, B, C of a prompt are stored, D found no room and was refused. The ancestors of E, whose parent is D,
are A, B and C all the same, because what was refused is remembered with its ancestors.
"""

from __future__ import annotations

from collections import OrderedDict

from kvtide.tier.disk.catalog import Catalog
from kvtide.types import BlockKey, Namespace, ObjectId
from kvtide.wire import ObjectLabel

REFUSED_MAX = 4096


class Lineage:
    """Follows parents through a catalog, across the last REFUSED_MAX blocks that were refused. Its owner locks."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._refused: OrderedDict[ObjectId, frozenset[BlockKey]] = OrderedDict()

    def ancestors(self, namespace: Namespace, label: ObjectLabel) -> frozenset[BlockKey]:
        """Return the keys of the stored blocks before the one that this label is of."""
        found: set[BlockKey] = set()
        while label.start > 0:
            parent = ObjectId(namespace, BlockKey(label.parent))
            entry = self._catalog.find(parent)
            if entry is None:
                refused = self._refused.get(parent, frozenset())
                return refused.union(found) if found else refused
            # Starts fall, so that this ends whatever labels say.
            if entry.header.label.start >= label.start:
                break
            found.add(parent.key)
            label = entry.header.label
        return frozenset(found)

    def note_refused(self, object_id: ObjectId, ancestors: frozenset[BlockKey]) -> None:
        """Remember a block that found no room, so that those behind it don't push out its ancestors."""
        if ancestors:
            self._refused[object_id] = ancestors
            self._refused.move_to_end(object_id)
            while len(self._refused) > REFUSED_MAX:
                self._refused.popitem(last=False)
