"""What tenants call the namespaces that are stored: the way back from `tenant_namespace`, as far as it is known."""

from __future__ import annotations

import threading
from collections import OrderedDict

from kvtide.server.auth import tenant_namespace
from kvtide.types import Namespace, ObjectId

__all__ = ["Names"]


class Names:
    """The names of the last `names_max` stored namespaces that somebody used. Thread-safe."""

    def __init__(self, names_max: int = 4096) -> None:
        if names_max <= 0:
            raise ValueError(f"names_max must be positive, got {names_max}")
        self._names_max = names_max
        self._lock = threading.Lock()
        self._names: OrderedDict[Namespace, Namespace] = OrderedDict()

    def stored(self, tenant: str, object_id: ObjectId) -> ObjectId:
        """Return the id under which a tenant's object is stored, and remember whose name that is."""
        stored = tenant_namespace(tenant, object_id.namespace)
        self.note(stored, object_id.namespace)
        return ObjectId(stored, object_id.key)

    def note(self, stored: Namespace, name: Namespace) -> None:
        """Remember what a stored namespace is called."""
        with self._lock:
            self._names[stored] = name
            self._names.move_to_end(stored)
            if len(self._names) > self._names_max:
                self._names.popitem(last=False)

    def find(self, stored: Namespace) -> Namespace | None:
        """Return what a stored namespace is called, if that is known."""
        with self._lock:
            return self._names.get(stored)

    def own(self, stored: ObjectId) -> ObjectId:
        """Return a stored object's id as its owner says it; as it is stored if nobody has used it since the start."""
        name = self.find(stored.namespace)
        return stored if name is None else ObjectId(name, stored.key)
