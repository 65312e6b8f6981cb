"""A request's advice about its own session, policies that take it, and whom they believe.

Advice buys no room. An order files what was said as a mark of the run's kind and learns, per mark, how often and when
such runs are used again: what tells nothing changes nothing. Invariant: a tenant whose sessions go on after their
announced ends is not believed until fewer of them do.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Self

from kvtide.index import EvictionPolicy
from kvtide.types import BlockKey, Namespace, Recent

SESSION_CHARS_MAX = 256
RETAIN_S_MAX = 30 * 86_400.0
# Beyond these a priority says no more.
PRIORITY_MAX = 100
_RETAIN_EDGES_S = (60.0, 600.0, 3600.0)
LAST = 1
# Tenants whose word is kept in mind, those heard of most lately, and the sessions of each whose ends are known.
TENANTS_MAX = 1024
SESSIONS_MAX = 256
# Counts of a tenant's announcements are halved beyond this many: what was long ago fades.
_SAID_MAX = 64
# A tenant is believed while at most this share of its ends, beside a few, turned out wrong.
_BROKEN_SHARE_MAX = 0.25
_BROKEN_GRANTED = 2


@dataclass(frozen=True, slots=True)
class Hint:
    """Advice that comes with a request. ValueError for values that mean nothing; `parse` passes over these.

    session: the name of the request's session, for who says later that it has ended.
    is_last: the session ends with this request.
    retain_s: the session goes on within this time, or else is not expected to.
    priority: above 0 for work that matters more than usual, below 0 for less; only the sign counts.
    """

    session: str | None = None
    is_last: bool = False
    retain_s: float | None = None
    priority: int = 0

    def __post_init__(self) -> None:
        if self.session is not None and not (
            isinstance(self.session, str) and 0 < len(self.session) <= SESSION_CHARS_MAX and self.session.isprintable()
        ):
            raise ValueError(f"session must be 1 to {SESSION_CHARS_MAX} printable characters, got {self.session!r:.80}")
        if not isinstance(self.is_last, bool):
            raise ValueError(f"is_last must be true or false, got {self.is_last!r:.80}")
        if self.retain_s is not None and not (_is_number(self.retain_s) and 0 <= self.retain_s <= RETAIN_S_MAX):
            raise ValueError(f"retain_s must be from 0 to {RETAIN_S_MAX:.0f}, got {self.retain_s!r:.80}")
        if not (_is_number(self.priority) and abs(self.priority) <= PRIORITY_MAX):
            raise ValueError(f"priority must be from -{PRIORITY_MAX} to {PRIORITY_MAX}, got {self.priority!r:.80}")

    @classmethod
    def parse(cls, said: object) -> Self | None:
        """Return what a mapping by these names advises, such as JSON from a client; None if nothing in it is of use.

        Unknown names and values that mean nothing are passed over: advice fails no request.
        """
        if isinstance(said, cls):
            return said
        named = said if isinstance(said, Mapping) else {}
        hint = cls()
        for field in fields(cls):
            if field.name in named:
                with suppress(ValueError):
                    hint = replace(hint, **{field.name: named[field.name]})
        return None if hint == cls() else hint

    @property
    def mark(self) -> int:
        """Return the class of advice, from 0 (nothing said) to 15; an end says more than all else."""
        if self.is_last:
            return LAST
        retain = 0 if self.retain_s is None else 1 + bisect_left(_RETAIN_EDGES_S, self.retain_s)
        sign = (self.priority > 0) + 2 * (self.priority < 0)
        return LAST + 3 * retain + sign if retain or sign else 0


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


# A hint, or a mapping by the same names as it came from a client.
Advice = Hint | Mapping[str, object]


class Sessions:
    """The end of each named session's latest request, of a bounded number of sessions heard of lately. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ends: Recent[Namespace, Recent[str, BlockKey]] = Recent(TENANTS_MAX)

    def note(self, tenant: Namespace, session: str, end: BlockKey) -> BlockKey | None:
        """Note where a session's request ends; return where the one before it did, if that is known."""
        with self._lock:
            ends = self._ends[tenant] = self._ends.get(tenant) or Recent(SESSIONS_MAX)
            before = ends.get(session)
            ends[session] = end
            return before


class Trust:
    """Compares what tenants announce with what their sessions do."""

    def __init__(self) -> None:
        # Pieces of advice that were not believed.
        self.ignored = 0
        # Ends that were announced, and those after which the session went on.
        self._ends: Recent[Namespace, tuple[float, float]] = Recent(TENANTS_MAX)

    def believed(self, tenant: Namespace, mark: int) -> int:
        """Note a mark; return it, or 0 if its tenant is not believed."""
        if not mark:
            return 0
        said, broken = self._ends.get(tenant, (0.0, 0.0))
        is_liar = broken > _BROKEN_GRANTED + _BROKEN_SHARE_MAX * said
        said += mark == LAST
        if said > _SAID_MAX:
            said, broken = said / 2, broken / 2
        self._ends[tenant] = said, broken
        self.ignored += is_liar
        return 0 if is_liar else mark

    def note_next_turn(self, tenant: Namespace, announced: int) -> None:
        """Note that a session went on whose latest request had this mark, believed or not."""
        if announced == LAST and tenant in self._ends:
            said, broken = self._ends[tenant]
            self._ends[tenant] = said, broken + 1


class AdvisedPolicy(EvictionPolicy):
    """A policy that takes advice. `trust` says whom it believes."""

    def __init__(self) -> None:
        self.trust = Trust()
        self._mark = 0

    def hear(self, mark: int) -> None:
        """Take a mark as that of the uses and of the advice that come from now on; 0 for requests without advice."""
        self._mark = mark
