"""The cases of `codec-quality`: every codec, level, coder, place of distributions, and quality asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvtide.block import BlockLayout
from kvtide.codec import Codec, LosslessCodec, Profile
from kvtide.codec.base import RawCodec
from kvtide.codec.published import CachegenCodec, ChunkwiseCodec, SnippetCodec
from kvtide.codec.published.cachegen import CHUNKWISE_LEVELS, LEVELS
from kvtide.codec.published.integers import CODERS
from kvtide.codec.tide import TideCodec

# Of cachegen's nine positions in a group: how many single deltas follow the anchors in the rows that are not whole.
SINGLE_DELTAS = (0, 1, 3, 6)


class Case(NamedTuple):
    """One codec at one setting. `refinements`: how many are read, None for all."""

    name: str
    level: int
    coder: str
    profile: str
    codec: Codec
    refinements: int | None = None
    quality: float | None = None

    @property
    def id(self) -> str:
        """Return what tells it from all other cases."""
        asked = "" if self.quality is None else f" at {self.quality:g}"
        steps = self.codec.steps.refinements if isinstance(self.codec, TideCodec) else self.refinements
        refinements = "" if steps is None else f" with {steps} refinements"
        return f"{self.name} level {self.level} {self.coder} {self.profile}{asked}{refinements}"


# What objects of tide are asked for, and how many refinements they get: the last has prefixes of all qualities. Each
# KL of `KL_GOALS` lies between two that are near it, also on texts on which KL is not what it was in calibration.
TIDE_QUALITIES = ((1e-2, 0), (6.8e-3, 0), (4.5e-3, 1), (9e-4, 3))
TIDE_QUALITIES_QUICK = ((1e-2, 0), (4e-3, 1), (9e-4, 1))


Qualities = Sequence[tuple[float, int]]


def cases(profiles: Sequence[Profile], layout: BlockLayout, qualities: Qualities = TIDE_QUALITIES) -> list[Case]:
    """Return every codec, level, coder and place of distributions; shared ones where a profile fits."""
    found = [Case("raw", 0, "none", "none", RawCodec()), Case("lossless", 0, "rans", "none", LosslessCodec())]
    for name, maker, levels in (("cachegen", CachegenCodec, LEVELS), ("chunkwise", ChunkwiseCodec, CHUNKWISE_LEVELS)):
        fitting = next((p for p in profiles if p.kind == name and p.fits(layout)), None)
        for level in levels:
            for profile in (None, fitting) if fitting else (None,):
                for number, coder in enumerate(CODERS):
                    where = "shared" if profile else "payload"
                    found.append(Case(name, level, coder.name, where, maker(level, number, profile)))
    found.append(Case("cachegen-snippet", 0, CODERS[0].name, "payload", SnippetCodec()))
    return found + _anchor_cases(found) + _tide_cases(profiles, layout, qualities)


def chosen(every: Sequence[Case], codecs: Sequence[str]) -> list[Case]:
    """Return the cases of the codecs that are named, all if none is. ValueError for a name that no case has."""
    known = dict.fromkeys(case.name for case in every)
    unknown = [name for name in codecs if name not in known]
    if unknown:
        raise ValueError(f"codecs of this model and these profiles are {', '.join(known)}, got {unknown[0]!r}")
    return [case for case in every if not codecs or case.name in codecs]


def _anchor_cases(found: Sequence[Case]) -> list[Case]:
    # The paper's own bins, the coarsest: beside deltas that are not here, finer ones are bits for nothing.
    whole = [case for case in found if (case.name, case.level, case.coder) == ("cachegen", max(LEVELS), "rans")]
    return [whole[-1]._replace(refinements=refinements) for refinements in SINGLE_DELTAS]


def _tide_cases(profiles: Sequence[Profile], layout: BlockLayout, qualities: Qualities) -> list[Case]:
    return [
        Case(profile.kind, 0, "rans", "shared", TideCodec(profile, quality, refinements), quality=quality)
        for profile in profiles
        if profile.kind.startswith("tide") and profile.fits(layout)
        for quality, refinements in qualities
    ]
