"""CacheGen's anchors and deltas apart: which tokens are exact with which sections."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.block import BlockLayout, KVDtype
from kvtide.codec.published import CachegenCodec
from kvtide.codec.published.cachegen import GROUP_TOKENS, delta_layers
from kvtide.errors import CorruptPayload
from kvtide.testing import block_meta, layouts, smooth_bits
from kvtide.types import Section, SectionKind

LAYOUT = BlockLayout(layers=3, tokens=27, kv_heads=2, head_dim=8, dtype=KVDtype.FLOAT32)
CODECS = [CachegenCodec(), CachegenCodec(level=1, coder=1)]


def encoded(codec: CachegenCodec, layout: BlockLayout, seed: int) -> list[Section]:
    return codec.encode(block_meta(layout), smooth_bits(layout, seed))


def decoded(codec: CachegenCodec, layout: BlockLayout, sections: list[Section]) -> Any:
    out = np.empty(layout.shape, layout.bits_dtype)
    codec.decode(block_meta(layout), sections, out)
    return out


@given(layout=layouts(), seed=st.integers(0, 2**32), codec=st.sampled_from(CODECS), data=st.data())
@settings(max_examples=150, deadline=None)
def test_positions_that_are_here_are_exact_and_the_others_take_their_anchor(
    layout: BlockLayout, seed: int, codec: CachegenCodec, data: st.DataObject
) -> None:
    sections = encoded(codec, layout, seed)
    here = data.draw(st.sets(st.integers(1, GROUP_TOKENS - 1)))
    some = [section for section in sections if section.id.refinement in here | {0}]
    whole, part = decoded(codec, layout, sections), decoded(codec, layout, some)
    for token in range(layout.tokens):
        position = token % GROUP_TOKENS
        source = token if position in here else token - position
        assert np.array_equal(part[:, :, token], whole[:, :, source])


def test_anchors_come_first_and_each_position_has_its_refinement() -> None:
    ids = [section.id for section in encoded(CODECS[0], LAYOUT, 1)]
    assert [section.kind for section in ids[:3]] == [SectionKind.ANCHOR] * 3
    assert [section.refinement for section in ids[3:]] == list(range(1, GROUP_TOKENS))
    assert {(id_.kind, id_.layer_start, id_.layer_stop) for id_ in ids[3:]} == {(SectionKind.DELTA, 0, 3)}


@pytest.mark.parametrize(
    ("kv_heads", "head_dim", "tokens", "layers", "expected"),
    [(3, 64, 256, 30, 10), (8, 128, 256, 32, 2), (40, 128, 256, 40, 1), (8, 128, 8, 32, 32), (1, 1, 1, 4096, 4096)],
)
def test_small_layers_share_sections(kv_heads: int, head_dim: int, tokens: int, layers: int, expected: int) -> None:
    ranges = delta_layers(BlockLayout(layers, tokens, kv_heads, head_dim, KVDtype.BFLOAT16))
    assert max(map(len, ranges)) == expected
    assert [layer for layers_ in ranges for layer in layers_] == list(range(layers))


@pytest.mark.parametrize("missing", range(3))
def test_anchor_that_is_missing_is_refused(missing: int) -> None:
    sections = encoded(CODECS[0], LAYOUT, 1)
    with pytest.raises(CorruptPayload, match="anchors of 3 layers"):
        decoded(CODECS[0], LAYOUT, sections[:missing] + sections[missing + 1 :])


def test_delta_of_other_layers_or_position_is_refused() -> None:
    sections = encoded(CODECS[0], LAYOUT, 1)
    for change in ({"layer_stop": 2}, {"refinement": 10}, {"kind": SectionKind.DATA}):
        wrong = Section(sections[-1].id._replace(**change), sections[-1].data)
        with pytest.raises(CorruptPayload, match="sections of deltas"):
            decoded(CODECS[0], LAYOUT, [*sections[:-1], wrong])


@pytest.mark.parametrize("other", [CachegenCodec(level=2), CachegenCodec(level=3, coder=1)])
def test_layers_of_different_levels_or_coders_are_refused(other: CachegenCodec) -> None:
    sections = encoded(CODECS[0], LAYOUT, 1)
    sections[1] = encoded(other, LAYOUT, 1)[1]
    with pytest.raises(CorruptPayload, match="do not agree"):
        decoded(CODECS[0], LAYOUT, sections)


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [(0, 9, "level 9"), (1, 2, "coder 2"), (2, 1, "level 3"), (7, 0xFF, "steps"), (14, 0xFF, "bytes of dist")],
)
def test_each_wrong_field_of_an_anchor_section_is_refused(offset: int, value: int, message: str) -> None:
    sections = encoded(CODECS[0], LAYOUT, 1)
    damaged = bytearray(sections[0].data)
    damaged[offset] = value
    sections[0] = Section(sections[0].id, damaged)
    with pytest.raises(CorruptPayload, match=message):
        decoded(CODECS[0], LAYOUT, sections)
