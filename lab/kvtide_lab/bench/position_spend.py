"""The saving of a load that spends bytes by the loss law, against one refinement for all."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

import msgspec
import numpy as np

from kvtide.codec.tide.law import LossLaw, Purpose
from kvtide_lab.judge.position_judge import Mixture, Patch, PositionJudge

# KLs that are asked for; half of the bytes that one refinement for all takes at the first is tried besides.
GOALS = (5e-3, 1e-2, 2e-2)


class Spent(NamedTuple):
    """One way to load one text: bytes, what the law says, and what the model says: text that goes on, copies (mean)."""

    way: str
    size: float
    law: tuple[float, float]
    kls: tuple[float, float]


class SpendRow(msgspec.Struct, frozen=True):
    """One way to load, the mean of `texts` texts; sizes in bits of a float32 element.

    bytes_vs_flat: bytes over those of one refinement for all at the same KL, for the worse purpose, and kl_vs_flat: KL
    over that of one refinement for all in as many bytes, for each. The line through what is measured of one refinement
    for all, in (bytes, log KL), stands for objects of any step. bytes_vs_stored: over the fewest bytes of a refinement
    that is there and as good.
    """

    prefix_tokens: int
    way: str
    texts: int
    bits: float
    kl_goes_on: float
    kl_copies: float
    law_goes_on: float
    law_copies: float
    bytes_vs_flat: float | None
    bytes_vs_stored: float | None
    kl_vs_flat_goes_on: float | None
    kl_vs_flat_copies: float | None


def spent(judge: PositionJudge, law: LossLaw, block_tokens: int, passages: Sequence[int]) -> list[Spent]:
    """Load one context in every way: one refinement for all, by the law at each goal, and by its order at half."""
    sizes, blocks = judge.sizes, len(judge.sizes)
    ways = [(f"all {kept}", [kept] * blocks) for kept in range(law.refinements + 1)]
    ways += [(f"law at {goal:g}", law.cheapest(sizes, block_tokens, goal)) for goal in GOALS]
    flat_bytes = [float(sum(size[kept] for size in sizes)) for kept in range(law.refinements + 1)]
    half = np.interp(np.log(GOALS[0]), np.log(law.losses[::-1]), flat_bytes[::-1]) / 2
    ways.append((f"law at half of {GOALS[0]:g}", within(law, sizes, block_tokens, float(half))))
    found = []
    for way, kept in ways:
        patches = tuple(Patch(i * block_tokens, (i + 1) * block_tokens, each) for i, each in enumerate(kept))
        goes_on, *copies = judge.kls(Mixture(way, 0, patches), passages)
        says = (law.kl(kept, block_tokens, Purpose.GOES_ON), law.kl(kept, block_tokens, Purpose.COPIES))
        size = float(sum(size[each] for size, each in zip(sizes, kept, strict=True)))
        found.append(Spent(way, size, says, (goes_on, fmean(copies))))
    return found


def within(law: LossLaw, sizes: Sequence[Sequence[int]], block_tokens: int, size_max: float) -> list[int]:
    """Return what each block keeps when fetching in the law's order ends at so many bytes; all bases are fetched."""
    kept, size = [0] * len(sizes), float(sum(each[0] for each in sizes))
    for block, refinement in law.order(len(sizes), block_tokens)[len(sizes) :]:
        more = sizes[block][refinement] - sizes[block][refinement - 1]
        if size + more > size_max:
            break
        kept[block], size = refinement, size + more
    return kept


def spend_rows(prefix_tokens: int, elements: int, by_text: Sequence[Sequence[Spent]]) -> list[SpendRow]:
    """Return a row for each way, over texts; the ways of all texts are the same."""
    means = [
        Spent(
            way[0].way,
            fmean(each.size for each in way),
            (fmean(each.law[0] for each in way), fmean(each.law[1] for each in way)),
            (fmean(each.kls[0] for each in way), fmean(each.kls[1] for each in way)),
        )
        for way in zip(*by_text, strict=True)
    ]
    flats = [each for each in means if each.way.startswith("all ")]
    return [_row(prefix_tokens, elements, len(by_text), each, flats) for each in means]


def _row(prefix_tokens: int, elements: int, texts: int, found: Spent, flats: Sequence[Spent]) -> SpendRow:
    is_law = found.way.startswith("law")
    sizes = np.array([flat.size for flat in flats])
    logs = np.log([flat.kls for flat in flats])
    same_kl = [float(np.interp(-np.log(found.kls[i]), -logs[:, i], sizes)) for i in Purpose]
    same_size = [float(np.exp(np.interp(found.size, sizes, logs[:, i]))) for i in Purpose]
    stored = [flat.size for flat in flats if all(flat.kls[i] <= found.kls[i] for i in Purpose)]
    return SpendRow(
        prefix_tokens,
        found.way,
        texts,
        8 * found.size / elements,
        *found.kls,
        *found.law,
        found.size / min(same_kl) if is_law else None,
        found.size / min(stored) if is_law and stored else None,
        found.kls[0] / same_size[0] if is_law else None,
        found.kls[1] / same_size[1] if is_law else None,
    )
