from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvtide.block import BlockLayout, KVDtype
from kvtide.codec import Codec, CodecRegistry, LosslessCodec, RawCodec, default_registry
from kvtide.codec.cachegen import CachegenCodec
from kvtide.codec.chunkwise import ChunkwiseCodec
from kvtide.testing.codec_suite import CodecSuite
from kvtide.testing.strategies import block_meta, smooth_bits
from kvtide.wire import pack_object, parse_object

GOLDEN = Path(__file__).parent.parent / "golden"
LAYOUT = BlockLayout(layers=2, tokens=16, kv_heads=2, head_dim=8, dtype=KVDtype.BFLOAT16)


class TestRaw(CodecSuite):
    codec = RawCodec()


class TestLossless(CodecSuite):
    codec = LosslessCodec()


class TestCachegen(CodecSuite):
    codec = CachegenCodec()
    is_lossless = False


class TestCachegenPrefix(CodecSuite):
    codec = CachegenCodec(level=1, coder=1)
    is_lossless = False


class TestChunkwise(CodecSuite):
    codec = ChunkwiseCodec()
    is_lossless = False


class TestChunkwisePrefix(CodecSuite):
    codec = ChunkwiseCodec(level=1, coder=1)
    is_lossless = False


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


@pytest.mark.parametrize("dtype", list(KVDtype))
def test_lossless_makes_normal_values_smaller(dtype: KVDtype) -> None:
    layout = BlockLayout(layers=1, tokens=64, kv_heads=4, head_dim=32, dtype=dtype)
    size = sum(len(s.data) for s in LosslessCodec().encode(block_meta(layout), smooth_bits(layout, 1)))
    assert size < 0.93 * layout.raw_bytes


def test_registry_finds_by_id_and_by_name() -> None:
    registry = default_registry()
    assert registry.get("raw-1") is registry.by_name("raw")
    assert registry.get("raw-99") is None
    assert "lossless" in registry.names()


def test_unknown_codec_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="lossless, raw"):
        default_registry().by_name("zip")


def test_two_codecs_of_one_id_are_refused() -> None:
    with pytest.raises(ValueError, match="raw-1"):
        CodecRegistry([RawCodec(), RawCodec()])
