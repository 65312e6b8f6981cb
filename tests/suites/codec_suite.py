"""Conformance of a codec. Inherit, set `codec`, add goldens.

class TestRaw(CodecSuite):
    codec = RawCodec()
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtide.block import BlockBits, BlockLayout, BlockMeta, KVDtype
from kvtide.codec import Codec
from kvtide.errors import CorruptPayload, UnencodableBlock
from kvtide.types import Section
from kvtide.wire import object_bytes_max, pack_object, parse_object
from tests.suites import block_bits, block_meta, layouts, smooth_bits

# A suite is inherited: one property runs on several classes, which is what this health check warns of.
_SHARED = (HealthCheck.differing_executors,)
_LAYOUT = BlockLayout(layers=3, tokens=16, kv_heads=2, head_dim=8, dtype=KVDtype.BFLOAT16)
_META, _BITS = block_meta(_LAYOUT), smooth_bits(_LAYOUT, 1)


def decoded_by(codec: Codec, meta: BlockMeta, sections: Sequence[Section]) -> BlockBits:
    out = np.empty(meta.layout.shape, meta.layout.bits_dtype)
    codec.decode(meta, sections, out)
    return out


class CodecSuite:
    codec: Codec

    def codec_for(self, layout: BlockLayout) -> Codec:
        """Return the codec for blocks of a layout: another one where the codec needs a profile of the model's shape."""
        return self.codec

    @given(layout=layouts(), seed=st.integers(0, 2**32), is_smooth=st.booleans())
    @settings(max_examples=60, deadline=None, suppress_health_check=_SHARED)
    def test_block_survives_object_round_trip(self, layout: BlockLayout, seed: int, is_smooth: bool) -> None:
        codec = self.codec_for(layout)
        bits = (smooth_bits if is_smooth or not codec.is_lossless else block_bits)(layout, seed)
        meta = block_meta(layout, seed % 1000)
        try:
            packed = pack_object(meta, codec.codec_id, codec.encode(meta, bits))
        except UnencodableBlock:
            assert not codec.is_lossless
            return
        assert len(packed) <= object_bytes_max(layout)
        out = decoded_by(codec, meta, parse_object(packed, meta.id).sections())
        if codec.is_lossless:
            assert np.array_equal(out, bits)

    @pytest.mark.parametrize("fill", [0x0000, 0x8000, 0x7F80, 0x7FC1, 0xFFFF, 0x0001])
    def test_constant_block_survives(self, fill: int) -> None:
        bits: Any = np.full(_LAYOUT.shape, fill, dtype=_LAYOUT.bits_dtype)
        try:
            sections = self.codec.encode(_META, bits)
        except UnencodableBlock:
            assert not self.codec.is_lossless
            return
        assert self.codec.is_lossless or fill & 0x7F80 != 0x7F80, "not finite"
        assert np.array_equal(decoded_by(self.codec, _META, sections), bits) or not self.codec.is_lossless

    def test_sections_decode_in_any_order(self) -> None:
        sections = self.codec.encode(_META, _BITS)
        ordered, reversed_ = (decoded_by(self.codec, _META, each) for each in (sections, sections[::-1]))
        assert np.array_equal(ordered, reversed_)

    def test_encoding_twice_gives_same_bytes(self) -> None:
        first, second = self.codec.encode(_META, _BITS), self.codec.encode(_META, _BITS)
        assert [(s.id, bytes(s.data)) for s in first] == [(s.id, bytes(s.data)) for s in second]

    def test_missing_or_repeated_section_is_refused(self) -> None:
        sections = self.codec.encode(_META, _BITS)
        for wrong in (sections[1:], [*sections, sections[0]]):
            with pytest.raises(CorruptPayload):
                decoded_by(self.codec, _META, wrong)

    @given(data=st.data())
    @settings(max_examples=200, deadline=None, suppress_health_check=_SHARED)
    def test_damaged_section_is_refused_or_decoded_never_crashes(self, data: st.DataObject) -> None:
        sections = self.codec.encode(_META, _BITS)
        damaged = bytearray(sections[0].data)
        for _ in range(data.draw(st.integers(1, 4))):
            position = data.draw(st.integers(0, max(0, len(damaged) - 1)))
            damaged[position : position + 1] = data.draw(st.binary(max_size=3))
        sections[0] = Section(sections[0].id, bytes(damaged))
        try:
            out = decoded_by(self.codec, _META, sections)
        except CorruptPayload:
            return
        # Without a checksum a codec can't know; the layers that were not touched must be right all the same.
        if self.codec.is_lossless:
            assert np.array_equal(out[1:], _BITS[1:])

    def test_every_truncation_is_refused(self) -> None:
        sections = self.codec.encode(_META, _BITS)
        whole = bytes(sections[-1].data)
        for length in range(0, len(whole), max(1, len(whole) // 64)):
            cut = [*sections[:-1], Section(sections[-1].id, whole[:length])]
            with pytest.raises(CorruptPayload):
                decoded_by(self.codec, _META, cut)

    def test_wrong_shape_type_or_order_is_a_value_error(self) -> None:
        sections = self.codec.encode(_META, _BITS)
        wrong: list[Any] = [_BITS[1:], _BITS.astype(np.uint32), np.asfortranarray(_BITS), _BITS.astype(np.float32)]
        for array in wrong:
            with pytest.raises(ValueError, match="block bits must"):
                self.codec.encode(_META, array)
            with pytest.raises(ValueError, match="block bits must"):
                self.codec.decode(_META, sections, array)
