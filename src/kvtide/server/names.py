"""Where namespaces are stored, and what their owners call them.

Invariant: a place is named by tenant, namespace and generation, so that what was stored under an earlier generation
is not looked for any more.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from kvtide.server.auth import generation_namespace, tenant_namespace
from kvtide.types import Namespace, ObjectId

__all__ = ["Name", "Names"]


class Name(NamedTuple):
    """What a stored namespace is: whose, what it is called, of which generation."""

    tenant: str
    namespace: Namespace
    generation: int


class Names:
    """Knows by name the last `names_max` stored namespaces that somebody used. Thread-safe.

    `generation` tells a tenant's namespace's present one; it must not wait.
    """

    def __init__(self, generation: Callable[[str, Namespace], int], names_max: int = 4096) -> None:
        if names_max <= 0:
            raise ValueError(f"names_max must be positive, got {names_max}")
        self._generation = generation
        self._names_max = names_max
        self._lock = threading.Lock()
        self._names: OrderedDict[Namespace, Name] = OrderedDict()

    def place(self, tenant: str, namespace: Namespace, generation: int | None = None) -> Namespace:
        """Return where a tenant's namespace is, of a generation or the present one; remember what that is called."""
        of = self._generation(tenant, namespace) if generation is None else generation
        name = Name(tenant, namespace, of)
        stored = generation_namespace(tenant_namespace(tenant, namespace), of)
        self.note(stored, name)
        return stored

    def note(self, stored: Namespace, name: Name) -> None:
        """Remember what a stored namespace is called."""
        with self._lock:
            self._names[stored] = name
            self._names.move_to_end(stored)
            if len(self._names) > self._names_max:
                self._names.popitem(last=False)

    def find(self, stored: Namespace) -> Name | None:
        """Return what a stored namespace is called, if that is known."""
        with self._lock:
            return self._names.get(stored)

    def is_current(self, name: Name) -> bool:
        """Tell whether a name is of its namespace's present generation."""
        return name.generation == self._generation(name.tenant, name.namespace)

    def own(self, stored: ObjectId) -> ObjectId | None:
        """Return a stored object's id as its owner says it; as it is stored if nobody has used it since the start.

        None if it is of an earlier generation: its owner has it no longer.
        """
        name = self.find(stored.namespace)
        if name is None:
            return stored
        return ObjectId(name.namespace, stored.key) if self.is_current(name) else None
