"""Look-ups of a run of objects: one at a time until one is found in a tier that can look up many at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from kvtide.tier.base import Batched, Tier
from kvtide.tier.stack.faults import TierFaults
from kvtide.types import ObjectId

# A prompt that is new costs one look-up; one that is known costs one for every so many blocks.
LOOK_UPS_MAX = 256


def run_places(
    object_ids: Sequence[ObjectId],
    places: Callable[[ObjectId, int | None], Iterator[int]],
    tiers: Sequence[Tier],
    ask: Callable[[Tier, str, Callable[[], int], int], int],
) -> list[int]:
    """Return the fastest tier of each object of the longest leading run that is in some tier.

    `places` yields the numbers of an object's tiers, the fastest first, of those before a number; `ask` runs an action
    on a tier, or gives its last argument if that fails.
    """
    batched = {number: tier for number, tier in enumerate(tiers) if isinstance(tier, Batched)}
    found: list[int] = []
    while len(found) < len(object_ids):
        number = next(places(object_ids[len(found)], None), None)
        if number is None:
            break
        found.append(number)
        if number in batched:
            following = object_ids[len(found) : len(found) + LOOK_UPS_MAX]
            count = ask(tiers[number], "contains", partial(batched[number].count_leading, following), 0)
            found += [next(places(object_id, number), number) for object_id in following[:count]]
    return found


def contained(object_ids: Sequence[ObjectId], tiers: Sequence[Tier], faults: TierFaults) -> list[bool]:
    """Tell of each object whether one of the tiers has it now; each tier is asked for what none before it has."""
    present = [False] * len(object_ids)
    for tier in tiers:
        numbers = [number for number, is_here in enumerate(present) if not is_here]
        asked = [object_ids[number] for number in numbers]
        if not asked:
            break
        if isinstance(tier, Batched):
            found = faults.ask(tier, "contains", partial(tier.contains_each, asked), [False] * len(asked))
        else:
            found = [faults.ask(tier, "contains", partial(tier.contains, each), False) for each in asked]
        for number, is_here in zip(numbers, found, strict=True):
            present[number] = is_here
    return present
