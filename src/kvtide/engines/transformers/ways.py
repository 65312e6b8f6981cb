"""Chooses between loading a prefix in part and whole, by what either took here. Pure: the time is passed in."""

from __future__ import annotations

from enum import Enum

from kvtide.engines.paged import Speed

# The slower way gets another chance after this long.
MEMORY_S = 600.0


class RestoreWay(Enum):
    """How a prefix is loaded."""

    PART = "in part"
    WHOLE = "whole"


class Ways:
    """Tokens a second from the look-up to the first new token, by way, apart for prefixes in the fastest tier."""

    def __init__(self) -> None:
        self._speeds = {(way, is_near): Speed() for way in RestoreWay for is_near in (False, True)}

    def choose(self, is_near: bool, now_s: float) -> RestoreWay:
        """Return the faster way; first the part, then the whole once, while one of them is unknown."""
        part, whole = (self._speeds[way, is_near].known(now_s, MEMORY_S) for way in RestoreWay)
        if part is None:
            return RestoreWay.PART
        return RestoreWay.WHOLE if whole is None or whole > part else RestoreWay.PART

    def note(self, way: RestoreWay, is_near: bool, tokens: int, seconds: float, now_s: float) -> None:
        """Take what a load of so many tokens took; short ones are ignored."""
        self._speeds[way, is_near].note(tokens, seconds, now_s)
