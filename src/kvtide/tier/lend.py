"""Objects lent as they lie in a tier, so that a server sends them without a copy: memory in pieces, or part of a file.

Invariant: what is lent keeps its bytes until it is given back; a file may end early, never hold other bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, Protocol, TypeGuard, runtime_checkable

from kvtide.tier.base import Tier
from kvtide.types import ObjectId

__all__ = ["FilePart", "Lender", "LentObject", "is_lender", "joined"]


class FilePart(NamedTuple):
    """An object's place in an open file."""

    descriptor: int
    offset: int


@dataclass(frozen=True, slots=True)
class LentObject:
    """An object of `size` bytes, in `file` or, without one, in `views`. `head` are its first bytes, 256 if it has them.

    Read it only. `release` gives it back; call it once.
    """

    size: int
    head: bytes
    views: Sequence[memoryview]
    file: FilePart | None
    release: Callable[[], None]


@runtime_checkable
class Lender(Protocol):
    """A tier that lends objects."""

    def lend(self, object_id: ObjectId) -> LentObject | None:
        """Lend an object; None if it is not here. A use of the object, as `get_into` is."""

    def lend_at_once(self, object_id: ObjectId) -> LentObject | None:
        """Lend an object if that needs no waiting for a disk; None says nothing about others, and counts nothing."""


class LendingTier(Tier, Lender, Protocol):
    """A tier that lends objects."""


@cache
def _lends(kind: type) -> bool:
    return issubclass(kind, Lender)


def is_lender(tier: Tier) -> TypeGuard[LendingTier]:
    """Tell whether a tier lends. Its class is asked once: a look at the protocol takes a tenth of a small GET."""
    return _lends(type(tier))


def joined(views: Sequence[memoryview], size: int) -> bytes:
    """Return the first `size` bytes of memory in pieces."""
    parts = []
    for view in views:
        if size <= 0:
            break
        parts.append(bytes(view[:size]))
        size -= len(view)
    return b"".join(parts)
