"""The generation of each namespace as an engine knows it, and copies that come to its own tiers meanwhile.

An id is named when a read or a store begins. Invariant: bytes of an id that was named under one generation come to no
own tier once another is adopted: from `begin` to `adopt` nothing of the namespace comes or is served.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from kvtide.errors import TierUnavailable
from kvtide.tier.base import Tier
from kvtide.types import Name, NamedId, Namespace, ObjectId

# A copy that is on its way into a tier is waited for so long; then the invalidation is tried again later.
LANDING_S_MAX = 30.0


class Generations:
    """Present generations, 0 where nobody said otherwise, and what lands in `own` tiers. Thread-safe."""

    def __init__(
        self,
        own: Sequence[Tier],
        elsewhere: Callable[[ObjectId], AbstractContextManager[bool]] = lambda object_id: nullcontext(True),
    ) -> None:
        """elsewhere: gives whether bytes of an id may land for all that other engines on the same store have begun."""
        self._own = list(own)
        self._elsewhere = elsewhere
        self._changed = threading.Condition()
        self._present: dict[Namespace, int] = {}
        self._closed: frozenset[Namespace] = frozenset()
        self._landing: Counter[Namespace] = Counter()

    def named(self, object_id: ObjectId, is_latest: bool = False) -> ObjectId:
        """Return the id with its namespace's present generation; one that has a name keeps it."""
        if isinstance(object_id, NamedId):
            return object_id
        namespace = object_id.namespace
        return NamedId.of(object_id, Name("", namespace, self._present.get(namespace, 0)), is_latest)

    def present(self, object_id: ObjectId) -> ObjectId | None:
        """Return the id by its name, None if it is not valid now."""
        named = self.named(object_id)
        return named if self.is_valid(named) else None

    def is_valid(self, object_id: ObjectId) -> bool:
        """Tell whether an id is of the present generation, and its namespace is not being emptied."""
        if not isinstance(object_id, NamedId):
            return True
        namespace = object_id.namespace
        return namespace not in self._closed and self._present.get(namespace, 0) == object_id.name.generation

    @contextmanager
    def landing(self, object_id: ObjectId, tier: Tier) -> Iterator[bool]:
        """Yield whether bytes of this id may come to the tier; an invalidation waits for those that may.

        A tier that is not an own one gets the name too and decides for itself.
        """
        if tier not in self._own:
            yield self.is_valid(object_id)
            return
        namespace = object_id.namespace
        with self._changed:
            may_land = self.is_valid(object_id)
            self._landing[namespace] += 1
        try:
            with self._elsewhere(object_id) as may_land_there:
                yield may_land and may_land_there
        finally:
            with self._changed:
                self._landing[namespace] -= 1
                if not self._landing[namespace]:
                    del self._landing[namespace]
                    self._changed.notify_all()

    def begin(self, namespaces: Collection[Namespace]) -> None:
        """Close namespaces: when it returns, nothing of them is on its way into a tier. TierUnavailable if it stays."""
        with self._changed:
            self._closed |= frozenset(namespaces)
            if not self._changed.wait_for(lambda: self._landing.keys().isdisjoint(self._closed), LANDING_S_MAX):
                raise TierUnavailable(f"a copy is on its way into a tier for more than {LANDING_S_MAX} s")

    def adopt(self, raised: Mapping[Namespace, int]) -> None:
        """Take over generations, and open their namespaces."""
        with self._changed:
            self._present |= raised
            self._closed -= raised.keys()
