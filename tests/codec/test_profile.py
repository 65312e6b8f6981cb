from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.block import BlockLayout, KVDtype
from kvtide.codec import CodecRegistry, Profile
from kvtide.codec.published import CachegenCodec, ChunkwiseCodec
from kvtide.codec.published.cachegen import ProfileFitter
from kvtide.errors import CorruptPayload, UnencodableBlock
from kvtide.testing import block_meta, smooth_bits
from kvtide.types import Section
from kvtide.wire import pack_object, parse_object

LAYOUT = BlockLayout(layers=3, tokens=32, kv_heads=2, head_dim=8, dtype=KVDtype.FLOAT32)
MAKERS: dict[str, Any] = {"cachegen": CachegenCodec, "chunkwise": ChunkwiseCodec}


def fitted(kind: str, layout: BlockLayout = LAYOUT) -> Profile:
    fitter = ProfileFitter(kind, "made up", layout)
    blocks = [smooth_bits(layout, seed) for seed in range(4)]
    fitter.scale(blocks)
    for bits in blocks:
        fitter.add(bits)
    return fitter.profile(texts=2)


@pytest.mark.parametrize("kind", ProfileFitter.KINDS)
@pytest.mark.parametrize("coder", [0, 1])
def test_shared_tables_make_objects_smaller_and_change_nothing(kind: str, coder: int) -> None:
    profile, meta, bits = fitted(kind), block_meta(LAYOUT), smooth_bits(LAYOUT, 99)
    sizes = []
    for known in (None, profile):
        codec = MAKERS[kind](2, coder, known)
        packed = pack_object(meta, codec.codec_id, codec.encode(meta, bits), codec.profile)
        stored = parse_object(packed)
        reader = CodecRegistry([profile]).get(stored.codec_id, stored.profile)
        out = np.empty_like(bits)
        assert reader is not None
        reader.decode(meta, stored.sections(), out)
        assert np.abs(out.view(np.float32) - bits.view(np.float32)).max() < 0.5
        sizes.append(len(packed))
    assert sizes[1] < 0.8 * sizes[0]


@pytest.mark.parametrize("kind", ProfileFitter.KINDS)
def test_profile_survives_its_own_bytes_and_its_digest_names_it(kind: str) -> None:
    profile = fitted(kind)
    again = Profile.parse(profile.to_bytes())
    assert again.digest == profile.digest == profile.to_bytes()[-32:]
    assert (again.kind, again.model, again.texts, again.tokens) == (kind, "made up", 2, 128)
    assert fitted(kind).digest == profile.digest


def test_object_of_an_unknown_profile_is_not_decoded() -> None:
    assert CodecRegistry([]).get("cachegen-2", fitted("cachegen").digest) is None


def test_profile_of_another_kind_or_shape_is_not_chosen() -> None:
    registry = CodecRegistry([fitted("cachegen")])
    assert registry.make("cachegen", LAYOUT).profile is not None
    assert registry.make("chunkwise", LAYOUT).profile is None
    other = BlockLayout(layers=4, tokens=32, kv_heads=2, head_dim=8, dtype=KVDtype.FLOAT32)
    assert registry.make("cachegen", other).profile is None
    codec = CachegenCodec(2, 0, fitted("cachegen"))
    with pytest.raises(UnencodableBlock, match="made up"):
        codec.encode(block_meta(other), smooth_bits(other, 1))


def test_profile_of_another_kind_gives_a_refusal_not_garbage() -> None:
    codec = ChunkwiseCodec(2, 0, fitted("cachegen"))
    with pytest.raises(CorruptPayload, match="no distributions"):
        codec.encode(block_meta(LAYOUT), smooth_bits(LAYOUT, 1))


@given(position=st.integers(0, 10**7), bit=st.integers(0, 7))
@settings(max_examples=100, deadline=None)
def test_flipped_bit_of_a_profile_is_found(position: int, bit: int) -> None:
    data = bytearray(WHOLE)
    data[position % len(data)] ^= 1 << bit
    with pytest.raises(CorruptPayload):
        Profile.parse(bytes(data))


WHOLE = fitted("chunkwise").to_bytes()


def test_truncated_or_foreign_profile_is_refused() -> None:
    for length in (0, 1, 40, len(WHOLE) // 2, len(WHOLE) - 1):
        with pytest.raises(CorruptPayload):
            Profile.parse(WHOLE[:length])
    with pytest.raises(CorruptPayload, match="not a profile"):
        Profile.parse(b"\x89KVTIDE\n" + bytes(200))


def signed(body: bytes) -> bytes:
    """A profile with a right digest over wrong content: what a hostile writer would make."""
    return body + hashlib.sha256(body).digest()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'"f4"', b'"O8"', "type"),
        (b'"u4"', b'"f2"', "type"),
        (b'"layers":3', b'"layers":x', "parse"),
        (b'"texts":2', b'"texxx":2', "parse"),
        (b"[3,2]", b"[9,2]", "bytes expected|behind"),
        (b"[3,2]", b"[-1]2", "parse|type"),
    ],
)
def test_forged_description_is_refused(old: bytes, new: bytes, message: str) -> None:
    body = WHOLE[:-32]
    assert old in body
    with pytest.raises(CorruptPayload, match=message):
        Profile.parse(signed(body.replace(old, new, 1)))


def test_calibration_refuses_no_blocks_and_unknown_kinds() -> None:
    with pytest.raises(ValueError, match="cachegen"):
        ProfileFitter("zip", "m", LAYOUT)
    fitter = ProfileFitter("cachegen", "m", LAYOUT)
    with pytest.raises(ValueError, match="full block"):
        fitter.scale([])
    with pytest.raises(ValueError, match="full block"):
        fitter.profile(1)


def test_damaged_shared_section_is_refused_or_decoded() -> None:
    profile, meta, bits = fitted("cachegen"), block_meta(LAYOUT), smooth_bits(LAYOUT, 99)
    codec = CachegenCodec(2, 0, profile)
    sections = codec.encode(meta, bits)
    rng = np.random.default_rng(1)
    out, whole = np.empty_like(bits), np.empty_like(bits)
    codec.decode(meta, sections, whole)
    refused = changed = 0
    for _ in range(200):
        damaged = bytearray(sections[1].data)
        damaged[rng.integers(len(damaged))] ^= 1 << rng.integers(8)
        try:
            codec.decode(meta, [sections[0], Section(sections[1].id, bytes(damaged)), *sections[2:]], out)
        except CorruptPayload:
            refused += 1
        else:
            changed += not np.array_equal(out, whole)
    # A bit of an escape that no value takes changes nothing.
    assert refused > 100 and changed > 10, (refused, changed)
