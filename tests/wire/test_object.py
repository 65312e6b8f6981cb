from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.suites import block_meta, namespace

from kvtide.block import BlockLayout, KVDtype
from kvtide.errors import CorruptPayload
from kvtide.types import BlockKey, ObjectId, Section, SectionId, SectionKind
from kvtide.wire import object as wire
from kvtide.wire import pack_object, parse_header, parse_object

LAYOUT = BlockLayout(layers=4, tokens=16, kv_heads=1, head_dim=2, dtype=KVDtype.FLOAT16)
META = block_meta(LAYOUT, seed=3, position=1)


def section(refinement: int, start: int, data: bytes) -> Section:
    return Section(SectionId(SectionKind.DATA, refinement, start, start + 2), data)


SECTIONS = [section(1, 0, b"finer"), section(0, 2, b"base, deep"), section(0, 0, b"base")]


def packed() -> bytearray:
    return bytearray(pack_object(META, "made-up-1", SECTIONS, profile=b"p" * 32, quality=0.005))


def test_round_trip_keeps_everything() -> None:
    stored = parse_object(packed(), META.id)
    assert stored.meta == META
    assert (stored.codec_id, stored.profile) == ("made-up-1", b"p" * 32)
    assert [bytes(found.data) for found in stored.sections()] == [b"base", b"base, deep", b"finer"]


@given(st.floats(0, 1e6))
def test_quality_comes_back_no_better_than_it_was_stored(quality: float) -> None:
    stored = parse_object(pack_object(META, "made-up-1", SECTIONS, quality=quality))
    assert quality <= stored.quality <= max(quality, 2.0**-40) * 1.0007
    assert (stored.quality == 0) == (quality == 0)


def test_leading_part_gives_header_and_leading_sections() -> None:
    whole = packed()
    stored = parse_header(memoryview(whole)[: len(whole) - 5], META.id)
    assert bytes(stored.good_sections()[1].data) == b"base, deep"
    with pytest.raises(CorruptPayload, match="5 bytes"):
        stored.sections()


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (8, b"\x03", "version 3"),
        (12, b"\0\0\0\0", "sections"),
        (12, b"\xff\xff\xff\xff", "sections"),
        (160, b"\0\0\0\0", "layers"),
        (160, b"\x01\0\0\0", "outside"),
        (164, b"\xff\xff\xff\xff", "tokens"),
        (176, b"\x01\0\0\0", "start"),
        (180, b"\x09", "dtype code 9"),
        (181, b"\x01", "reserved"),
        (184, b"\xff" * 8, "sections end"),
        (192, b"\xff", "decode"),
        (256, b"\x07", "unknown kind"),
        (257, b"\x01", "reserved"),
        (258, b"\x05", "out of order"),
        (264, b"\0" * 8, "gap"),
        (272, b"\xff" * 8, "gap"),
        (280, b"\x01", "reserved"),
    ],
)
def test_forged_field_is_refused(offset: int, value: bytes, message: str) -> None:
    """A valid checksum over wrong fields: what a hostile peer, not an accident, would send."""
    data = packed()
    data[offset : offset + len(value)] = value
    data[240:256] = wire._header_checksum(memoryview(data), 3)
    with pytest.raises(CorruptPayload, match=message):
        parse_object(data, META.id)


def test_object_of_another_key_or_namespace_is_refused() -> None:
    for other in (ObjectId(META.id.namespace, BlockKey(b"k" * 32)), ObjectId(namespace("other"), META.id.key)):
        with pytest.raises(CorruptPayload, match="asked for"):
            parse_object(packed(), other)


@pytest.mark.parametrize("codec_id", ["", "a-codec-name-too-long", "ünicode"])
def test_bad_codec_id_is_a_value_error(codec_id: str) -> None:
    with pytest.raises(ValueError, match="codec id"):
        pack_object(META, codec_id, SECTIONS)


def test_none_too_many_or_repeated_sections_are_value_errors() -> None:
    for sections in ([], [SECTIONS[0]] * 2, [SECTIONS[0]] * (wire.SECTIONS_MAX + 1)):
        with pytest.raises(ValueError, match="section"):
            pack_object(META, "raw-1", sections)


@pytest.mark.parametrize(("model", "stored"), [("é" * 40, "é" * 24), ("caf\udce9/model", "caf?/model")])
def test_model_label_is_cut_between_characters_and_made_text(model: str, stored: str) -> None:
    assert parse_object(pack_object(replace(META, model=model), "raw-1", SECTIONS)).meta.model == stored


def test_room_with_anything_in_it_becomes_the_same_object() -> None:
    room = memoryview(bytearray(b"\xff" * len(packed())))
    found = pack_object(META, "made-up-1", SECTIONS, profile=b"p" * 32, quality=0.005, room_of=lambda size: room[:size])
    assert found == packed()
    assert np.shares_memory(np.frombuffer(found, np.uint8), np.frombuffer(room, np.uint8))
