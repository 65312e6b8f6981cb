"""The requests about many objects: batched look-up, listings, what a tenant has."""

from __future__ import annotations

import heapq

from kvtide.server.auth import Caller, Scope
from kvtide.server.names import Names
from kvtide.tier import TierStack
from kvtide.types import Namespace, ObjectId
from kvtide.wire import HEADER_BYTES, embedded_namespace
from kvtide.wire.protocol import ExistsAnswer, ListedObject, ListRoute, LookUps, ObjectList, TenantView

__all__ = ["Listing"]

_EMBEDDED_MAX = 4096


class Listing:
    """Looks through a tier for one tenant at a time. May wait for the tier; safe to use from several threads."""

    def __init__(self, tier: TierStack, names: Names) -> None:
        self._tier = tier
        self._names = names
        # What the objects of stored namespaces say that these are called.
        self._embedded: dict[Namespace, Namespace] = {}

    def exists(self, tenant: str, namespace: Namespace, asked: LookUps) -> ExistsAnswer:
        """Return which of a tenant's objects are here; where only leading ones matter, none behind a gap."""
        ids = self._names.ids(tenant, namespace, asked.keys)
        if asked.leading_only:
            leading = len(self._tier.run_places(ids))
            return ExistsAnswer([True] * leading + [False] * (len(ids) - leading), leading)
        present = [self._tier.contains(object_id) for object_id in ids]
        return ExistsAnswer(present, next((n for n, is_here in enumerate(present) if not is_here), len(present)))

    def objects(self, tenant: str, route: ListRoute) -> ObjectList:
        """Return the next objects of a tenant's namespace in the order of keys."""
        stored = self._names.place(tenant, route.namespace)
        found = (info for info in self._tier.objects() if info.id.namespace == stored and info.id.key > route.after)
        first = heapq.nsmallest(route.limit, found, key=lambda info: info.id.key)
        for named in self._names.ids(tenant, route.namespace, [info.id.key for info in first[:1]]):
            # Who lists follows events from now on.
            self._names.note(named)
        return ObjectList([ListedObject(info.id.key.hex(), info.size, info.last_use_s) for info in first])

    def tenant(self, caller: Caller) -> TenantView:
        """Return the namespaces in which a tenant has objects, as it names them, and the counters for an admin."""
        samples = {info.id.namespace: info.id for info in self._tier.objects()}
        names = (self._name(stored, sample) for stored, sample in samples.items())
        mine = {name for name in names if name is not None and self._names.place(caller.tenant, name) in samples}
        tier = self._tier.stats() if Scope.ADMIN in caller.scopes else None
        return TenantView(sorted(name.hex() for name in mine), tier)

    def _name(self, stored: Namespace, sample: ObjectId) -> Namespace | None:
        """Return what the owner calls a stored namespace, as one of its objects says."""
        name = self._names.find(stored)
        if name is not None:
            return name.namespace
        if stored not in self._embedded:
            head = bytearray(HEADER_BYTES)
            if self._tier.get_into(sample, memoryview(head)) != HEADER_BYTES:
                return None
            if len(self._embedded) >= _EMBEDDED_MAX:
                self._embedded.clear()
            self._embedded[stored] = embedded_namespace(bytes(head))
        return self._embedded[stored]
