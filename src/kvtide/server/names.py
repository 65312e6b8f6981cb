"""Where namespaces are stored, and what their owners call them.

Invariant: a place is named by tenant, namespace and generation, so that what was stored under an earlier generation
is not looked for any more. A name is known or it is not: none is ever guessed from a place.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

from kvtide.server.auth import generation_namespace, tenant_namespace
from kvtide.types import BlockKey, Name, NamedId, Namespace, ObjectId


class Names:
    """Names of stored namespaces in which objects were seen, the last `names_max` of them. Thread-safe.

    Over the bound the tenant with the most names loses its oldest: nobody pushes out others' names by having many.
    `generation` tells a tenant's namespace's present one; it must not wait.
    """

    def __init__(self, generation: Callable[[str, Namespace], int], names_max: int = 4096) -> None:
        if names_max <= 0:
            raise ValueError(f"names_max must be positive, got {names_max}")
        self._generation = generation
        self._names_max = names_max
        self._lock = threading.Lock()
        self._names: dict[Namespace, Name] = {}
        # The same places by tenant, the least recently noted first.
        self._places: dict[str, OrderedDict[Namespace, None]] = {}

    def place(self, tenant: str, namespace: Namespace, generation: int | None = None) -> Namespace:
        """Return where a tenant's namespace is, of a generation or the present one."""
        of = self._generation(tenant, namespace) if generation is None else generation
        return generation_namespace(tenant_namespace(tenant, namespace), of)

    def ids(
        self, tenant: str, namespace: Namespace, keys: Sequence[BlockKey], generation: int | None = None
    ) -> list[NamedId]:
        """Return the ids under which a tenant's objects are stored, each with its name."""
        of = self._generation(tenant, namespace) if generation is None else generation
        name, stored = Name(tenant, namespace, of), self.place(tenant, namespace, of)
        return [NamedId.of(ObjectId(stored, key), name) for key in keys]

    def note(self, object_id: NamedId) -> None:
        """Remember what the namespace of an object that is here is called."""
        stored, name = object_id.namespace, object_id.name
        with self._lock:
            self._names[stored] = name
            places = self._places.setdefault(name.tenant, OrderedDict())
            places[stored] = None
            places.move_to_end(stored)
            if len(self._names) > self._names_max:
                tenant, most = max(self._places.items(), key=lambda each: len(each[1]))
                del self._names[most.popitem(last=False)[0]]
                if not most:
                    del self._places[tenant]

    def find(self, stored: Namespace) -> Name | None:
        """Return what a stored namespace is called, if that is known."""
        with self._lock:
            return self._names.get(stored)

    def is_current(self, name: Name) -> bool:
        """Tell whether a name is of its namespace's present generation."""
        return name.generation == self._generation(name.tenant, name.namespace)

    def own(self, stored: ObjectId) -> ObjectId | None:
        """Return a stored object's id as its owner says it.

        None if nobody has named its namespace since the start, and for an earlier generation: its owner has it no more.
        """
        name = stored.name if isinstance(stored, NamedId) else self.find(stored.namespace)
        return ObjectId(name.namespace, stored.key) if name is not None and self.is_current(name) else None
