"""Load a prefix in part or whole: by what either took here, and what a guard refused. Pure: the time is passed in."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from enum import Enum

from kvtide.plan import Speed
from kvtide.types import ObjectId

# The slower way gets another chance after this long.
MEMORY_S = 600.0
# A part is rough, and times vary: it has to be faster by so much.
GAIN_MIN = 1.05
# Blocks of prefixes that a guard refused.
REFUSALS_MAX = 4096


class RestoreWay(Enum):
    """A way to load a prefix."""

    PART = "in part"
    WHOLE = "whole"


class Ways:
    """Tokens a second from the look-up to the first new token, by way, apart for prefixes in the fastest tier."""

    def __init__(self) -> None:
        self._speeds = {(way, is_near): Speed() for way in RestoreWay for is_near in (False, True)}

    def choose(self, is_near: bool, now_s: float) -> RestoreWay:
        """Return the faster way, the whole where a part gains next to nothing; first either way once."""
        part, whole = (self._speeds[way, is_near].known(now_s, MEMORY_S) for way in RestoreWay)
        if part is None:
            return RestoreWay.PART
        return RestoreWay.WHOLE if whole is None or whole * GAIN_MIN > part else RestoreWay.PART

    def note(self, way: RestoreWay, is_near: bool, tokens: int, seconds: float, now_s: float) -> None:
        """Take what a load of so many tokens took; short ones are ignored."""
        self._speeds[way, is_near].note(tokens, seconds, now_s)


class Refusals:
    """Prefixes that a guard refused, which are loaded whole for as long as the slower way is."""

    def __init__(self) -> None:
        self._seen_s = OrderedDict[ObjectId, float]()

    def note(self, object_ids: Sequence[ObjectId], now_s: float) -> None:
        """Take a refused prefix, its blocks in order; one that shares only its first half is another."""
        for object_id in object_ids[len(object_ids) // 2 :]:
            self._seen_s[object_id] = now_s
            self._seen_s.move_to_end(object_id)
        while len(self._seen_s) > REFUSALS_MAX:
            self._seen_s.popitem(last=False)

    def is_refused(self, last: ObjectId, now_s: float) -> bool:
        """True for a prefix that ends with this block."""
        return now_s - self._seen_s.get(last, -math.inf) <= MEMORY_S
