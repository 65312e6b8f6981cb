"""Blocks, profiles and steps of many kinds, and how the processor decodes them."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from tests.codec.tide_profiles import fitted
from tests.suites import block_meta, smooth_bits

from kvtide.block import BlockBits, BlockLayout, BlockMeta, KVDtype
from kvtide.codec import Codec, Profile
from kvtide.codec.published import ProfileFitter
from kvtide.codec.tide import TideCodec
from kvtide.types import Section

# Kernels are a fixture of the session; emulation is too slow to shrink what fails.
EMULATED = settings(
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much],
)
INT = {2: torch.int16, 4: torch.int32}


def on_processor(codec: Codec, meta: BlockMeta, sections: list[Section]) -> BlockBits:
    out = np.empty(meta.layout.shape, meta.layout.bits_dtype)
    codec.decode(meta, sections, out)
    return out


def untouched(layout: BlockLayout, device: torch.device) -> torch.Tensor:
    """A block that nobody has written: 0x55 everywhere."""
    return torch.full(layout.shape, 0x55, dtype=INT[layout.dtype.item_bytes], device=device)


def bits_of(block: torch.Tensor, layout: BlockLayout) -> BlockBits:
    return block.cpu().numpy().view(layout.bits_dtype)


@cache
def fitted_groups(kind: str, layout: BlockLayout) -> Profile:
    """A profile of a published codec, fitted on one block."""
    fitter, bits = ProfileFitter(kind, "made up", layout), smooth_bits(layout, 1)
    fitter.scale([bits])
    fitter.add(bits)
    return fitter.profile(texts=1)


class TideCase(NamedTuple):
    codec: TideCodec
    meta: BlockMeta
    bits: BlockBits


def _case(
    cost: str, shape: tuple[int, int, int], dtype: KVDtype, steps: tuple[float, int], where: tuple[int, int]
) -> TideCase:
    layout = BlockLayout(5 if cost == "deep" else 2, *shape, dtype)
    position, seed = where
    codec = TideCodec(fitted(layout, cost, 1), *steps).rounded()
    return TideCase(codec, block_meta(layout, seed, position), smooth_bits(layout, seed))


tide_cases = st.builds(
    _case,
    st.sampled_from(["light", "layer", "deep"]),
    st.tuples(st.integers(24, 140), st.integers(1, 3), st.integers(4, 12)),
    st.sampled_from(KVDtype),
    st.tuples(st.sampled_from([1e-3, 8e-2]), st.integers(0, 3)),
    st.tuples(st.integers(0, 2), st.integers(0, 999)),
)
