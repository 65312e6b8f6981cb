"""Blocks, profiles and steps of many kinds, for what decodes tide and for what encodes it."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import strategies as st
from tests.codec.tide_profiles import fitted

from kvtide.block import BlockBits, BlockLayout, BlockMeta, KVDtype
from kvtide.codec.tide import TideCodec
from kvtide.testing import block_meta, smooth_bits


class TideCase(NamedTuple):
    """A block, and the codec of a profile of `cost`."""

    cost: str
    codec: TideCodec
    meta: BlockMeta
    bits: BlockBits


def _case(
    cost: str, shape: tuple[int, int, int], dtype: KVDtype, steps: tuple[float, int], where: tuple[int, int]
) -> TideCase:
    layout = BlockLayout(5 if cost == "deep" else 2, *shape, dtype)
    position, seed = where
    codec = TideCodec(fitted(layout, cost, 1), *steps).rounded()
    return TideCase(cost, codec, block_meta(layout, seed, position), smooth_bits(layout, seed))


tide_cases = st.builds(
    _case,
    st.sampled_from(["light", "layer", "deep"]),
    st.tuples(st.integers(24, 140), st.integers(1, 3), st.integers(4, 12)),
    st.sampled_from(KVDtype),
    st.tuples(st.sampled_from([1e-3, 8e-2]), st.integers(0, 3)),
    st.tuples(st.integers(0, 2), st.integers(0, 999)),
)
