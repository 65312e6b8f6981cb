"""Shadows of several policies: who holds what is known, and a policy that goes by it."""

from __future__ import annotations

import random

import pytest

from kvtide.clock import ManualClock
from kvtide.evict.policies.mix import AGREEMENT, Agreement, Shadows
from kvtide.index import RadixIndex, Run
from kvtide.testing import chain, namespace
from kvtide.types import BlockKey
from kvtide_lab.sim.policies import policy_named

NAMES = ["lru", "lfu"]
_ROOT = Run([], None, 0, bytearray(), set())
_ROOT.state = namespace()
LIKE = Run([], _ROOT, 0, bytearray(), set())


def shadows_of(blocks_max: int) -> Shadows:
    clock = ManualClock()
    fixed = {name: RadixIndex(clock, policy_named(name), blocks_max) for name in NAMES}
    agreement = Agreement(list(fixed.values()))
    return Shadows(fixed, agreement, RadixIndex(clock, lambda _: agreement, blocks_max))


def held(shadows: Shadows, name: str, known: set[BlockKey]) -> set[BlockKey]:
    return {key for key in known if shadows[name].is_held(key)}


@pytest.mark.parametrize("seed", range(3))
def test_blocks_by_which_two_are_apart_are_counted_exactly(seed: int) -> None:
    rng, shadows, known = random.Random(seed), shadows_of(20), set[BlockKey]()
    for number in range(300):
        keys = chain(rng.randrange(12), *(rng.randrange(2) for _ in range(rng.randrange(6))))
        known.update(keys)
        shadows.learn(shadows.lengths(keys), 0.999)
        shadows.insert(keys, None, LIKE)
        if not number % 50:
            shadows.shrink()
        sets = {name: held(shadows, name, known) for name in shadows.names}
        for one in shadows.names:
            for other in shadows.names:
                assert shadows.apart(one, other) == len(sets[one] - sets[other])


def test_agreement_keeps_what_is_asked_for_though_the_first_shadow_gives_it_up() -> None:
    shadows = shadows_of(16)
    hits = dict.fromkeys(shadows.names, 0)
    for number in range(400):
        # Four prompts come round, each twice; between them are many blocks of which none comes again.
        often, once = chain(number % 4, 1), chain(100 + number, *range(7))
        for keys in (often, often, once):
            lengths = shadows.lengths(keys)
            hits = {name: hits[name] + length for name, length in zip(shadows.names, lengths, strict=True)}
            shadows.learn(lengths, 0.999)
            shadows.insert(keys, None, LIKE)
    assert hits["lfu"] > 1.8 * hits["lru"]
    assert hits[AGREEMENT] > 1.6 * hits["lru"]
