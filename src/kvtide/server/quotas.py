"""Each tenant's stock and limits in this server's own tiers: bytes, objects, and for how long.

Invariant: an object counts once, for the tenant that stored it, from when a tier has it until none has it any more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import msgspec

from kvtide.errors import RequestRefused
from kvtide.server.auth import stored_namespace
from kvtide.tier.base import Tier
from kvtide.tier.stack import TierStack
from kvtide.types import NamedId, Namespace, ObjectId
from kvtide.wire import HEADER_BYTES, embedded_namespace

# The quota of every tenant that has none of its own.
OTHERS = "*"
# Objects that are counted at all, some 300 bytes of bookkeeping each. Who has less than the reserve may store though
# all are taken by others, up to an eighth more.
COUNTED_MAX = 1 << 20
COUNTED_RESERVED = 1 << 12
# Generations of a namespace that a recount recognises; objects of earlier ones count for nobody, and are evicted.
_GENERATIONS_MAX = 8


class Quota(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tenant's limits here; None is as much as there is room for. ValueError for one that is not positive."""

    bytes_max: int | None = None
    objects_max: int | None = None
    # Objects are gone so long after they were stored; after a restart so long after they were used last.
    ttl_s: float | None = None

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} of a quota must be positive, got {value!r}")


class Stored(NamedTuple):
    """One tenant's stored objects and bytes here."""

    tenant: str
    objects: int = 0
    bytes: int = 0


class _Entry(NamedTuple):
    tenant: str
    size: int
    stored_s: float
    # The tiers that have it, a bit each.
    tiers: int


class Quotas:
    """Counts what tiers hold for each tenant, if there were `quotas()` at the start. Observes a stack. Thread-safe."""

    def __init__(self, quotas: Callable[[], Mapping[str, Quota]], wall_s: Callable[[], float]) -> None:
        self.quotas, self._wall_s, self.is_counting = quotas, wall_s, bool(quotas())
        self._lock = threading.Lock()
        # The numbers of this server's own tiers: others don't say when objects go.
        self._own: set[int] = set()
        self._entries: dict[ObjectId, _Entry] = {}
        self._held: dict[str, Stored] = {}
        # What is on its way in.
        self._coming: dict[str, Stored] = {}

    def _quota(self, tenant: str) -> Quota:
        quotas = self.quotas()
        return quotas.get(tenant) or quotas.get(OTHERS) or Quota()

    @contextmanager
    def room(self, tenant: str, size: int) -> Iterator[None]:
        """Keep room for an object of a tenant while it comes. RequestRefused (507) that says which quota is full."""
        if not self.is_counting:
            yield
            return
        quota = self._quota(tenant)
        with self._lock:
            held, coming = self._held.get(tenant, Stored(tenant)), self._coming.get(tenant, Stored(tenant))
            counted_max = COUNTED_MAX if held.objects >= COUNTED_RESERVED else _all_max()
            for name, wanted, most in (
                ("bytes_max", held.bytes + coming.bytes + size, quota.bytes_max),
                ("objects_max", held.objects + coming.objects + 1, quota.objects_max),
                ("objects counted by this server", len(self._entries) + 1, counted_max),
            ):
                if most is not None and wanted > most:
                    raise RequestRefused(507, f"the tenant's quota {name} is {most}, {wanted} were needed")
            _add(self._coming, tenant, 1, size)
        try:
            yield
        finally:
            with self._lock:
                _add(self._coming, tenant, -1, -size)

    def placed(self, object_id: ObjectId, tier: int, size: int) -> None:
        """Count an object that a tier has now, for the tenant in its name."""
        if tier in self._own:
            tenant = object_id.name.tenant if isinstance(object_id, NamedId) else None
            self._count(object_id, tenant, tier, size, self._wall_s())

    def _count(self, object_id: ObjectId, tenant: str | None, tier: int, size: int, stored_s: float) -> None:
        with self._lock:
            known = self._entries.get(object_id)
            if known is not None:
                # Another form of it may have taken its place.
                self._entries[object_id] = known._replace(size=size, tiers=known.tiers | 1 << tier)
                _add(self._held, known.tenant, 0, size - known.size)
            elif tenant is not None and len(self._entries) < _all_max():
                self._entries[ObjectId(*object_id)] = _Entry(tenant, size, stored_s, 1 << tier)
                _add(self._held, tenant, 1, size)

    def removed(self, object_id: ObjectId, tier: int) -> None:
        """Take an object off that a tier has no longer, if it was the last that had it."""
        with self._lock:
            entry = self._entries.get(object_id)
            if entry is None:
                return
            if left := entry.tiers & ~(1 << tier):
                self._entries[object_id] = entry._replace(tiers=left)
            else:
                del self._entries[object_id]
                _add(self._held, entry.tenant, -1, -entry.size)

    def recount(self, stack: TierStack, tenants: Sequence[str], generation: Callable[[str, Namespace], int]) -> None:
        """Count what the stack's tiers have from before the start, for those of `tenants` that it belongs to."""
        owners: dict[Namespace, str | None] = {}
        for name, tier in stack.open_tiers.items():
            if not tier.is_own:
                continue
            number = stack.tier_names.index(name)
            self._own.add(number)
            for info in tier.objects():
                if info.id.namespace not in owners:
                    owners[info.id.namespace] = _owner(tier, info.id, tenants, generation)
                self._count(info.id, owners[info.id.namespace], number, info.size, info.last_use_s)

    def is_expired(self, object_id: ObjectId) -> bool:
        """Tell whether an object is older than its tenant's quota lets it be."""
        entry = self._entries.get(object_id) if self.is_counting else None
        ttl_s = self._quota(entry.tenant).ttl_s if entry is not None else None
        return entry is not None and ttl_s is not None and self._wall_s() - entry.stored_s > ttl_s

    def expired(self) -> list[ObjectId]:
        """Return the objects that are."""
        with self._lock:
            ids = list(self._entries)
        return [object_id for object_id in ids if self.is_expired(object_id)]

    def stored(self) -> list[Stored]:
        """Return what each tenant has."""
        with self._lock:
            return list(self._held.values())

    def check(self) -> None:
        """AssertionError if the accounting is off. Call it while nothing is stored."""
        with self._lock:
            assert len(self._entries) <= _all_max()
            assert not self._coming
            for tenant, held in self._held.items():
                own = [entry.size for entry in self._entries.values() if entry.tenant == tenant]
                assert held == Stored(tenant, len(own), sum(own))


def _all_max() -> int:
    return COUNTED_MAX + COUNTED_MAX // 8


def _add(counts: dict[str, Stored], tenant: str, objects: int, size: int) -> None:
    held = counts.get(tenant, Stored(tenant))
    counts[tenant] = Stored(tenant, held.objects + objects, held.bytes + size)
    if not counts[tenant].objects:
        del counts[tenant]


def _owner(
    tier: Tier, object_id: ObjectId, tenants: Sequence[str], generation: Callable[[str, Namespace], int]
) -> str | None:
    """Return whose a stored namespace is, as one of its objects tells; None if it is none of these."""
    head = bytearray(HEADER_BYTES)
    if tier.get_into(object_id, memoryview(head)) != HEADER_BYTES:
        return None
    name = embedded_namespace(bytes(head))
    for tenant in tenants:
        latest = generation(tenant, name)
        for number in range(latest, max(-1, latest - _GENERATIONS_MAX), -1):
            if stored_namespace(tenant, name, number) == object_id.namespace:
                return tenant
    return None
