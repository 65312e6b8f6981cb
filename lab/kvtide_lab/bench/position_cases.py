"""Mixtures of refinements that `bench position` judges: for the map, for the law's fit, and to test the law."""

from __future__ import annotations

import random
from collections.abc import Sequence

from kvtide_lab.judge.position_judge import Mixture, Patch

# An embedded copy of four levels: what each is of, and the refinements after its base.
QUALITY, REFINEMENTS = 9e-4, 3
EXACT = REFINEMENTS + 1
NEWEST = (64, 128, 256, 512)
SINK_TOKENS = 256


def passages_of(tokens: int, answer_tokens: int) -> tuple[int, ...]:
    """Return where the copied passages begin, each inside one eighth of a prefix of 1,024 tokens or more."""
    return (tokens // 4, tokens // 8 * 5 if tokens // 8 * 3 >= answer_tokens else tokens // 2)


def flats() -> list[Mixture]:
    """Return one refinement for all, of each."""
    return [Mixture(f"all {kept}", kept) for kept in range(EXACT)]


def only(name: str, start: int, stop: int, kept: int, layers: tuple[int, int] | None = None) -> Mixture:
    """Return tokens that keep less than the exact rest."""
    return Mixture(f"{name} {kept}, rest exact", EXACT, (Patch(start, stop, kept, layers),))


def fit_mixtures(tokens: int) -> list[Mixture]:
    """Return what the law is fitted on: one refinement for all, ranges by themselves, and all but the newest."""
    found = flats()
    for kept in (1, 2):
        found += [only(f"newest {n}", tokens - n, tokens, kept) for n in (64, 256, tokens // 2)]
    found.append(only("newest 256", tokens - 256, tokens, 0))
    for kept in (0, 1, 2):
        found.append(Mixture(f"newest 256 exact, rest {kept}", kept, (Patch(tokens - 256, tokens, EXACT),)))
    passage, *_ = passages_of(tokens, tokens // 8)
    found += [only("first quarter", 0, tokens // 4, 1), only("passage", passage, passage + tokens // 8, 1)]
    return found


def map_mixtures(tokens: int, layers: int) -> list[Mixture]:
    """Return eighths, the newest and the first tokens at each refinement, and at the first by thirds of the layers."""
    eighth = tokens // 8
    ranges = [(f"eighth {n}", n * eighth, (n + 1) * eighth) for n in range(8)]
    ranges += [(f"newest {n}", tokens - n, tokens) for n in NEWEST if n < tokens]
    ranges += [("sinks", 0, min(SINK_TOKENS, tokens // 2))]
    found = [only(*each, kept) for kept in range(REFINEMENTS) for each in ranges]
    third = layers // 3
    for start in range(0, third * 3, third):
        found += [
            only(f"{name}, layers {start} to {start + third}", low, high, 1, (start, start + third))
            for name, low, high in ranges
        ]
    return found


def by_eighths(name: str, tokens: int, kept: Sequence[int]) -> Mixture:
    """Return a mixture of eighths."""
    eighth = tokens // 8
    return Mixture(name, EXACT, tuple(Patch(n * eighth, (n + 1) * eighth, each) for n, each in enumerate(kept)))


def trial_mixtures(tokens: int) -> list[Mixture]:
    """Return what the law is tested on: one refinement for all, mixtures that loads make, and random ones."""
    rng = random.Random(tokens)
    found = flats()[1:]
    found += [Mixture(f"newest 256 exact, rest {kept}", kept, (Patch(tokens - 256, tokens, EXACT),)) for kept in (1, 2)]
    found.append(only("last quarter", tokens - tokens // 4, tokens, 0))
    found.append(Mixture("first half 0, rest 1", 1, (Patch(0, tokens // 2, 0),)))
    found.append(Mixture("first half exact, rest 1", EXACT, (Patch(tokens // 2, tokens, 1),)))
    found += [
        by_eighths(f"random {n}", tokens, [rng.choice((1, 2, 3, EXACT) if n else (0, 1, 2, 3)) for _ in range(8)])
        for n in range(3)
    ]
    rising = sorted(rng.choice((1, 2, 3)) for _ in range(8))
    found.append(by_eighths("finer towards the end", tokens, rising))
    return found
