"""Look-ups of a run of objects: one at a time until one is found in a tier that can look up many at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvtide.types import ObjectId

__all__ = ["LOOK_UPS_MAX", "run_places"]

# A prompt that is new costs one look-up; one that is known costs one for every so many blocks.
LOOK_UPS_MAX = 256


def run_places(
    object_ids: Sequence[ObjectId],
    places: Callable[[ObjectId, int | None], Iterator[int]],
    count_leading: Callable[[int, Sequence[ObjectId]], int],
) -> list[int]:
    """Return the fastest tier of each object of the longest leading run that is in some tier.

    `places` yields an object's tiers, the fastest first, of those before a number; `count_leading` asks one tier for
    many, 0 if that tier can't be asked so.
    """
    found: list[int] = []
    while len(found) < len(object_ids):
        number = next(places(object_ids[len(found)], None), None)
        if number is None:
            break
        found.append(number)
        following = object_ids[len(found) : len(found) + LOOK_UPS_MAX]
        for object_id in following[: count_leading(number, following)]:
            found.append(next(places(object_id, number), number))
    return found
