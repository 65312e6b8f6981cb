"""A request's advice about its own session.

Advice buys no room. An order files what was said as a mark of the run's kind and learns, per mark, how often and when
such runs are used again: what tells nothing changes nothing.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Self

SESSION_CHARS_MAX = 256
RETAIN_S_MAX = 30 * 86_400.0
# Beyond these a priority says no more.
PRIORITY_MAX = 100
_RETAIN_EDGES_S = (60.0, 600.0, 3600.0)
LAST = 1
# Tenants that are kept in mind, those heard of most lately.
TENANTS_MAX = 1024


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
    # What JSON allows a whole number to be is more than `isfinite` takes.
    return math.isfinite(value) if isinstance(value, float) else isinstance(value, int) and not isinstance(value, bool)


# A hint, or a mapping by the same names as it came from a client.
Advice = Hint | Mapping[str, object]
