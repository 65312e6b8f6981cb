"""Storage places of namespaces, their owners' names for them, and lists of what they have.

Invariant: a place is named by tenant, namespace and generation, so that nobody looks for what an earlier generation
stored. Listings walk through everybody's objects in slices, with a turn for each.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from kvtide.server.auth import Caller, Scope, stored_namespace
from kvtide.tier import ObjectInfo
from kvtide.tier.stack import TierStack
from kvtide.types import BlockKey, Name, NamedId, Namespace, ObjectId
from kvtide.wire import HEADER_BYTES, embedded_namespace
from kvtide.wire.protocol import ListedObject, ListRoute, ObjectList, TenantView

_EMBEDDED_MAX = 4096
# A millisecond or two of Python's, in which nothing else happens.
_SLICE_OBJECTS = 512


class Names:
    """Storage places of tenants' namespaces. `generation` tells a namespace's present one; it must not wait."""

    def __init__(self, generation: Callable[[str, Namespace], int]) -> None:
        self._generation = generation

    def place(self, tenant: str, namespace: Namespace) -> Namespace:
        """Place of a tenant's namespace at its present generation."""
        return stored_namespace(tenant, namespace, self._generation(tenant, namespace))

    def ids(
        self, tenant: str, namespace: Namespace, keys: Sequence[BlockKey], generation: int | None = None
    ) -> list[NamedId]:
        """Ids under which a tenant's objects are stored, each with its name."""
        of = self._generation(tenant, namespace) if generation is None else generation
        name, stored = Name(tenant, namespace, of), stored_namespace(tenant, namespace, of)
        return [NamedId.of(ObjectId(stored, key), name) for key in keys]

    def is_current(self, name: Name) -> bool:
        """Tell whether a name is of its namespace's present generation."""
        return name.generation == self._generation(name.tenant, name.namespace)


class Listing:
    """Looks through a tier for one tenant at a time. May wait for the tier; safe to use from several threads."""

    def __init__(self, tier: TierStack, names: Names) -> None:
        self._tier = tier
        self._names = names
        # What the objects of stored namespaces say that these are called.
        self._embedded: dict[Namespace, Namespace] = {}

    def objects(self, tenant: str, route: ListRoute) -> Iterator[ObjectList | None]:
        """Yield the next objects of a tenant's namespace in the order of keys, after None for each slice of work."""
        stored = self._names.place(tenant, route.namespace)
        first: list[ObjectInfo] = []
        for infos in self._slices():
            found = [info for info in infos if info.id.namespace == stored and info.id.key > route.after]
            first = heapq.nsmallest(route.limit, [*first, *found], key=lambda info: info.id.key) if found else first
            yield None
        yield ObjectList([ListedObject(info.id.key.hex(), info.size, info.last_use_s) for info in first])

    def tenant(self, caller: Caller) -> Iterator[TenantView | None]:
        """Yield a tenant's namespaces, as it names them, and the counters for an admin, after None for each slice."""
        samples: dict[Namespace, ObjectId] = {}
        for infos in self._slices():
            samples.update((info.id.namespace, info.id) for info in infos)
            yield None
        names = (self._name(stored, sample) for stored, sample in samples.items())
        mine = {name for name in names if name is not None and self._names.place(caller.tenant, name) in samples}
        tier = self._tier.stats() if Scope.ADMIN in caller.scopes else None
        yield TenantView(sorted(name.hex() for name in mine), tier)

    def _slices(self) -> Iterator[list[ObjectInfo]]:
        """Yield what everybody has, a few objects at a time."""
        infos = self._tier.objects()
        while part := list(islice(infos, _SLICE_OBJECTS)):
            yield part

    def _name(self, stored: Namespace, sample: ObjectId) -> Namespace | None:
        """Return what the owner calls a stored namespace, as one of its objects says."""
        name = self._embedded.get(stored)
        if name is None:
            head = bytearray(HEADER_BYTES)
            if self._tier.get_into(sample, memoryview(head)) != HEADER_BYTES:
                return None
            if len(self._embedded) >= _EMBEDDED_MAX:
                self._embedded.clear()
            name = self._embedded[stored] = embedded_namespace(bytes(head))
        return name
