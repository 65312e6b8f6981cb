"""What the rows of `codec-quality` say at stated qualities: bits, how codecs compare, what embedding costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import msgspec

__all__ = ["KL_GOALS", "BitsAtKl", "bits_at_kl", "bits_of", "embedded_penalty", "ratio_to_tide"]

KL_GOALS = (1e-3, 5e-3, 1.2e-2)


class Judged(Protocol):
    """What is needed of a row of `codec-quality`."""

    @property
    def codec(self) -> str: ...
    @property
    def coder(self) -> str: ...
    @property
    def profile(self) -> str: ...
    @property
    def refinements(self) -> int: ...
    @property
    def over_single(self) -> float | None: ...
    @property
    def bits_per_element(self) -> float: ...
    @property
    def kl(self) -> float: ...


class BitsAtKl(msgspec.Struct, frozen=True):
    """One codec with one coder and one place of distributions at a KL.

    `bits_per_element` lies between the two best rows on either side, in (bits, log KL); None if one side has none.
    `bits_of_row` are the fewest of a row that is at least as good, None if none is.
    """

    codec: str
    coder: str
    profile: str
    kl: float
    bits_per_element: float | None
    bits_of_row: float | None


def bits_at_kl(rows: Sequence[Judged]) -> list[BitsAtKl]:
    """Return an entry for each lossy codec, coder and place of distributions, and each of KL_GOALS."""
    lines = dict.fromkeys((row.codec, row.coder, row.profile) for row in rows if row.kl > 1e-6)
    found = []
    for line in lines:
        points = [(row.bits_per_element, row.kl) for row in rows if (row.codec, row.coder, row.profile) == line]
        for kl in KL_GOALS:
            good = [bits for bits, row_kl in points if row_kl <= kl]
            found.append(BitsAtKl(*line, kl, _between(points, kl), min(good, default=None)))
    return found


def _between(points: Sequence[tuple[float, float]], kl: float) -> float | None:
    front: list[tuple[float, float]] = []
    for bits, row_kl in sorted(points):
        if row_kl > 0 and (not front or row_kl < front[-1][1]):
            front.append((bits, row_kl))
    for (low, coarse), (high, fine) in pairwise(front):
        if fine <= kl <= coarse:
            return low + (high - low) * math.log(coarse / kl) / math.log(coarse / fine)
    return None


def bits_of(found: Sequence[BitsAtKl], kl: float, codec: str, profile: str) -> float | None:
    """Return the fewest bits of a codec's coders at one of KL_GOALS, None if no coder has any."""
    bits = [
        each.bits_per_element
        for each in found
        if (each.codec, each.profile, each.kl) == (codec, profile, kl) and each.bits_per_element is not None
    ]
    return min(bits, default=None)


def ratio_to_tide(found: Sequence[BitsAtKl], codec: str, profile: str) -> float | None:
    """Return how many times the bits of `tide-deep` a codec takes at a KL of 5e-3."""
    theirs, ours = bits_of(found, 5e-3, codec, profile), bits_of(found, 5e-3, "tide-deep", "shared")
    return theirs / ours if theirs and ours else None


def embedded_penalty(rows: Sequence[Judged]) -> float | None:
    """Return by which share the worst prefix of refinements exceeds a single encoding of its quality."""
    return max((row.over_single for row in rows if row.over_single is not None), default=None)
