"""The rows of `codec-quality` at stated qualities: bits, how codecs compare, what embedding costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import msgspec

KL_GOALS = (1e-3, 5e-3, 1.2e-2)


class JudgedRow(Protocol):
    """The fields of a row of `codec-quality` that the goals need."""

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


class Point(msgspec.Struct, frozen=True):
    """A row's cost and the model's loss with it."""

    bits_per_element: float
    kl: float


class BitsAtKl(msgspec.Struct, frozen=True):
    """One codec with one coder and one place of distributions at a KL.

    `bits_per_element` lies on the straight line, in (bits, log KL), through `between`: of the rows of this codec, coder
    and place, at whatever level, quality and refinement, those that no cheaper one is as good as, the nearest on either
    side (the coarser first). Both are None if a side has none. `bits_of_row` are the fewest of a row that is at least
    as good, None if none is.
    """

    codec: str
    coder: str
    profile: str
    kl: float
    bits_per_element: float | None
    bits_of_row: float | None
    between: tuple[Point, Point] | None


def bits_at_kl(rows: Sequence[JudgedRow]) -> list[BitsAtKl]:
    """Return an entry for each lossy codec, coder and place of distributions, and each of KL_GOALS."""
    lines = dict.fromkeys((row.codec, row.coder, row.profile) for row in rows if row.kl > 1e-6)
    found = []
    for line in lines:
        points = [Point(row.bits_per_element, row.kl) for row in rows if (row.codec, row.coder, row.profile) == line]
        for kl in KL_GOALS:
            good = [point.bits_per_element for point in points if point.kl <= kl]
            found.append(BitsAtKl(*line, kl, bits_of_points(points, kl), min(good, default=None), _between(points, kl)))
    return found


def bits_of_points(points: Sequence[Point], kl: float) -> float | None:
    """Return the bits at a KL on the line through the points worth having, None beyond its ends."""
    between = _between(points, kl)
    return _bits(*between, kl) if between else None


def _between(points: Sequence[Point], kl: float) -> tuple[Point, Point] | None:
    front: list[Point] = []
    for point in sorted(points, key=lambda point: (point.bits_per_element, point.kl)):
        if point.kl > 0 and (not front or point.kl < front[-1].kl):
            front.append(point)
    return next(((coarse, fine) for coarse, fine in pairwise(front) if fine.kl <= kl <= coarse.kl), None)


def _bits(coarse: Point, fine: Point, kl: float) -> float:
    share = math.log(coarse.kl / kl) / math.log(coarse.kl / fine.kl)
    return coarse.bits_per_element + (fine.bits_per_element - coarse.bits_per_element) * share


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


def embedded_penalty(rows: Sequence[JudgedRow]) -> float | None:
    """Return by which share the worst prefix of refinements exceeds a single encoding of its quality."""
    return max((row.over_single for row in rows if row.over_single is not None), default=None)
