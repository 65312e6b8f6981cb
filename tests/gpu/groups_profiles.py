"""Profiles of the published codecs, fitted on one made-up block."""

from __future__ import annotations

from functools import cache

from kvtide.block import BlockLayout
from kvtide.codec.profile import Profile
from kvtide.codec.published import ProfileFitter
from kvtide.testing import smooth_bits


@cache
def fitted(kind: str, layout: BlockLayout) -> Profile:
    fitter, bits = ProfileFitter(kind, "made up", layout), smooth_bits(layout, 1)
    fitter.scale([bits])
    fitter.add(bits)
    return fitter.profile(texts=1)
