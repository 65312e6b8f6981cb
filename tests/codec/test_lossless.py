"""lossless-2: every bit pattern survives, planes that shrink are coded, damage is refused."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.suites import bits_of, block_meta, smooth_bits
from tests.suites.codec_suite import decoded_by

from kvtide import _native
from kvtide.block import BlockBits, BlockLayout, BlockMeta, KVDtype
from kvtide.codec import LosslessCodec
from kvtide.errors import CorruptPayload
from kvtide.types import Section

GOLDEN = Path(__file__).parents[1] / "golden" / "lossless-2.txt"
CODEC = LosslessCodec()
every_dtype = pytest.mark.parametrize("dtype", list(KVDtype), ids=lambda dtype: dtype.value)


def meta_of(dtype: KVDtype, layers: int = 2, tokens: int = 64) -> BlockMeta:
    return block_meta(BlockLayout(layers, tokens, 2, 16, dtype))


def normal_bits(dtype: KVDtype, tokens: int = 64) -> BlockBits:
    return smooth_bits(meta_of(dtype, tokens=tokens).layout, 1)


def check_round_trip(meta: BlockMeta, bits: BlockBits) -> list[Section]:
    sections = CODEC.encode(meta, bits)
    assert np.array_equal(decoded_by(CODEC, meta, sections), bits)
    return sections


def stored_bytes(sections: list[Section]) -> int:
    return sum(len(section.data) for section in sections)


@every_dtype
def test_normal_values_survive_and_shrink(dtype: KVDtype) -> None:
    bits = normal_bits(dtype, tokens=256)
    sections = check_round_trip(meta_of(dtype, tokens=256), bits)
    assert stored_bytes(sections) < {"float32": 0.86, "float16": 0.90, "bfloat16": 0.73}[dtype.value] * bits.nbytes


@every_dtype
@pytest.mark.parametrize("pattern", [0, 1, 0x7F80, 0x7C00, 0x7FC1, 0x8000, 0xFFFF])
def test_a_constant_block_takes_a_few_bytes(dtype: KVDtype, pattern: int) -> None:
    meta = meta_of(dtype)
    bits = np.full(meta.layout.shape, pattern, dtype=meta.layout.bits_dtype)
    sections = check_round_trip(meta, bits)
    assert all(len(section.data) <= 9 * 4 for section in sections)


@every_dtype
def test_noise_is_stored_with_its_headers_alone(dtype: KVDtype) -> None:
    meta = meta_of(dtype, tokens=256)
    whole: Any = np.random.default_rng(2).integers(0, 2 ** (8 * dtype.item_bytes), size=meta.layout.shape)
    sections = check_round_trip(meta, whole.astype(meta.layout.bits_dtype))
    if dtype is not KVDtype.FLOAT16:
        assert stored_bytes(sections) == meta.layout.raw_bytes + meta.layout.layers * 8 * dtype.item_bytes
    else:
        assert stored_bytes(sections) <= 1.05 * meta.layout.raw_bytes


@settings(max_examples=40, deadline=None)
@given(dtype=st.sampled_from(list(KVDtype)), data=st.data())
def test_every_bit_pattern_survives(dtype: KVDtype, data: st.DataObject) -> None:
    meta = meta_of(dtype, layers=1, tokens=8)
    word = st.integers(0, 2 ** (8 * dtype.item_bytes) - 1)
    few = data.draw(st.lists(word, min_size=1, max_size=80))
    picks = np.random.default_rng(data.draw(st.integers(0, 2**32))).integers(0, len(few), size=meta.layout.shape)
    bits: Any = np.array(few, dtype=meta.layout.bits_dtype)[picks]
    check_round_trip(meta, bits)


@every_dtype
def test_rare_exponents_escape(dtype: KVDtype) -> None:
    meta = meta_of(dtype, tokens=256)
    bits = normal_bits(dtype, tokens=256).copy()
    rng = np.random.default_rng(3)
    where = rng.random(bits.shape) < 0.01
    bits[where] = rng.integers(0, 2 ** (8 * dtype.item_bytes), size=int(where.sum())).astype(bits.dtype)
    sections = check_round_trip(meta, bits)
    assert sections[0].data[0] == 2, "the first plane is coded"


def test_float32_that_holds_bfloat16_pays_about_a_bit_more_than_bfloat16() -> None:
    narrow = normal_bits(KVDtype.BFLOAT16, tokens=256)
    wide = narrow.astype(np.uint32) << np.uint32(16)
    wide_sections = check_round_trip(meta_of(KVDtype.FLOAT32, tokens=256), wide)
    narrow_sections = check_round_trip(meta_of(KVDtype.BFLOAT16, tokens=256), narrow)
    # The sign's plane is coded, the one between is constant, and the mantissa's plane wastes the bit that is always 0.
    assert stored_bytes(wide_sections) <= stored_bytes(narrow_sections) + 1.15 * wide.size / 8
    assert [wide_sections[0].data[8 * plane] for plane in range(4)] == [2, 0, 1, 2]


@every_dtype
def test_damage_is_refused_or_changes_the_block_and_every_truncation_is_corrupt(dtype: KVDtype) -> None:
    meta, bits = meta_of(dtype, layers=1, tokens=32), normal_bits(dtype, tokens=32)[:1]
    [section] = CODEC.encode(meta, bits)
    data = bytes(section.data)
    rng = np.random.default_rng(5)
    for _ in range(400):
        broken = bytearray(data)
        broken[rng.integers(len(broken))] ^= 1 << int(rng.integers(8))
        out = np.empty_like(bits)
        try:
            CODEC.decode(meta, [Section(section.id, broken)], out)
        except CorruptPayload:
            continue
        assert not np.array_equal(out, bits)
    for wrong in (*(data[:size] for size in range(len(data))), data + b"\0"):
        with pytest.raises(CorruptPayload):
            CODEC.decode(meta, [Section(section.id, wrong)], np.empty_like(bits))


@pytest.mark.parametrize("size", [0, 3, 6])
def test_no_layer_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="keys and as many values"):
        _native.lossless_encode("portable", np.zeros(size, np.uint8), "bfloat16")


def test_stored_values_wider_than_their_plane_are_corrupt() -> None:
    meta = meta_of(KVDtype.FLOAT16, layers=1)
    headers = 3 * struct.pack("<BBHI", 1, 0, 0, 1)
    out = np.empty(meta.layout.shape, np.uint16)
    [section] = CODEC.encode(meta, np.zeros(meta.layout.shape, np.uint16))
    CODEC.decode(meta, [Section(section.id, headers + b"\x1f\x07\xff")], out)
    assert (out == 0xFFFF).all()
    for bodies in (b"\x20\x07\xff", b"\x1f\x08\xff"):
        with pytest.raises(CorruptPayload, match="bits"):
            CODEC.decode(meta, [Section(section.id, headers + bodies)], out)


@every_dtype
def test_golden_bytes(dtype: KVDtype) -> None:
    # Written down and not drawn: the generator may change, the format may not.
    meta = meta_of(dtype, layers=1, tokens=128)
    index = np.arange(meta.layout.raw_bytes // dtype.item_bytes, dtype=np.float32).reshape(meta.layout.shape)
    values = (index % 97 - 48) / 64 * (1 + index % 5) + (index % 501 == 7) * 3e4
    [section] = CODEC.encode(meta, bits_of(values.astype(np.float32), dtype))
    golden = dict(line.split() for line in GOLDEN.read_text().splitlines())
    assert f"{len(section.data)}-{xxhash.xxh3_128_hexdigest(section.data)}" == golden[dtype.value]
