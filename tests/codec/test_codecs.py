from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvtide.block import BlockLayout, KVDtype
from kvtide.codec import Codec, CodecRegistry, LosslessCodec
from kvtide.codec.base import RawCodec
from kvtide.codec.published import CachegenCodec, ChunkwiseCodec, SnippetCodec
from kvtide.codec.registry import _KINDS
from kvtide.errors import CorruptPayload
from kvtide.testing import block_meta, smooth_bits
from kvtide.testing.codec_suite import CodecSuite
from kvtide.types import Section, SectionId, SectionKind
from kvtide.wire import pack_object, parse_object

GOLDEN = Path(__file__).parent.parent / "golden"
LAYOUT = BlockLayout(layers=2, tokens=16, kv_heads=2, head_dim=8, dtype=KVDtype.BFLOAT16)


class TestRaw(CodecSuite):
    codec = RawCodec()


class TestLossless(CodecSuite):
    codec = LosslessCodec()


class TestCachegen(CodecSuite):
    codec = CachegenCodec()


class TestCachegenPrefix(CodecSuite):
    codec = CachegenCodec(level=1, coder=1)


class TestSnippet(CodecSuite):
    codec = SnippetCodec()


def test_the_snippet_keeps_anchors_finer_than_differences_of_later_layers() -> None:
    layout = BlockLayout(layers=25, tokens=20, kv_heads=2, head_dim=8, dtype=KVDtype.FLOAT32)
    meta, bits = block_meta(layout), smooth_bits(layout, 5)
    out = np.empty_like(bits)
    SnippetCodec().decode(meta, SnippetCodec().encode(meta, bits), out)
    values, found = bits.view(np.float32), out.view(np.float32)
    anchors = values[:, :, ::5]
    assert np.abs(found[:, :, ::5] - anchors).max() <= np.abs(anchors).max() / 63
    differences = values.reshape(25, 2, 4, 5, -1) - anchors.reshape(25, 2, 4, 1, -1)
    error = np.abs(found - values).reshape(25, 2, 4, 5, -1)[:, :, :, 1:]
    largest = np.abs(differences).max(axis=-1)[:, :, :, 1:, None]
    # Half a step of the differences, and of the anchor.
    for layer, half in ((0, 63), (3, 63), (4, 7), (23, 7), (24, 5)):
        anchor_step = np.abs(anchors[layer]).max(axis=(-2, -1)).reshape(2, 4, 1, 1) / 63
        assert (error[layer] <= 0.51 * (largest[layer] / half + anchor_step) + 1e-6).all()


@pytest.mark.parametrize("stranger", [(SectionKind.DATA, 0), (SectionKind.ANCHOR, 1), (SectionKind.DELTA, 2)])
def test_the_snippet_refuses_sections_of_others(stranger: tuple[SectionKind, int]) -> None:
    meta, bits = block_meta(LAYOUT), smooth_bits(LAYOUT, 5)
    sections = [*SnippetCodec().encode(meta, bits), Section(SectionId(*stranger, 0, 1), b"x")]
    with pytest.raises(CorruptPayload, match="neither anchors nor differences"):
        SnippetCodec().decode(meta, sections, np.empty_like(bits))


@pytest.mark.parametrize("dtype", list(KVDtype))
def test_the_snippet_makes_no_infinity_of_the_largest_values(dtype: KVDtype) -> None:
    largest = {KVDtype.FLOAT32: 0x7F7FFFFF, KVDtype.FLOAT16: 0x7BFF, KVDtype.BFLOAT16: 0x7F7F}[dtype]
    infinity = {KVDtype.FLOAT32: 0x7F800000, KVDtype.FLOAT16: 0x7C00, KVDtype.BFLOAT16: 0x7F80}[dtype]
    layout = BlockLayout(layers=5, tokens=10, kv_heads=1, head_dim=8, dtype=dtype)
    bits = np.full(layout.shape, largest // 2, dtype=layout.bits_dtype)
    bits[:, :, 1::5] = largest
    meta, out = block_meta(layout), np.empty_like(bits)
    SnippetCodec().decode(meta, SnippetCodec().encode(meta, bits), out)
    assert (out < infinity).all()


class TestChunkwise(CodecSuite):
    codec = ChunkwiseCodec()


class TestChunkwisePrefix(CodecSuite):
    codec = ChunkwiseCodec(level=1, coder=1)


def golden_codecs() -> list[Codec]:
    return [RawCodec(), CachegenCodec(), CachegenCodec(level=1, coder=1), ChunkwiseCodec(), ChunkwiseCodec(level=1)]


@pytest.mark.parametrize("position", range(5))
def test_golden_bytes_are_still_written_and_read(position: int) -> None:
    codec, path = golden_codecs()[position], GOLDEN / f"codec-{position}.kvt"
    meta, bits = block_meta(LAYOUT), smooth_bits(LAYOUT, 5)
    assert bytes(pack_object(meta, codec.codec_id, codec.encode(meta, bits))) == path.read_bytes()
    out, twin = np.empty_like(bits), np.empty_like(bits)
    codec.decode(meta, parse_object(path.read_bytes()).sections(), out)
    codec.decode(meta, codec.encode(meta, bits), twin)
    assert np.array_equal(out, twin)


def test_registry_makes_and_finds_codecs() -> None:
    registry = CodecRegistry()
    for name in _KINDS:
        made = registry.make(name)
        found = registry.get(made.codec_id, made.profile)
        assert found is not None and found.codec_id == made.codec_id
    assert registry.get("raw-99", None) is None
    assert registry.get("cachegen-2", b"p" * 32) is None
    assert registry.get("raw-2", b"p" * 32) is None


BAD_SPECS = "zip cachegen:9 cachegen:0 cachegen:1:zip cachegen:x raw:1 lossless:1 a:1:rans:2 tide:x tide:0 tide:1e-3:9"


@pytest.mark.parametrize("spec", ["", *BAD_SPECS.split(), "tide:1e-3:x"])
def test_bad_codec_spec_is_refused(spec: str) -> None:
    with pytest.raises(ValueError, match=r"codec|level"):
        CodecRegistry().make(spec)
