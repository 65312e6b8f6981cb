"""The moment until which whoever asked waits: set by a server around its tiers, heeded by those that ask other servers.

Invariant: a call that its caller's deadline ended says nothing of the server that was asked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

# Of the thread that calls; a stack, a flight and a pool lie in between, for which it is nothing.
_UNTIL_S: ContextVar[float] = ContextVar("until_s", default=math.inf)


@contextmanager
def until(deadline_s: float) -> Iterator[None]:
    """Let no call of this thread wait longer, by the monotonic clock, for the time of the `with`."""
    before = _UNTIL_S.set(deadline_s)
    try:
        yield
    finally:
        _UNTIL_S.reset(before)


def caller_deadline_s() -> float:
    """Return until when the caller waits: infinity if it did not say."""
    return _UNTIL_S.get()
