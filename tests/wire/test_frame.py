import contextlib
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.pieces import pack_frame
from tests.suites import block_meta
from tests.wire.test_object import META, packed

from kvtide.block import BlockLayout, KVDtype
from kvtide.errors import CorruptPayload
from kvtide.types import Section, SectionId, SectionKind
from kvtide.wire import StoredObject, pack_object, parse_object
from kvtide.wire.receiver import FRAME_HEADER_BYTES, parse_frame, parse_frame_header

LAYOUT = BlockLayout(layers=4, tokens=16, kv_heads=1, head_dim=2, dtype=KVDtype.FLOAT16)


def stored() -> StoredObject:
    base = Section(SectionId(SectionKind.ANCHOR, 0, 0, 4), b"base")
    finer = Section(SectionId(SectionKind.DELTA, 3, 1, 3), b"finer")
    return parse_object(pack_object(block_meta(LAYOUT, seed=3), "made-up-1", [base, finer]))


def frame() -> bytearray:
    return bytearray(pack_frame(stored(), 1))


def sealed(header: bytes) -> bytes:
    """A header's 80 bytes with a checksum that holds, before the section's bytes."""
    return header + xxhash.xxh3_128_digest(header) + b"finer"


def test_round_trip_names_object_and_section() -> None:
    header, data = parse_frame(frame())
    assert header == (stored().version_tag, stored().entries[1])
    assert bytes(data) == b"finer"


def test_header_alone_says_how_much_to_read() -> None:
    header = parse_frame_header(frame()[:FRAME_HEADER_BYTES])
    assert header.frame_bytes == len(frame()) == FRAME_HEADER_BYTES + 5


GOLDEN = Path(__file__).parent.parent / "golden"
FORMATS: dict[str, tuple[Callable[[], bytearray], Callable[[bytearray], object]]] = {
    "frame-1.kvf": (frame, parse_frame),
    "object-2.kvt": (packed, lambda data: parse_object(data, META.id).sections()),
}
each_format = pytest.mark.parametrize("name", FORMATS)


@each_format
def test_golden_bytes(name: str) -> None:
    assert bytes(FORMATS[name][0]()) == (GOLDEN / name).read_bytes()


@each_format
@given(data=st.data())
@settings(max_examples=500, deadline=None)
def test_any_flipped_bit_is_found(name: str, data: st.DataObject) -> None:
    make, parse = FORMATS[name]
    damaged = make()
    damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(CorruptPayload):
        parse(damaged)


@each_format
def test_every_cut_and_anything_behind_is_refused(name: str) -> None:
    make, parse = FORMATS[name]
    for stop in range(len(make())):
        with pytest.raises(CorruptPayload):
            parse(make()[:stop])
    with pytest.raises(CorruptPayload, match="came"):
        parse(make() + b"\0")


@given(fields=st.binary(min_size=64, max_size=64))
@settings(max_examples=500, deadline=None)
def test_hostile_header_with_right_checksum_is_refused_or_whole(fields: bytes) -> None:
    with contextlib.suppress(CorruptPayload):
        header, data = parse_frame(sealed(bytes(frame()[:16]) + fields))
        assert len(data) == header.entry.size == 5


@pytest.mark.parametrize(
    ("offset", "fmt", "value", "message"),
    [
        (0, "<8s", b"\x89KVTIDE\n", "not a kvtide frame"),
        (8, "<H", 2, "version 2"),
        (10, "<H", 128, "128-byte"),
        (12, "<I", 1, "version 1"),
        (32, "<B", 9, "unknown kind 9"),
        (33, "<B", 1, "reserved"),
        (36, "<H", 3, "no layers"),
        (40, "<Q", 2**63, "beyond any object"),
        (48, "<Q", 2**64 - 1, "beyond any object"),
        (48, "<Q", 6, "has 102 bytes, 101 came"),
        (56, "<Q", 1, "reserved"),
        (64, "<16s", b"x" * 16, "section"),
    ],
)
def test_each_wrong_field_is_refused(offset: int, fmt: str, value: object, message: str) -> None:
    header = frame()[: FRAME_HEADER_BYTES - 16]
    struct.pack_into(fmt, header, offset, value)
    with pytest.raises(CorruptPayload, match=message):
        parse_frame(sealed(bytes(header)))
