"""What codec and layout, and codec and profile, owe each other: values that the dtype holds, and blocks that fit."""

from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.codec.tide_profiles import fitted
from tests.suites import block_meta, smooth_bits

from kvtide import _native
from kvtide.block import BlockBits, BlockLayout, KVDtype
from kvtide.codec import Codec
from kvtide.codec.packed import PackedCodec
from kvtide.codec.published import CachegenCodec, ChunkwiseCodec, SnippetCodec
from kvtide.codec.tide import TideCodec
from kvtide.engines import installed_profiles
from kvtide.errors import UnencodableBlock

FLOAT16, BFLOAT16, FLOAT32 = KVDtype.FLOAT16, KVDtype.BFLOAT16, KVDtype.FLOAT32
LARGEST = {FLOAT16: 0x7BFF, BFLOAT16: 0x7F7F, FLOAT32: 0x7F7FFFFF}
SIGN = {FLOAT16: 0x8000, BFLOAT16: 0x8000, FLOAT32: 0x80000000}
SHAPES = [(1, 1, 1, 2), (2, 12, 2, 8), (5, 23, 1, 6)]


@cache
def codecs(layout: BlockLayout) -> list[Codec]:
    """Every lossy codec, the profiles made for values near one."""
    plain = BlockLayout(layout.layers, layout.tokens, layout.kv_heads, layout.head_dim, FLOAT32)
    published = [CachegenCodec(level, coder) for level in (1, 2, 3, 4) for coder in (0, 1)]
    tides = [TideCodec(fitted(plain, cost, 2), 1e-2, 1) for cost in ("light", "layer")]
    return [*published, SnippetCodec(), *map(ChunkwiseCodec, (1, 2, 3)), *tides, PackedCodec(fitted(plain, "layer", 2))]


def decoded(codec: Codec, layout: BlockLayout, bits: BlockBits, position: int = 0) -> BlockBits | None:
    """What comes back; None if the codec says that it can't keep the block."""
    meta, out = block_meta(layout, 0, position), np.empty_like(bits)
    try:
        sections = codec.encode(meta, bits)
    except UnencodableBlock:
        return None
    if isinstance(codec, PackedCodec):
        sections = [section for section in sections if section.id.refinement == 0]
    codec.decode(meta, sections, out)
    return out


def is_finite(bits: NDArray[Any], dtype: KVDtype) -> bool:
    return bool(((bits & (SIGN[dtype] - 1)) <= LARGEST[dtype]).all())


@pytest.mark.parametrize("dtype", list(KVDtype))
@pytest.mark.parametrize("is_alternating", [False, True])
def test_blocks_at_the_end_of_the_range_come_back_finite(dtype: KVDtype, is_alternating: bool) -> None:
    layout = BlockLayout(2, 12, 2, 8, dtype)
    bits = np.full(layout.shape, LARGEST[dtype], dtype=layout.bits_dtype)
    if is_alternating:
        bits[:, :, ::2] |= SIGN[dtype]
    outs = [decoded(codec, layout, bits, position) for codec in codecs(layout) for position in (0, 3)]
    assert all(is_finite(out, dtype) for out in outs if out is not None)
    assert any(out is not None for out in outs), "every codec refused: nothing was tried"


@given(
    dtype=st.sampled_from(KVDtype),
    shape=st.sampled_from(SHAPES),
    seed=st.integers(0, 2**32),
    exponents=st.tuples(st.integers(0, 255), st.integers(0, 255)),
    position=st.sampled_from([0, 1]),
)
@settings(max_examples=60, deadline=None)
def test_finite_blocks_come_back_finite(
    dtype: KVDtype, shape: tuple[int, int, int, int], seed: int, exponents: tuple[int, int], position: int
) -> None:
    layout, rng = BlockLayout(*shape, dtype), np.random.default_rng(seed)
    # Any bit patterns whose exponents lie in a range of their own, so that blocks of one scale come too.
    bits: Any = np.frombuffer(rng.bytes(layout.raw_bytes), dtype=layout.bits_dtype).reshape(layout.shape).copy()
    mantissa_bits = {FLOAT16: 10, BFLOAT16: 7, FLOAT32: 23}[dtype]
    low, high = sorted(min(each, LARGEST[dtype] >> mantissa_bits) for each in exponents)
    drawn = rng.integers(low, high + 1, size=bits.shape).astype(bits.dtype)
    bits = (bits & (SIGN[dtype] | (1 << mantissa_bits) - 1)).astype(bits.dtype) | (drawn << mantissa_bits)
    bits = bits.astype(layout.bits_dtype)
    for codec in codecs(layout):
        out = decoded(codec, layout, bits, position)
        assert out is None or is_finite(out, dtype), codec.codec_id


@pytest.mark.parametrize("dtype", list(KVDtype))
def test_what_a_hostile_payload_makes_too_large_is_the_largest_value(dtype: KVDtype) -> None:
    scales = np.array([0x7F7F, 0x7F7F], dtype=np.uint16)
    steps = np.array([[32767, -32767]], dtype=np.int16)
    out = np.empty(2 * dtype.item_bytes, dtype=np.uint8)
    _native.restore_groups(steps, scales, np.empty((1, 0), np.int16), 1, 7, 1.0, dtype.code, out)
    found = out.view({2: np.uint16, 4: np.uint32}[dtype.item_bytes])
    assert found.tolist() == [LARGEST[dtype], LARGEST[dtype] | SIGN[dtype]]


LAYOUT = BlockLayout(15, 16, 1, 8, FLOAT32)
REAL = BlockLayout(30, 32, 3, 64, FLOAT32)
META = block_meta(LAYOUT, 0, 1)


def as_bits(values: Any) -> BlockBits:
    found: BlockBits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return found


def usual() -> Any:
    """Values as the made-up profile knows them."""
    return smooth_bits(LAYOUT, 77).view(np.float32)


UNLIKE = {
    "zeros": usual() * 0,
    "small, all alike": np.full(LAYOUT.shape, 1e-2),
    "all alike": np.full(LAYOUT.shape, 0.5),
    "denormal": np.full(LAYOUT.shape, 1e-40),
    "tiny": usual() * np.float32(1e-37),
    "a third": usual() / 3,
    "a thousand times as large": usual() * 1000,
    "one layer zero": np.where(np.arange(15)[:, None, None, None, None] == 3, 0, usual()),
}


@pytest.mark.parametrize("content", UNLIKE)
@pytest.mark.parametrize("cost", ["layer", "light"])
@pytest.mark.parametrize("packs", [False, True])
def test_a_block_that_the_profile_does_not_fit_is_refused_in_words(content: str, cost: str, packs: bool) -> None:
    profile = fitted(LAYOUT, cost)
    codec: Codec = PackedCodec(profile, 1e-2) if packs else TideCodec(profile, 1e-2, 2)
    if not packs:
        codec.encode(META, as_bits(usual()))
    with pytest.raises(UnencodableBlock, match="the profile does not fit"):
        codec.encode(META, as_bits(UNLIKE[content]))


@pytest.mark.parametrize("kind", ["tide-light", "tide-layer", "tide-deep"])
def test_noise_is_refused_by_the_profiles_that_ship(kind: str) -> None:
    profile = next(found for found in installed_profiles() if found.kind == kind)
    noise = np.random.default_rng(3).normal(size=REAL.shape)
    with pytest.raises(UnencodableBlock, match="the profile does not fit"):
        TideCodec(profile).encode(block_meta(REAL, 0, 1), as_bits(noise))


def test_values_that_a_token_kept_apart_can_not_hold_are_refused() -> None:
    values = usual().copy()
    values[0, 0, 2] = 2e38
    with pytest.raises(UnencodableBlock, match="too large"):
        TideCodec(fitted(LAYOUT), 1e-2).encode(block_meta(LAYOUT, 0, 0), as_bits(values))


@pytest.mark.parametrize("level", [1, 2, 3, 4])
@pytest.mark.parametrize("fill", [0.0, 0.3, 1e-40, 1e-37])
def test_published_codecs_keep_blocks_of_one_value_within_their_bins(level: int, fill: float) -> None:
    """Their scales are the block's own; what is too small for a scale to divide by becomes zero."""
    bits = as_bits(np.full(LAYOUT.shape, fill))
    for codec in (CachegenCodec(level), ChunkwiseCodec(min(level, 3))):
        out = decoded(codec, LAYOUT, bits)
        error = np.abs(out.view(np.float32) - bits.view(np.float32)).max()
        assert error <= max(0.01 * fill, 4e-37)
