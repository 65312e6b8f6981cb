"""The requests about many objects: batched look-up, listings, what a tenant has."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from kvtide.server.auth import Caller, Scope, tenant_namespace
from kvtide.server.names import Names
from kvtide.tier import Tier
from kvtide.types import BlockKey, Namespace, ObjectId
from kvtide.wire import HEADER_BYTES, embedded_namespace
from kvtide.wire.protocol import ExistsAnswer, ListedObject, ListRoute, ObjectList, TenantView

__all__ = ["Listing"]


class Listing:
    """Looks through a tier for one tenant at a time. May wait for the tier; safe to use from several threads."""

    def __init__(self, tier: Tier, names: Names) -> None:
        self._tier = tier
        self._names = names

    def exists(self, tenant: str, namespace: Namespace, keys: Sequence[BlockKey]) -> ExistsAnswer:
        """Return which of a tenant's objects are here."""
        stored = tenant_namespace(tenant, namespace)
        present = [self._tier.contains(ObjectId(stored, key)) for key in keys]
        return ExistsAnswer(present, next((n for n, is_here in enumerate(present) if not is_here), len(present)))

    def objects(self, tenant: str, route: ListRoute) -> ObjectList:
        """Return the next objects of a tenant's namespace in the order of keys."""
        stored = tenant_namespace(tenant, route.namespace)
        found = (info for info in self._tier.objects() if info.id.namespace == stored and info.id.key > route.after)
        first = heapq.nsmallest(route.limit, found, key=lambda info: info.id.key)
        return ObjectList([ListedObject(info.id.key.hex(), info.size, info.last_use_s) for info in first])

    def tenant(self, caller: Caller) -> TenantView:
        """Return the namespaces in which a tenant has objects, as it names them, and the counters for an admin."""
        samples = {info.id.namespace: info.id for info in self._tier.objects()}
        names = (self._name(stored, sample) for stored, sample in samples.items())
        mine = {name for name in names if name is not None and tenant_namespace(caller.tenant, name) in samples}
        tier = self._tier.stats() if Scope.ADMIN in caller.scopes else None
        return TenantView(sorted(name.hex() for name in mine), tier)

    def _name(self, stored: Namespace, sample: ObjectId) -> Namespace | None:
        """Return what the owner calls a stored namespace, as one of its objects says."""
        name = self._names.find(stored)
        if name is None:
            head = bytearray(HEADER_BYTES)
            if self._tier.get_into(sample, memoryview(head)) != HEADER_BYTES:
                return None
            name = embedded_namespace(bytes(head))
            self._names.note(stored, name)
        return name
