from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtide import _native
from kvtide.block import BlockLayout, KVDtype
from kvtide.codec import Codec, CodecRegistry, LosslessCodec, RawCodec, default_registry
from kvtide.testing.codec_suite import CodecSuite
from kvtide.testing.strategies import block_bits, block_meta, smooth_bits

GOLDEN = Path(__file__).parent.parent / "golden"
LAYOUT = BlockLayout(layers=2, tokens=16, kv_heads=2, head_dim=8, dtype=KVDtype.BFLOAT16)


class TestRaw(CodecSuite):
    codec = RawCodec()


class TestLossless(CodecSuite):
    codec = LosslessCodec()


@pytest.mark.parametrize("codec", [RawCodec(), LosslessCodec()], ids=lambda codec: codec.codec_id)
def test_golden_bytes_still_decode(codec: Codec) -> None:
    bits, out = smooth_bits(LAYOUT, 5), np.empty(LAYOUT.shape, LAYOUT.bits_dtype)
    whole = (GOLDEN / f"{codec.codec_id}.kvt").read_bytes()
    from kvtide.wire import parse_object

    codec.decode(block_meta(LAYOUT), parse_object(whole).sections(), out)
    assert np.array_equal(out, bits)


@pytest.mark.parametrize("dtype", list(KVDtype))
def test_lossless_makes_normal_values_smaller(dtype: KVDtype) -> None:
    layout = BlockLayout(layers=1, tokens=64, kv_heads=4, head_dim=32, dtype=dtype)
    size = sum(len(s.data) for s in LosslessCodec().encode(block_meta(layout), smooth_bits(layout, 1)))
    assert size < 0.93 * layout.raw_bytes


@pytest.mark.parametrize("item_bytes", [2, 4])
def test_planes_are_those_of_the_plain_twin(item_bytes: int) -> None:
    dtype = KVDtype.FLOAT32 if item_bytes == 4 else KVDtype.FLOAT16
    words: Any = block_bits(BlockLayout(1, 3, 5, 7, dtype), 2).reshape(-1)
    width = 8 * item_bytes
    rotated = (words << 1) | (words >> (width - 1))
    twin = np.concatenate([((rotated >> shift) & 255).astype(np.uint8) for shift in range(width - 8, -1, -8)])
    planes, back = np.empty(words.nbytes, np.uint8), np.empty(words.nbytes, np.uint8)
    _native.split_planes(words.view(np.uint8), item_bytes, planes)
    _native.join_planes(planes, item_bytes, back)
    assert np.array_equal(planes, twin)
    assert np.array_equal(back, words.view(np.uint8))


def test_native_kernels_refuse_bad_sizes() -> None:
    buffer = np.zeros(12, np.uint8)
    for item_bytes, other in ((3, buffer), (2, buffer[:10]), (8, buffer)):
        with pytest.raises(ValueError, match="planes"):
            _native.split_planes(buffer, item_bytes, other.copy())
        with pytest.raises(ValueError, match="planes"):
            _native.join_planes(buffer, item_bytes, other.copy())
    with pytest.raises(TypeError):
        _native.split_planes(buffer.astype(np.float32), 2, buffer)  # type: ignore[arg-type]


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
