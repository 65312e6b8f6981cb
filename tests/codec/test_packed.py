"""Packed blocks: exact whatever the order, rough where chunks are missing; what all codecs promise."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.codec.tide_profiles import LAYOUT, fitted
from tests.suites import block_meta, smooth_bits
from tests.suites.codec_suite import CodecSuite, decoded_by

from kvtide.block import BlockBits, BlockLayout, KVDtype
from kvtide.codec import Codec, CodecRegistry, LosslessCodec, Profile
from kvtide.codec.base import RawCodec
from kvtide.codec.packed import ImpressCodec, PackedCodec
from kvtide.codec.published import CachegenCodec, ChunkwiseCodec, SnippetCodec
from kvtide.codec.registry import _KINDS
from kvtide.errors import CorruptPayload, UnencodableBlock
from kvtide.importance import packing_orders
from kvtide.types import Section, SectionId, SectionKind
from kvtide.wire import object_bytes_max, pack_object, parse_object

GOLDEN = Path(__file__).parent.parent / "golden"
CODEC = PackedCodec(fitted(LAYOUT), 1e-2, 12)
META, BITS = block_meta(LAYOUT, 0, 1), smooth_bits(LAYOUT, 77)
SECTIONS = CODEC.encode(META, BITS)
BACKWARDS = np.tile(np.arange(LAYOUT.tokens, dtype=np.uint16)[::-1], (LAYOUT.layers, 1))
CHUNKS = [section for section in SECTIONS if section.id.refinement]
BASES = SECTIONS[: len(SECTIONS) - len(CHUNKS)]


def decoded(sections: list[Section]) -> BlockBits:
    return decoded_by(CODEC, META, sections)


def orders_of(seed: int) -> np.ndarray:
    return packing_orders(np.random.default_rng(seed).random((LAYOUT.layers, LAYOUT.tokens), dtype=np.float32))


@given(st.lists(st.integers(0, 1000), max_size=3))
@settings(max_examples=20, deadline=None)
def test_a_block_is_exact_however_often_it_was_packed_anew(seeds: list[int]) -> None:
    sections = SECTIONS
    for seed in seeds:
        sections = CODEC.repack(META, sections, orders_of(seed))
    packed = pack_object(META, CODEC.codec_id, sections, CODEC.profile)
    assert len(packed) <= object_bytes_max(LAYOUT)
    assert np.array_equal(decoded(parse_object(packed, META.id).sections()), BITS)
    assert CODEC.layout_of(META, sections).repacks == len(seeds)


@given(st.sets(st.integers(0, len(CHUNKS) - 1)), st.integers(0, 1000))
@settings(max_examples=20, deadline=None)
def test_tokens_of_chunks_that_are_here_are_exact_the_rest_is_the_base(here: set[int], seed: int) -> None:
    sections = CODEC.repack(META, SECTIONS, orders_of(seed))
    chunks = [section for section in sections if section.id.refinement]
    rough, base = decoded(sections[: len(BASES)]), CODEC.layout_of(META, sections)
    for chunk in (chunks[i] for i in here):
        tokens = base.chunk(chunk.id.layer_start, chunk.id.refinement - 1)
        rough[chunk.id.layer_start][:, tokens] = BITS[chunk.id.layer_start][:, tokens]
    assert np.array_equal(decoded([*sections[: len(BASES)], *(chunks[i] for i in here)]), rough)


def test_damaged_sections_are_refused() -> None:
    base = bytearray(BASES[0].data)
    base[4:6] = base[6:8]
    for bad in (
        SECTIONS[1:],
        [*BASES, CHUNKS[0], CHUNKS[0]],
        [*BASES, CHUNKS[0]._replace(data=CHUNKS[0].data[:-1])],
        [*BASES, CHUNKS[0]._replace(id=CHUNKS[0].id._replace(refinement=99))],
        [BASES[0]._replace(data=bytes(base)), *SECTIONS[1:]],
        [BASES[0]._replace(data=b"12"), *SECTIONS[1:]],
        [BASES[0]._replace(data=b"\0\0" + bytes(BASES[0].data[2:])), *SECTIONS[1:]],
    ):
        with pytest.raises(CorruptPayload):
            decoded(bad)


def test_what_can_not_be_packed_is_refused() -> None:
    with pytest.raises(CorruptPayload, match="missing"):
        CODEC.repack(META, SECTIONS[:-1], orders_of(0))
    with pytest.raises(ValueError, match="order"):
        CODEC.repack(META, SECTIONS, np.zeros((LAYOUT.layers, LAYOUT.tokens), dtype=np.uint16))
    with pytest.raises(UnencodableBlock):
        PackedCodec().encode(META, BITS)
    with pytest.raises(ValueError, match="chunk"):
        PackedCodec(fitted(LAYOUT), 1e-2, 0)


def test_the_registry_makes_it_and_reads_whole_blocks_without_a_profile() -> None:
    registry = CodecRegistry([])
    codec: Any = registry.get("packed-1", None)
    assert np.array_equal(decoded_by(codec, META, SECTIONS), BITS)
    for bad in ("packed:x", "packed:0.01:0"):
        with pytest.raises(ValueError, match="packed"):
            registry.make(bad)


def test_golden_bytes_are_still_written_and_read() -> None:
    """Packed anew once, tokens from the last to the first: mapping lists are there, and chunks of unequal length."""
    profile = Profile.parse((GOLDEN / "tide.kvprofile").read_bytes())
    codec, stored = PackedCodec(profile, 1e-2, 12), (GOLDEN / "packed.kvt").read_bytes()
    sections = codec.repack(META, codec.encode(META, BITS), BACKWARDS)
    assert bytes(pack_object(META, codec.codec_id, sections, codec.profile)) == stored
    reader = CodecRegistry([profile]).get("packed-1", profile.digest)
    assert isinstance(reader, PackedCodec)
    assert np.array_equal(decoded_by(reader, META, parse_object(stored).sections()), BITS)
    base = reader.layout_of(META, parse_object(stored).sections())
    assert (base.chunk_tokens, base.repacks) == (12, 1) and np.array_equal(base.orders, BACKWARDS)


@given(st.integers(1, LAYOUT.kv_heads), st.integers(0, 1000), st.data())
@settings(max_examples=10, deadline=None)
def test_keys_that_lie_apart_and_chunks_are_the_block(kv_heads: int, seed: int, data: st.DataObject) -> None:
    codec = ImpressCodec(kv_heads, 12)
    sections = codec.ordered(orders_of(seed)).encode(META, BITS)
    assert len(pack_object(META, codec.codec_id, sections)) <= LAYOUT.raw_bytes + 200 * len(sections) + 4096
    bases = [section for section in sections if not section.id.refinement]
    chunks = [section for section in sections if section.id.refinement]
    here = data.draw(st.sets(st.integers(0, len(chunks) - 1)))
    out, expected = np.empty_like(BITS), np.zeros_like(BITS)
    # Whoever reads takes the heads from the object.
    reader = CodecRegistry([]).get("impress-1", None)
    assert isinstance(reader, ImpressCodec)
    reader.decode(META, bases, expected)
    base = reader.layout_of(META, bases)
    assert np.array_equal(expected[:, 0, :, :kv_heads], BITS[:, 0, :, :kv_heads]) and not expected[:, 1].any()
    for chunk in (chunks[i] for i in here):
        tokens = base.chunk(chunk.id.layer_start, chunk.id.refinement - 1)
        expected[chunk.id.layer_start][:, tokens] = BITS[chunk.id.layer_start][:, tokens]
    reader.decode(META, [*bases, *(chunks[i] for i in here)], out)
    assert np.array_equal(out, expected)
    again = reader.repack(META, sections, orders_of(seed + 1))
    reader.decode(META, again, out)
    assert np.array_equal(out, BITS)


def test_probe_keys_that_are_cut_or_of_no_head_are_refused() -> None:
    codec, out = ImpressCodec(1, 12), np.empty_like(BITS)
    first, *rest = codec.encode(META, BITS)
    prefix, keys = 4 + 2 * LAYOUT.tokens, bytes(first.data)
    for bad in (
        first._replace(data=keys[:-1]),
        first._replace(data=keys[:prefix]),
        first._replace(data=keys[:prefix] + b"\0\0" + keys[prefix + 2 :]),
        first._replace(data=keys[:prefix] + b"\xff\0" + keys[prefix + 2 :]),
    ):
        with pytest.raises(CorruptPayload):
            codec.decode(META, [bad, *rest], out)
    with pytest.raises(CorruptPayload):
        codec.decode(META, [first, *rest[:-1], rest[-1]._replace(data=rest[-1].data[:-1])], out)
    with pytest.raises(ValueError, match="impress"):
        CodecRegistry([]).make("impress:0")
    with pytest.raises(UnencodableBlock, match="impress"):
        CodecRegistry([]).make("impress:99", LAYOUT).encode(META, BITS)


def test_golden_bytes_of_keys_apart_are_still_written_and_read() -> None:
    codec, stored = ImpressCodec(1, 12), (GOLDEN / "impress.kvt").read_bytes()
    assert bytes(pack_object(META, codec.codec_id, codec.ordered(BACKWARDS).encode(META, BITS))) == stored
    assert np.array_equal(decoded_by(codec, META, parse_object(stored).sections()), BITS)


SUITE_LAYOUT = BlockLayout(layers=2, tokens=16, kv_heads=2, head_dim=8, dtype=KVDtype.BFLOAT16)
SUITES: dict[str, Codec] = {
    "TestRaw": RawCodec(),
    "TestLossless": LosslessCodec(),
    "TestCachegen": CachegenCodec(),
    "TestCachegenPrefix": CachegenCodec(level=1, coder=1),
    "TestSnippet": SnippetCodec(),
    "TestChunkwise": ChunkwiseCodec(),
    "TestChunkwisePrefix": ChunkwiseCodec(level=1, coder=1),
}
globals().update({name: type(name, (CodecSuite,), {"codec": codec}) for name, codec in SUITES.items()})


def test_the_snippet_keeps_anchors_finer_than_differences_of_later_layers() -> None:
    layout = BlockLayout(layers=25, tokens=20, kv_heads=2, head_dim=8, dtype=KVDtype.FLOAT32)
    meta, bits = block_meta(layout), smooth_bits(layout, 5)
    out = decoded_by(SnippetCodec(), meta, SnippetCodec().encode(meta, bits))
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
    meta, bits = block_meta(SUITE_LAYOUT), smooth_bits(SUITE_LAYOUT, 5)
    sections = [*SnippetCodec().encode(meta, bits), Section(SectionId(*stranger, 0, 1), b"x")]
    with pytest.raises(CorruptPayload, match="neither anchors nor differences"):
        SnippetCodec().decode(meta, sections, np.empty_like(bits))


GOLDEN_CODECS = (RawCodec(), CachegenCodec(), CachegenCodec(1, coder=1), ChunkwiseCodec(), ChunkwiseCodec(level=1))


@pytest.mark.parametrize(("position", "codec"), list(enumerate(GOLDEN_CODECS)))
def test_golden_bytes_of_every_codec_are_still_written_and_read(position: int, codec: Codec) -> None:
    path = GOLDEN / f"codec-{position}.kvt"
    meta, bits = block_meta(SUITE_LAYOUT), smooth_bits(SUITE_LAYOUT, 5)
    assert bytes(pack_object(meta, codec.codec_id, codec.encode(meta, bits))) == path.read_bytes()
    found = decoded_by(codec, meta, parse_object(path.read_bytes()).sections())
    assert np.array_equal(found, decoded_by(codec, meta, codec.encode(meta, bits)))


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
